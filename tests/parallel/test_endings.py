"""What no rank can take part in ends the launch with an error that says why, and nobody waits for ever."""

from __future__ import annotations

import pytest

from tests.harness.launch import Launch

from .scenario import MPI_2, TF_2, TF_GLOO_2, TORCHRUN_4

pytestmark = pytest.mark.parallel

LIMIT = 120.0
"""Seconds; an idle machine needs about a tenth."""


def _run(launch: Launch, *module: str) -> str:
    # Without Horovod's own end of stalls: the launch has to end because a rank said why, not because all waited.
    environment = {"HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "0"}
    ended = launch.run("-m", *module, limit=LIMIT, environment=environment)
    assert ended.code is not None, str(ended)
    assert ended.code != 0, str(ended)
    assert "trained to the end" not in ended.output, str(ended)
    return ended.output


@pytest.mark.full
def test_stock_join_is_an_error_not_a_hang() -> None:
    output = _run(MPI_2, "tests.parallel.endings")
    assert "AssertionError: hvd.join() was called while TopK(" in output
    assert "docs/troubleshooting.md" in output


@pytest.mark.full
@pytest.mark.parametrize(("launch", "case"), [(TF_2, "beside_buckets"), (TF_GLOO_2, "beside_an_embedding")], ids=str)
def test_a_first_gradient_on_one_rank_is_an_error_not_a_hang(launch: Launch, case: str) -> None:
    output = _run(launch, "tests.parallel.tf.endings", case)
    assert "rank 1: variables must get their first gradient" in output


@pytest.mark.full
def test_an_exception_in_fit_with_local_updates_ends_all() -> None:
    assert "LookupError: rank 1 has enough" in _run(TF_2, "tests.parallel.tf.endings", "in_fit")


@pytest.mark.full
def test_a_rank_of_a_sharded_model_that_raises_ends_all() -> None:
    assert "rank 1 has enough" in _run(TORCHRUN_4, "tests.parallel.ddp.endings")
