"""What needs processes of its own: the order of imports, and training alone."""

from __future__ import annotations

import pytest

from tests.harness.launch import Launch

from .scenario import TF_2

LIMIT = 120.0
"""Seconds; an idle machine needs about a tenth."""
ALONE = Launch("plain")


def _printed(launch: Launch, *arguments: str, code: int = 0, **environment: str) -> str:
    ended = launch.run("-m", *arguments, limit=LIMIT, environment=environment)
    assert ended.code == code, str(ended)
    return ended.output


@pytest.mark.parametrize(
    ("framework", "case"),
    [
        *(("torch", case) for case in ("horovod_first", "ours_first", "ours_only", "function_first")),
        *(pytest.param("tensorflow", case, marks=pytest.mark.full) for case in ("horovod_first", "ours_first")),
    ],
)
def test_order_of_imports(framework: str, case: str) -> None:
    """It decides what is replaced, and has nothing to do with the number of workers."""
    assert " works" in _printed(ALONE, "tests.parallel.imports", framework, case, HOROVOD_SPARSE_FORCE="1")


@pytest.mark.full
@pytest.mark.parallel
def test_two_frameworks_in_one_process() -> None:
    """The one that was imported first reduces its gradients."""
    output = _printed(TF_2, "tests.parallel.imports", "torch", "tensorflow_last")
    assert output.count("tensorflow_last works") == 2, output


def test_a_collective_begins_without_the_interpreters_lock() -> None:
    """Otherwise a process can wait for ever when another rank ends: see `release_gil` in tools/build_horovod.sh."""
    assert "another thread ran" in _printed(ALONE, "tests.parallel.unlocked")


@pytest.mark.parametrize("force", ["1", "0"])
def test_one_worker_trains(force: str) -> None:
    assert " works" in _printed(ALONE, "tests.parallel.one_worker", HOROVOD_SPARSE_FORCE=force)


@pytest.mark.parametrize(
    ("framework", "force", "optimize"),
    [
        ("torch", "0", ""),
        # No assertion does any work.
        pytest.param("torch", "1", "1", marks=pytest.mark.full),
        pytest.param("tensorflow", "0", "1", marks=pytest.mark.full),
    ],
)
def test_one_worker_reduces(framework: str, force: str, optimize: str) -> None:
    case = ("tests.parallel.imports", framework, "ours_only")
    assert " works" in _printed(ALONE, *case, HOROVOD_SPARSE_FORCE=force, PYTHONOPTIMIZE=optimize)


@pytest.mark.full
def test_a_tape_is_refused_in_an_elastic_job() -> None:
    text = "RuntimeError: compression must be hvd.Compression.none in an elastic job of TensorFlow, got TopK("
    assert text in _printed(ALONE, "tests.parallel.imports", "tensorflow", "ours_only", code=1, HOROVOD_ELASTIC="1")
