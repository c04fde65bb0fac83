"""The laws of `test_laws`, and the data's whole way, with buckets that select on their device: interpreted, on the CPU."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from horovod_sparse.compressors.base import Compressor
from horovod_sparse.compressors.momentum import MomentumCorrection
from horovod_sparse.compressors.sidco import SIDCo
from horovod_sparse.compressors.topk import TopK
from horovod_sparse.kernels.gpu.bucket import selector_for
from horovod_sparse.kernels.gpu.tiles import NUMBERS
from horovod_sparse.torch.device import on_gpu
from horovod_sparse.torch.ops import TorchOps
from tests.compressors import test_laws as laws
from tests.compressors.test_backends import Case, assert_same, observe
from tests.core import test_feedback, test_step
from tests.harness.table import BACKENDS, COMPRESSORS, Backend, Row, gradients, gradients_of
from tests.harness.worker import Worker
from tests.harness.workers import make_worker

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def _worker(ops: TorchOps, compressor: Compressor, **where: Any) -> Worker:
    return Worker(ops, compressor, device_selector=partial(selector_for, groups=2), **where)


TRITON = Backend("torch-triton", TorchOps(), lambda x: torch.from_numpy(np.array(x)), lambda x: x.numpy(), _worker)
DEFAULT = "sidco-exponential-robust"
ESTIMATED = (
    DEFAULT,
    "sidco-gamma-robust",
    "sidco-gpareto-robust",
    "sidco-one-stage",
    "dgc",
    "dgc-momentum",
    "dgc-unmasked",
)
"""What does not choose the same everywhere where an estimate is far off."""
SAME = ("topk-union", "threshold", "redsync", "gaussiank", "micro", "micro-paper", "randomk", "randomblock-own")
NAMES = ("topk", *ESTIMATED, *SAME)
ROWS = [row for row in COMPRESSORS if row.name in NAMES]


def test_the_rows_select_on_the_device() -> None:
    assert len(ROWS) == len(NAMES)
    for row in ROWS:
        _, bucket = laws.one_bucket(TRITON, row, 500, 0.1)
        assert bucket.device is not None
    other = next(row for row in COMPRESSORS if row.name == "sidco-gamma-paper")
    assert laws.one_bucket(TRITON, other, 500, 0.1)[1].device is None


@pytest.mark.full
@pytest.mark.parametrize("row", [row for row in ROWS if row.name in ("topk", "threshold", DEFAULT)], ids=str)
def test_laws(row: Row) -> None:
    laws.test_without_residual_nothing_is_kept(TRITON, row)
    laws.test_degenerate_gradients_neither_crash_nor_starve(TRITON, row, "ties")
    laws.test_without_residual_a_step_that_failed_leaves_nothing(TRITON, row, None)


@pytest.mark.parametrize("momentum", [None, 0.9])
def test_what_a_parameter_has_kept_waits_while_it_has_no_gradient(momentum: float | None) -> None:
    test_feedback.test_what_a_parameter_has_kept_waits_while_it_has_no_gradient(TRITON, momentum)


def test_who_gives_a_step_up_is_named_and_all_go_on() -> None:
    test_step.test_who_gives_a_step_up_is_named_and_all_go_on(TRITON)


@pytest.mark.full
def test_laws_of_states() -> None:
    """With the number of stages that SIDCo has come to, and while the ratio follows a schedule."""
    (row,) = (row for row in ROWS if row.name == DEFAULT)
    laws.test_a_saved_state_continues_identically(TRITON, row, 7)
    laws.test_every_compressor_follows_a_schedule(TRITON, row)


OPTIONS: dict[str, dict[str, Any]] = {
    "momentum": {"momentum": MomentumCorrection(0.5)},
    "unmasked": {"momentum": MomentumCorrection(0.5, masking=False)},
    "learning-rate": {"lr_in_residual": True},
    "layers": {"granularity": "layer"},
}
SHAPES = {"a": (12, 20), "b": (100,), "c": (77,)}


@pytest.mark.parametrize(
    ("name", "options"),
    [*(("topk", options) for options in OPTIONS.values()), *((name, {}) for name in SAME)],
    ids=[*OPTIONS, *SAME],
)
def test_it_does_what_numpy_does(name: str, options: dict[str, Any]) -> None:
    """Two workers, several parameters, one of them without a gradient in a step, and one gradient that is not finite."""
    rng, row = np.random.default_rng(0), next(row for row in ROWS if row.name == name)
    steps: list[Any] = [[gradients_of(SHAPES, rng) for _ in range(2)] for _ in range(5)]
    for of_worker in steps[2]:
        of_worker["c"] = None
    for of_worker in steps[1]:
        # Its entries do not lie one after the other.
        of_worker["a"] = np.asfortranarray(of_worker["a"])
    for number in (0, 3):
        steps[number][1]["b"][17] = np.inf
    case = Case(steps, 0.05, options, saved_after=4, rates=(0.1, 0.1, 0.1, 0.05, 0.05))
    assert_same(observe(TRITON, row, case), observe(BACKENDS[0], row, case))


def test_a_gamma_distribution_has_the_tail_of_a_generalised_pareto() -> None:
    """Stages before the last, which alone differ, are not fitted on a device."""
    rng = np.random.default_rng(3)
    steps: list[Any] = [[gradients_of(SHAPES, rng) for _ in range(2)] for _ in range(12)]
    gamma, gpareto = (
        observe(TRITON, next(row for row in ROWS if row.name == f"sidco-{name}-robust"), Case(steps, 0.05))
        for name in ("gamma", "gpareto")
    )
    assert_same(gamma, gpareto)


def test_one_stage_of_a_gamma_distribution_sends_the_largest() -> None:
    rng, gamma = np.random.default_rng(4), SIDCo(0.05, distribution="gamma", stages=1, warmup=None)
    sides = [make_worker(TRITON, one, {"p": (600,)}) for one in (gamma, TopK(0.05, warmup=None))]
    for _ in range(4):
        gradient = gradients("laplace", 600, rng)
        sent = [laws.send(TRITON, worker, gradient) for worker in sides]
        np.testing.assert_array_equal(sent[0].indices, sent[1].indices)


@pytest.mark.full
@pytest.mark.parametrize("name", ["micro", "micro-paper", "gaussiank"])
def test_it_learns_what_numpy_learns(name: str) -> None:
    """Over many steps, in which gradients become much larger, and then much smaller."""
    rng, row = np.random.default_rng(2), next(row for row in ROWS if row.name == name)
    steps: list[Any] = []
    for scale in (1.0, 50.0, 0.01):
        for _ in range(40):
            steps.append([{"p": gradients("laplace", 200, rng) * np.float32(scale)} for _ in range(2)])
    assert_same(observe(TRITON, row, Case(steps, 0.05)), observe(BACKENDS[0], row, Case(steps, 0.05)))


@pytest.mark.full
@pytest.mark.parametrize("change", ["reset", "rescale", "load"])
def test_a_residual_that_was_changed_is_looked_at_afresh(change: str) -> None:
    """What the last step noted says nothing of a residual that somebody has changed."""
    rng = np.random.default_rng(1)
    sides = [(side, make_worker(side, TopK(0.05, warmup=None), {"p": (600,)})) for side in (BACKENDS[0], TRITON)]
    for step in range(4):
        gradient = gradients("laplace", 600, rng)
        sent = [laws.send(side, worker, gradient) for side, worker in sides]
        np.testing.assert_array_equal(sent[0].indices, sent[1].indices)
        # They exceed what the last step compared entries with.
        assert (sides[1][1].buckets[0].device.numbers[NUMBERS.index("candidates")] > 0) == (step in (1, 2))
        if step == 2:
            for _, worker in sides:
                if change == "rescale":
                    worker.rescale(2.0**-10)
                elif change == "reset":
                    worker.reset()
                else:
                    worker.load_state_dict(worker.state_dict())


def test_which_buckets_select_on_their_device() -> None:
    _, bucket = laws.one_bucket(TRITON, ROWS[0], 500, 0.1)
    assert on_gpu(TopK(0.1, warmup=None), bucket.layout, bucket.buffer, None) is None, "there is no GPU"
    assert selector_for(TopK(0.1), bucket.layout, bucket.buffer.double(), None) is None


@pytest.mark.parametrize("momentum", [None, MomentumCorrection(0.5)])
def test_nothing_of_the_last_step_is_taken_for_a_parameter_without_gradient(momentum: Any) -> None:
    """Nor for one whose learning rate is zero. What a kernel has noted of it is of the step before."""
    rng, row = np.random.default_rng(0), next(row for row in ROWS if row.name == "topk")
    steps: list[Any] = [[gradients_of(SHAPES, rng)] for _ in range(6)]
    for number, (given,) in enumerate(steps):
        given["c"] = None if number in (2, 4) else 100 * given["c"]
    for in_residual, rates in ((False, ()), (True, (0.1, 0.1, 0.0, 0.1, 0.1, 0.0))):
        case = Case(steps, 0.05, {"lr_in_residual": in_residual, "momentum": momentum}, rates=rates)
        assert_same(observe(TRITON, row, case), observe(BACKENDS[0], row, case))
