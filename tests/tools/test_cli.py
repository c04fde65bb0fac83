"""The command line, for real and on machines that lack something."""

from importlib import metadata
from pathlib import Path

import pytest

from horovod_sparse import kernels
from horovod_sparse.tools import check, cli
from tests.harness.process import python

CHECK = ("-m", "horovod_sparse.tools.cli", "check")
BROKEN = {
    "torch": "raise ModuleNotFoundError(\"No module named 'torch'\")",
    "tensorflow": "import os; os._exit(9)",
}


@pytest.mark.full
def test_a_real_run_names_versions_and_succeeds() -> None:
    done = python(*CHECK, limit=300)
    assert done.returncode == 0, done.stdout + done.stderr
    for name in ("torch", "horovod"):
        assert metadata.version(name) in done.stdout
    assert "missing" not in done.stdout
    assert done.stdout.splitlines()[-len(check.WAYS) :] == [f"{way} can run." for way in check.WAYS]


def test_broken_frameworks_are_reported_not_suffered(tmp_path: Path) -> None:
    for package, body in BROKEN.items():
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text(body)
    done = python(*CHECK, PYTHONPATH=str(tmp_path))
    assert done.returncode == 0, "NumPy arrays can be reduced"
    lines = {line[9:29].strip(): line for line in done.stdout.splitlines()}
    assert lines["torch"].startswith("missing")
    assert "No module named 'torch' -> pip install torch" in lines["torch"]
    assert lines["tensorflow"].startswith("missing")
    assert "exit status 9" in lines["tensorflow"]
    assert lines["mpi4py"].startswith("ok")
    ways = done.stdout.splitlines()[-len(check.WAYS) :]
    assert ways[1] == "torch with DistributedDataParallel cannot run: torch, DDP"
    assert ways[2].startswith("TensorFlow with Horovod cannot run: tensorflow, ")
    assert ways[3] == "NumPy over MPI can run."
    assert done.stderr == ""


def test_only_what_is_installed_is_spoken_of(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """If nothing is, everything is named that could be."""
    there: set[str] = set()
    monkeypatch.setattr(check, "find_spec", lambda package: package if package in there else None)
    monkeypatch.setattr(check, "finding", lambda what: check.Finding("ok", what, "there"))
    assert check.present() == [*check.LINES]
    there.add("torch")
    assert cli.main(["check"]) == 0
    report = capsys.readouterr().out
    assert not any(word in report.lower() for word in ("tensorflow", "mpi4py", "numpy"))
    assert "torch with Horovod can run." in report and "horovodrun" in report
    there.add("tensorflow")
    assert check.present() == [what for what in check.LINES if what != "mpi4py"]


def test_a_machine_where_nothing_can_run_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "findings", lambda: [check.Finding("missing", what, "") for what in check.LINES])
    assert cli.main(["check"]) == 1


@pytest.mark.parametrize(
    ("said", "mark", "detail"),
    [
        *(("auto", "ok", f"{name}; this processor has ") for name in kernels.variants()[:1]),
        *(("baseline", "warn", "baseline; this processor has ") for _ in kernels.variants()[:-1][:1]),
        *(("off", "warn", "off; this processor has ") for _ in kernels.variants()[:1]),
        ("sse9", "missing", "HOROVOD_SPARSE_KERNELS must be auto, off or one of avx512, avx2, baseline, neon"),
    ],
)
def test_the_kernels_in_use_are_named(monkeypatch: pytest.MonkeyPatch, said: str, mark: str, detail: str) -> None:
    monkeypatch.setenv(kernels.VARIABLE, said)
    finding = check.finding("kernels")
    assert finding.mark == mark and finding.detail.startswith(detail)
    assert bool(finding.remedy) == (mark != "ok")
