"""The container files, read and not run: what they name is there, and what must agree does."""

from __future__ import annotations

import os
import re
import shutil
import stat
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

import horovod_sparse
from horovod_sparse import kernels

yaml = pytest.importorskip("yaml")

ROOT = Path(__file__).parent.parent


def run(command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Of bash, in the repository."""
    env = {**os.environ, **environment}
    return subprocess.run(["bash", "-c", command], cwd=ROOT, env=env, capture_output=True, text=True, check=False)


def test_pins_are_the_constraints() -> None:
    done = run("source docker/setup.sh; choose_pins", TORCH="", TENSORFLOW="")
    assert done.stdout == (ROOT / "constraints.txt").read_text()


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


def test_one_version_everywhere() -> None:
    version = horovod_sparse.__version__
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == version
    newest = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest is not None
    assert newest.group(1) == version


@pytest.mark.skipif(not Path(sys.prefix, ".setup").exists(), reason="the environment is not one of `make setup`")
def test_make_setup_has_installed_what_tests_skip_without() -> None:
    for name in ("triton", "xdist", "mpi4py", "matplotlib", "sklearn"):
        assert find_spec(name) is not None, f"{name} is missing: run 'make clean setup'"
    assert kernels.compiled(), "the kernels are missing: see .venv/setup.log"
