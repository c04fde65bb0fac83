"""The container files, read and not run: what they name is there, and what must agree does."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import stat
import subprocess
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import horovod_sparse
from horovod_sparse import kernels

yaml = pytest.importorskip("yaml")

ROOT = Path(__file__).parent.parent
DOCKER = ROOT / "docker"
SCRIPTS = sorted([*DOCKER.glob("*.sh"), ROOT / ".ci" / "run"])
DOCKERFILES = sorted(DOCKER.glob("*.Dockerfile"))


@dataclass
class Stage:
    """A stage of a Dockerfile: its base and its instructions, (keyword, arguments)."""

    name: str
    base: str
    instructions: list[tuple[str, str]]

    def all(self, keyword: str) -> list[str]:
        return [arguments for found, arguments in self.instructions if found == keyword]


def read_stages(dockerfile: Path) -> list[Stage]:
    """The stages in order; the arguments before the first one are left out."""
    lines = [line for line in dockerfile.read_text().splitlines() if not line.lstrip().startswith("#")]
    stages: list[Stage] = []
    for line in "\n".join(lines).replace("\\\n", " ").splitlines():
        keyword, _, arguments = line.partition(" ")
        if keyword == "FROM":
            base, _, name = arguments.partition(" AS ")
            stages.append(Stage(name, base, []))
        elif keyword and stages:
            stages[-1].instructions.append((keyword, arguments))
    return stages


def lineage(stages: list[Stage], stage: Stage) -> list[Stage]:
    """The stage after all that it is built on."""
    below = [one for one in stages if one.name == stage.base]
    return [*lineage(stages, below[0]), stage] if below else [stage]


def copied(stage: Stage) -> list[str]:
    """What a stage copies out of the repository."""
    sources: list[str] = []
    for arguments in stage.all("COPY"):
        if "--from=" not in arguments:
            sources += [word for word in arguments.split()[:-1] if not word.startswith("--")]
    return sources


def run(command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Of bash, in the repository."""
    env = {**os.environ, **environment}
    return subprocess.run(["bash", "-c", command], cwd=ROOT, env=env, capture_output=True, text=True, check=False)


def compose() -> dict[str, Any]:
    return dict(yaml.safe_load((DOCKER / "compose.yaml").read_text()))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_scripts_are_well_formed(script: Path) -> None:
    done = run(f"bash -n {script}")
    assert (done.returncode, done.stderr) == (0, "")
    assert bool(script.stat().st_mode & stat.S_IXUSR) == (script.name != "common.sh"), (
        "all but what is sourced can be run"
    )


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda path: path.stem)
def test_stages_use_what_is_there(dockerfile: Path) -> None:
    stages = read_stages(dockerfile)
    for number, stage in enumerate(stages):
        earlier = {one.name for one in stages[:number]}
        used = re.findall(r"from=([^\s,]+)", " ".join(arguments for _, arguments in stage.instructions))
        assert set(used) <= earlier
        assert stage.base in earlier | {"scratch", "$BASE"}
        assert all((ROOT / source).exists() for source in copied(stage))


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda path: path.stem)
def test_stages_run_scripts_that_were_copied(dockerfile: Path) -> None:
    stages = read_stages(dockerfile)
    ran = 0
    for stage in stages:
        sources = {source for below in lineage(stages, stage) for source in copied(below)}
        for name in re.findall(r"/(\w+\.sh)\b", " ".join(stage.all("RUN"))):
            assert sources & {".", f"docker/{name}"}
            ran += 1
    assert ran >= 4


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda path: path.stem)
def test_horovod_is_built_in_a_stage_that_the_image_is_not_made_of(dockerfile: Path) -> None:
    stages = read_stages(dockerfile)
    (builder,) = (stage for stage in stages if any("build_horovod.sh" in source for source in copied(stage)))
    assert builder not in lineage(stages, stages[-1])
    assert any(f"--from={builder.name} " in arguments for arguments in stages[-1].all("COPY"))


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda path: path.stem)
def test_nothing_runs_as_root(dockerfile: Path) -> None:
    stages = read_stages(dockerfile)
    users = [user for stage in lineage(stages, stages[-1]) for user in stage.all("USER")]
    assert users
    assert users[-1] not in ("root", "0")


def test_both_images_have_the_same_stages_above_their_system() -> None:
    marker = "FROM system AS frameworks"
    cpu, gpu = (path.read_text().partition(marker) for path in DOCKERFILES)
    assert cpu[1] and cpu[2] == gpu[2]


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda path: path.stem)
def test_versions_are_those_of_the_constraints_alone(dockerfile: Path) -> None:
    arguments = [name for stage in read_stages(dockerfile) for name in stage.all("ARG")]
    assert {"TORCH", "TENSORFLOW"} <= set(arguments), "with a default there would be two places for a version"
    assert not re.search(r"(torch|tensorflow|horovod)\S*==", dockerfile.read_text())


def choose_pins(**environment: str) -> dict[str, str]:
    """Version by name, for the Python of any line."""
    done = run("source docker/setup.sh; choose_pins", **{"TORCH": "", "TENSORFLOW": "", **environment})
    assert done.returncode == 0, done.stderr
    lines = [line.partition(";")[0].strip() for line in done.stdout.splitlines() if line and not line.startswith("#")]
    return dict(line.split("==") for line in lines)


def test_pins_are_the_constraints() -> None:
    done = run("source docker/setup.sh; choose_pins", TORCH="", TENSORFLOW="")
    assert done.stdout == (ROOT / "constraints.txt").read_text()


def test_another_release_of_a_framework_leaves_the_other_pins() -> None:
    pins = choose_pins()
    torch, both = choose_pins(TORCH="2.9.1"), choose_pins(TORCH="2.9.1", TENSORFLOW="2.20.0")
    assert torch["torch"] == both["torch"] == "2.9.1"
    assert both["tensorflow-cpu"] == "2.20.0"
    assert {"setuptools", "ruff", "pytest", "mpi4py"} <= torch.keys() < pins.keys()
    # What the frameworks ask for in versions of their own.
    assert not {"numpy", "keras", "protobuf", "sympy", "triton"} & torch.keys()
    assert {name for name in torch if torch[name] != pins[name]} == {"torch"}


@pytest.mark.parametrize(
    ("before", "until", "frameworks"),
    [
        ("", "ddp", "torch, without Horovod"),
        ("torch, without Horovod", "ddp", "torch, without Horovod"),
        ("torch, without Horovod", "demo", "torch, for the demo"),
        ("torch, without Horovod", "''", "torch tensorflow"),
        ("torch, for the demo", "ddp", "torch, for the demo"),
        ("torch tensorflow", "ddp", "torch tensorflow"),
        ("", "demo", "torch, for the demo"),
        ("", "''", "torch tensorflow"),
        ("torch, for the demo", "demo", "torch, for the demo"),
        ("torch, for the demo", "''", "torch tensorflow"),
        ("torch tensorflow", "demo", "torch tensorflow"),
        ("torch", "demo", "torch"),
        ("torch", "''", "torch"),
    ],
)
def test_the_demo_sets_up_no_more_than_it_needs(tmp_path: Path, before: str, until: str, frameworks: str) -> None:
    stamp = tmp_path / "stamp"
    if before:
        stamp.write_text(f"hash\n0\n{before}\n")
    done = run(f"source docker/setup.sh; stamp='{stamp}'; read_settings {until}; echo $frameworks", FRAMEWORKS="")
    assert done.stdout == f"{frameworks}\n", done.stderr


def test_setup_refuses_a_step_that_it_does_not_know() -> None:
    done = run("docker/setup.sh everything")
    assert done.returncode == 1
    assert "got 'everything'" in done.stderr


def test_four_hosts_that_mpirun_is_told_of() -> None:
    services = compose()["services"]
    hosts = {name for name, service in services.items() if "hostname" in service}
    command = services["head"]["command"]
    assert len(hosts) == 4
    assert set(command[command.index("--host") + 1].split(",")) == hosts
    assert all(services[host]["hostname"] == host for host in hosts)
    assert set(services["head"]["depends_on"]) == hosts - {"head"}
    assert all((ROOT / word).exists() for word in command if word.endswith(".py"))


def test_hosts_are_containers_of_one_image_that_share_their_keys() -> None:
    whole = compose()
    for service in whole["services"].values():
        build = service["build"]
        assert (DOCKER / build["context"]).resolve() == ROOT.resolve()
        assert (ROOT / build["dockerfile"]).is_file()
        assert [volume.partition(":")[0] for volume in service["volumes"]] == list(whole["volumes"])
    assert len({service["image"] for service in whole["services"].values()}) == 1
    for name, service in whole["services"].items():
        if name not in ("head", "keys"):
            assert shlex.split(service["command"]) == ["docker/ssh.sh", "serve"]
            assert "keys" in service["depends_on"]


def test_keys_are_made_once_and_trust_nothing_else(tmp_path: Path) -> None:
    (tmp_path / ".ssh").mkdir(mode=0o700)
    assert shutil.which("ssh-keygen"), "Debian's openmpi-bin brings it"
    contents = []
    for _ in range(2):
        done = run("docker/ssh.sh keys", HOME=str(tmp_path))
        assert done.returncode == 0, done.stderr
        contents.append({path.name: path.read_text() for path in (tmp_path / ".ssh").iterdir()})
    keys = contents[0]
    assert contents[1] == keys
    for private in ("id_ed25519", "host_key"):
        assert stat.S_IMODE((tmp_path / ".ssh" / private).stat().st_mode) == 0o600
    assert keys["known_hosts"] == f"* {keys['host_key.pub']}"
    assert keys["authorized_keys"] == keys["id_ed25519.pub"] != keys["host_key.pub"]
    assert "StrictHostKeyChecking yes" in keys["config"]


def test_ssh_refuses_what_it_does_not_know() -> None:
    done = run("docker/ssh.sh start")
    assert done.returncode == 1
    assert "must be 'keys' or 'serve', got 'start'" in done.stderr


def pretend(folder: Path, **programs: str) -> str:
    """A PATH where only bash's companions and these programs are."""
    for name in ("bash", "dirname", "basename", "mktemp", "mkdir", "rm"):
        (folder / name).symlink_to(str(shutil.which(name)))
    for name, body in programs.items():
        (folder / name).write_text(f"#!/bin/sh\n{body}\n")
        (folder / name).chmod(0o755)
    return str(folder)


@pytest.mark.parametrize(
    ("programs", "expected"),
    [
        ({"id": "echo 1000"}, "needs root"),
        ({"id": "echo 0"}, "no buildah: install it"),
        ({"id": "echo 0", "buildah": "", "ip": ""}, "no debootstrap: install it"),
        ({"id": "echo 0", "buildah": "", "ip": "", "debootstrap": ""}, "STORAGE must be a new folder"),
    ],
)
def test_building_without_a_daemon_says_what_it_lacks(programs: dict[str, str], expected: str, tmp_path: Path) -> None:
    path = pretend(tmp_path, **programs)
    done = run(f"{DOCKER}/build_without_daemon.sh", PATH=path, STORAGE=str(tmp_path), BASE="")
    assert done.returncode == 1
    assert expected in done.stderr
    assert (tmp_path / "id").exists(), "nothing that was there before is removed"


def test_the_log_of_building_without_a_daemon_is_a_new_file(tmp_path: Path) -> None:
    """This runs as root, and anyone may write to the folder of temporary files."""
    victim, temporary = tmp_path / "victim", tmp_path / "temporary"
    temporary.mkdir()
    victim.write_text("kept")
    for name in ("build_without_daemon.log", "build_without_daemon", "log"):
        (temporary / name).symlink_to(victim)
    programs = {
        "id": "echo 0",
        "buildah": "echo built; exit 1",
        "ip": "",
        "seq": "",
        "sleep": "",
        "tail": "",
        "grep": "",
    }
    done = run(f"{DOCKER}/build_without_daemon.sh", PATH=pretend(tmp_path, **programs), TMPDIR=str(temporary), BASE="x")
    assert done.returncode == 1
    assert victim.read_text() == "kept"
    (log,) = re.findall(r"the whole log is (\S+)", done.stderr)
    assert Path(log).read_text() == "built\n" and Path(log).parent.stat().st_mode & 0o777 == 0o700
    left = {path.name for path in temporary.iterdir() if not path.is_symlink()}
    assert left == {Path(log).parent.name}, "the storage is removed"


def test_the_hosted_ci_runs_the_same_script() -> None:
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())
    steps = [step["run"] for job in workflow["jobs"].values() for step in job["steps"] if "run" in step]
    assert [step.split()[0] for step in steps] == ["docker/ci.sh"]


def test_ci_makes_targets_that_there_are() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    text = (DOCKER / "ci.sh").read_text() + (DOCKER / "build_without_daemon.sh").read_text()
    wanted = {
        name for line in re.findall(r"(?:inside|\"\$\{container\[@\]\}\") make (.*)", text) for name in line.split()
    }
    assert wanted
    assert wanted <= targets


def test_one_version_everywhere() -> None:
    version = horovod_sparse.__version__
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == version
    newest = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest is not None
    assert newest.group(1) == version


def test_the_papers_that_are_cited_are_those_of_the_algorithms() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    numbers = {
        identifier["value"].removeprefix("arXiv:")
        for reference in citation["references"]
        for identifier in reference["identifiers"]
    }
    sources = "".join(path.read_text() for path in (ROOT / "horovod_sparse" / "compressors").glob("*.py"))
    assert numbers == set(re.findall(r"arxiv\.org/abs/([\d.]+\d)", sources))


def run_ci(folder: Path, fails_at: str = "nothing") -> tuple[int, list[str]]:
    """Exit status of docker/ci.sh with a Docker that does nothing, and the commands that this was given."""
    log = folder / "commands"
    (folder / "docker").write_text(f'#!/bin/sh\necho "$*" >>{log}\ncase "$*" in *"{fails_at}"*) exit 3 ;; esac\n')
    (folder / "docker").chmod(0o755)
    done = run("docker/ci.sh --build-arg A=b", PATH=f"{folder}{os.pathsep}{os.environ['PATH']}")
    return done.returncode, log.read_text().splitlines()


def test_ci_builds_checks_trains_and_clears_up(tmp_path: Path) -> None:
    status, commands = run_ci(tmp_path)
    assert status == 0
    assert commands[0].startswith("build ") and "--build-arg A=b" in commands[0]
    assert all(command.startswith(("run --rm", "compose")) for command in commands[1:])
    done = " ".join(commands[1:])
    assert all(part in done for part in ("make test-all", "make package", "make demo"))
    assert commands[-2].endswith("head") and commands[-1].endswith("down --volumes")


def test_ci_ends_with_the_first_failure(tmp_path: Path) -> None:
    status, commands = run_ci(tmp_path, fails_at="test-all")
    assert status != 0
    assert "test-all" in commands[-1]


@pytest.mark.skipif(not Path(sys.prefix, ".setup").exists(), reason="the environment is not one of `make setup`")
def test_make_setup_has_installed_what_tests_skip_without() -> None:
    for name in ("triton", "xdist", "mpi4py", "matplotlib", "sklearn"):
        assert find_spec(name) is not None, f"{name} is missing: run 'make clean setup'"
    assert kernels.compiled(), "the kernels are missing: see .venv/setup.log"
