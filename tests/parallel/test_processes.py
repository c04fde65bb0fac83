"""What needs processes of its own: the order of imports, and training alone."""

from __future__ import annotations

import pytest

from .launch import Launch
from .scenario import TF_2, TF_GLOO_2

LIMIT = 120.0
"""Seconds; an idle machine needs about a tenth."""
ALONE = Launch("plain")


def _run_alone(*arguments: str, force: str = "1", optimize: str = "") -> None:
    environment = {"HOROVOD_SPARSE_FORCE": force, "PYTHONOPTIMIZE": optimize}
    ended = ALONE.run("-m", *arguments, limit=LIMIT, environment=environment)
    assert ended.code == 0, str(ended)
    assert " works" in ended.output


in_both = pytest.mark.parametrize("framework", ["torch", pytest.param("tensorflow", marks=pytest.mark.full)])


@in_both
@pytest.mark.parametrize("case", ["horovod_first", "ours_first", "ours_only", "function_first"])
def test_order_of_imports(framework: str, case: str) -> None:
    """It decides what is replaced, and has nothing to do with the number of workers."""
    _run_alone("parallel.imports", framework, case)


@pytest.mark.parallel
@pytest.mark.parametrize(
    ("launch", "trains", "case"),
    [
        (TF_2, "torch", "tensorflow_last"),
        pytest.param(TF_GLOO_2, "tensorflow", "torch_last", marks=pytest.mark.full),
    ],
    ids=str,
)
def test_two_frameworks_in_one_process(launch: Launch, trains: str, case: str) -> None:
    """The one that was imported first reduces its gradients."""
    ended = launch.run("-m", "parallel.imports", trains, case, limit=LIMIT)
    assert ended.code == 0, str(ended)
    assert ended.output.count(f"{case} works") == 2, str(ended)


def test_a_collective_begins_without_the_interpreters_lock() -> None:
    """Otherwise a process can wait for ever when another rank ends: see `release_gil` in docker/build_horovod.sh."""
    ended = ALONE.run("-m", "parallel.unlocked", limit=LIMIT)
    assert ended.code == 0, str(ended)
    assert "another thread ran" in ended.output


@pytest.mark.parametrize("force", ["1", "0"])
def test_one_worker_trains(force: str) -> None:
    _run_alone("parallel.one_worker", force=force)


@in_both
# No assertion does any work.
@pytest.mark.parametrize(("force", "optimize"), [("0", ""), pytest.param("1", "1", marks=pytest.mark.full)])
def test_one_worker_reduces(framework: str, force: str, optimize: str) -> None:
    _run_alone("parallel.imports", framework, "ours_only", force=force, optimize=optimize)


@pytest.mark.full
def test_a_tape_is_refused_in_an_elastic_job() -> None:
    ended = ALONE.run(
        "-m", "parallel.imports", "tensorflow", "ours_only", limit=LIMIT, environment={"HOROVOD_ELASTIC": "1"}
    )
    assert ended.code == 1, str(ended)
    assert (
        "RuntimeError: compression must be hvd.Compression.none in an elastic job of TensorFlow, got TopK("
        in ended.output
    )
