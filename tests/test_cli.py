"""The command line, for real and on machines that lack something."""

import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from process import python

from horovod_sparse import kernels
from horovod_sparse.tools import check, cli

LINES = {line.what: line for line in check.LINES}


def run_check(**environment: Any) -> subprocess.CompletedProcess[str]:
    return python("-m", "horovod_sparse.tools.cli", "check", **environment)


def stub(folder: Path, package: str, body: str) -> None:
    (folder / package).mkdir()
    (folder / package / "__init__.py").write_text(body)


@pytest.mark.full
def test_a_real_run_names_versions_and_succeeds() -> None:
    done = run_check()
    assert done.returncode == 0, done.stdout + done.stderr
    for name in ("torch", "horovod"):
        assert metadata.version(name) in done.stdout
    assert "missing" not in done.stdout
    assert done.stdout.splitlines()[-len(check.WAYS) :] == [f"{way} can run." for way in check.WAYS]


def test_broken_frameworks_are_reported_not_suffered(tmp_path: Path) -> None:
    stub(tmp_path, "torch", "raise ModuleNotFoundError(\"No module named 'torch'\")")
    stub(tmp_path, "tensorflow", "import os; os._exit(9)")
    done = run_check(PYTHONPATH=str(tmp_path))
    assert done.returncode == 0, "NumPy arrays can be reduced"
    lines = {line[9:29].strip(): line for line in done.stdout.splitlines()}
    assert lines["torch"].startswith("missing")
    assert "No module named 'torch' -> pip install torch" in lines["torch"]
    assert lines["tensorflow"].startswith("missing")
    assert "exit status 9" in lines["tensorflow"]
    assert lines["mpi4py"].startswith("ok")
    ways = done.stdout.splitlines()[-len(check.WAYS) :]
    assert ways[1] == "torch with DistributedDataParallel cannot run: torch, DDP"
    assert (
        ways[2].startswith("TensorFlow with Horovod cannot run: tensorflow, ") and ways[3] == "NumPy over MPI can run."
    )
    assert done.stderr == ""


@pytest.mark.parametrize(
    "missing", [[], ["horovod for torch"], ["torch"], ["tensorflow"], ["kernels"], ["mpi4py", "DDP"]]
)
def test_the_ways_that_can_run_are_told(
    missing: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = [check.Finding("missing" if what in missing else "ok", what, "") for what in LINES]
    monkeypatch.setattr(check, "findings", lambda: found)
    status, told = cli.main(["check"]), dict.fromkeys(check.WAYS, "")
    for line in capsys.readouterr().out.splitlines()[len(LINES) :]:
        way, _, reasons = line.partition(" can")
        assert reasons == " run." or reasons.startswith("not run: ")
        told[way] = reasons.removeprefix("not run: ").removesuffix(" run.")
    assert told == {way: ", ".join(n for n in needed if n in missing) for way, needed in check.WAYS.items()}
    assert status == (1 if all(told.values()) else 0)


def is_judged(what: str, mark: str, detail: str) -> None:
    finding = LINES[what].finding()
    assert (finding.what, finding.mark) == (what, mark)
    assert finding.detail.startswith(detail)
    assert bool(finding.remedy) == (mark != "ok")


@pytest.mark.parametrize(
    ("said", "mark", "detail"),
    [
        *(("auto", "ok", f"{name}; this processor has ") for name in kernels.variants()[:1]),
        *(("baseline", "warn", "baseline; this processor has ") for _ in kernels.variants()[:-1][:1]),
        *(("off", "warn", "off; this processor has ") for _ in kernels.variants()[:1]),
        (
            "sse9",
            "missing",
            "HOROVOD_SPARSE_KERNELS must be auto, off or one of avx512, avx2, baseline, neon",
        ),
    ],
)
def test_the_kernels_in_use_are_named(monkeypatch: pytest.MonkeyPatch, said: str, mark: str, detail: str) -> None:
    monkeypatch.setenv(kernels.VARIABLE, said)
    is_judged("kernels", mark, detail)
