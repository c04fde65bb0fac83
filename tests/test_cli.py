"""The command line, for real and on machines that lack something."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import pytest

from horovod_sparse import kernels
from horovod_sparse.tools import check, cli
from horovod_sparse.tools.probes import Answer

COMPLETE = check.Machine(
    answers={
        "numpy": Answer({"version": "2.0"}),
        "mpi4py": Answer({"version": "4.0", "library": "Open MPI v4.1.4"}),
        "torch": Answer({"version": "2.13.0", "cuda": False}),
        "horovod_torch": Answer({"controllers": ["MPI", "Gloo"], "nccl": False}),
        "seam": Answer(),
        "tensorflow": Answer({"version": "2.21.0"}),
        "horovod_tensorflow": Answer({"built": True}),
        "tensorflow_seam": Answer(),
    },
    programs={"mpirun": "mpirun (Open MPI) 4.1.4", "horovodrun": "0.28.1"},
    horovod="0.28.1",
)


def answering(**answers: Answer) -> check.Machine:
    return replace(COMPLETE, answers={**COMPLETE.answers, **answers})


def marks(machine: check.Machine) -> Mapping[str, str]:
    return {finding.what: finding.mark for finding in check.judge(machine) if finding.mark != "ok"}


def run_check(**environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "horovod_sparse.tools.cli", "check"]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment}, check=False)


def stub(folder: Path, package: str, body: str) -> None:
    (folder / package).mkdir()
    (folder / package / "__init__.py").write_text(body)


def test_a_real_run_names_versions_and_succeeds() -> None:
    done = run_check()
    assert done.returncode == 0, done.stdout + done.stderr
    for name in ("torch", "numpy", "horovod", "mpi4py"):
        assert metadata.version(name) in done.stdout
    assert "missing" not in done.stdout
    assert done.stdout.splitlines()[-1] == "Training with torch can run."


def test_broken_frameworks_are_reported_not_suffered(tmp_path: Path) -> None:
    stub(tmp_path, "torch", "raise ModuleNotFoundError(\"No module named 'torch'\")")
    stub(tmp_path, "tensorflow", "import os; os._exit(9)")
    done = run_check(PYTHONPATH=str(tmp_path))
    assert done.returncode == 1
    lines = {line[9:29].strip(): line for line in done.stdout.splitlines()}
    assert lines["torch"].startswith("missing")
    assert "No module named 'torch' -> pip install torch" in lines["torch"]
    assert lines["tensorflow"].startswith("warn")
    assert "exit status 9" in lines["tensorflow"]
    assert lines["numpy"].startswith("ok")
    assert done.stdout.splitlines()[-1].startswith("Training with torch cannot run: torch, ")
    assert done.stderr == ""


def test_the_command_imports_no_framework() -> None:
    code = "import horovod_sparse.tools.cli, json, sys; print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"torch", "tensorflow", "horovod", "mpi4py"} & set(json.loads(done.stdout))


def test_nothing_to_say_about_a_complete_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("horovod_sparse.kernels.available", lambda: True)
    assert marks(COMPLETE) == {}


@pytest.mark.parametrize(
    ("machine", "expected"),
    [
        (answering(tensorflow=Answer(error="no"), horovod_tensorflow=Answer(error="no")), "warn"),
        (answering(mpi4py=Answer(error="no")), "warn"),
        (answering(horovod_torch=Answer({"controllers": ["Gloo"], "nccl": False})), "warn"),
        (answering(torch=Answer({"version": "2.13.0", "cuda": True})), "warn"),
        (replace(COMPLETE, programs={"mpirun": None, "horovodrun": None}), "warn"),
        (replace(COMPLETE, horovod="0.27.0"), "warn"),
        (replace(COMPLETE, horovod=None), "missing"),
        (answering(numpy=Answer(error="no")), "missing"),
        (answering(horovod_torch=Answer(error="no")), "missing"),
        (answering(horovod_torch=Answer({"controllers": [], "nccl": False})), "missing"),
        (answering(seam=Answer(error="no")), "missing"),
    ],
)
def test_only_what_torch_training_needs_is_missing(machine: check.Machine, expected: str) -> None:
    found = marks(machine)
    assert found
    assert ("missing" in found.values()) == (expected == "missing")


@pytest.mark.parametrize(
    ("said", "mark", "detail"),
    [
        *(("auto", "ok", f"{name}; this processor has ") for name in kernels.variants()[:1]),
        *(("baseline", "warn", f"baseline, and {name} is faster; this") for name in kernels.variants()[:-1][:1]),
        ("off", "warn", "turned off: framework operations are used; this processor has "),
        ("sse9", "missing", "HOROVOD_SPARSE_KERNELS must be auto, off or one of avx512, avx2, baseline, neon, and"),
    ],
)
def test_the_kernels_in_use_are_named(monkeypatch: pytest.MonkeyPatch, said: str, mark: str, detail: str) -> None:
    monkeypatch.setenv(kernels.VARIABLE, said)
    finding = _kernels_finding()
    assert finding.mark == mark
    assert finding.detail.startswith(detail)


def test_kernels_that_are_not_compiled_are_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("horovod_sparse.kernels._native", None)
    finding = _kernels_finding()
    assert (finding.mark, finding.detail) == ("warn", "not compiled: framework operations are used")


def _kernels_finding() -> check.Finding:
    return next(finding for finding in check.judge(COMPLETE) if finding.what == "kernels")


def test_every_shortcoming_comes_with_its_remedy() -> None:
    bare = check.Machine(
        answers={name: Answer(error="not there") for name in COMPLETE.answers},
        programs={"mpirun": None, "horovodrun": None},
        horovod=None,
    )
    assert all(finding.remedy for finding in check.judge(bare) if finding.mark != "ok")


def test_a_command_is_required(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main([])
    assert ended.value.code == 2
    assert "COMMAND" in capsys.readouterr().err


@pytest.mark.full
def test_bench_times_the_compressors_and_checks_what_they_select(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("horovod.torch")
    table, options = tmp_path / "table.json", ["--kernels", "auto" if kernels.available() else "off"]
    small = ["bench", "--sizes", "10k", "--ratios", "0.01", "--repetitions", "2", *options]
    assert cli.main([*small, "--json", str(table)]) == 0
    printed = capsys.readouterr().out
    results = json.loads(table.read_text())["results"]
    assert {"SIDCo, exponential", "TopK", "DGC", "MiCRO, 8 workers", "decompress, 4 workers"} <= {
        result["title"] for result in results
    }
    for result in results:
        assert len(result["quotients"]) == 2 and all(quotient > 0 for quotient in result["quotients"])
        assert f"{result['title']:31}  {result['units']:.2f}".split() in [
            line.split()[: len(result["title"].split()) + 1] for line in printed.splitlines()
        ]


def test_bench_holds_no_bar_under_other_conditions(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("horovod.torch")
    with pytest.raises(SystemExit, match="--bars needs rows"):
        cli.main(
            ["bench", "--sizes", "10k", "--repetitions", "1", "--rows", "RandomBlock", "--bars", "--kernels", "off"]
        )
