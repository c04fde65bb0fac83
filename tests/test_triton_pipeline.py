"""The laws of `test_laws`, and the data's whole way, with buckets that select on their device: interpreted, on the CPU."""

from __future__ import annotations

from functools import partial
from typing import Any

import interpreted  # noqa: F401  This module is skipped without Triton.
import numpy as np
import pytest
import test_laws as laws
import test_pipeline
import torch
from driver import dense_sum, exchange, make_pipeline
from table import BACKENDS, COMPRESSORS, Backend, Row, gradients

from horovod_sparse.compressors.base import Compressor
from horovod_sparse.compressors.momentum import MomentumCorrection
from horovod_sparse.compressors.threshold import Threshold
from horovod_sparse.compressors.topk import TopK
from horovod_sparse.core.pipeline import Pipeline
from horovod_sparse.kernels.gpu import available
from horovod_sparse.kernels.gpu.bucket import selector_for
from horovod_sparse.torch.device import on_gpu
from horovod_sparse.torch.ops import TorchOps

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def _pipeline(ops: TorchOps, compressor: Compressor, **where: Any) -> Pipeline:
    return Pipeline(ops, compressor, device_selector=partial(selector_for, groups=2), **where)


TRITON = Backend("torch-triton", TorchOps(), lambda x: torch.from_numpy(np.array(x)), lambda x: x.numpy(), _pipeline)
NAMES = ("topk", "sidco-exponential-robust", "sidco-gpareto-robust", "sidco-one-stage", "threshold")
ROWS = [row for row in COMPRESSORS if row.name in NAMES]
for_all = pytest.mark.parametrize("row", ROWS, ids=str)


def test_the_rows_select_on_the_device() -> None:
    assert len(ROWS) == len(NAMES)
    for row in ROWS:
        _, bucket = laws.one_bucket(TRITON, row, 500, 0.1)
        assert bucket.device is not None
    assert laws.one_bucket(TRITON, next(row for row in COMPRESSORS if row.name == "dgc"), 500, 0.1)[1].device is None


@pytest.mark.full
@for_all
def test_laws(row: Row) -> None:
    laws.test_without_residual_nothing_is_kept(TRITON, row)
    laws.test_the_callers_gradient_is_untouched(TRITON, row, np.float16)
    laws.test_ratio_one_sends_everything(TRITON, row)


@pytest.mark.full
def test_without_residual_a_step_that_failed_leaves_nothing() -> None:
    laws.test_without_residual_a_step_that_failed_leaves_nothing(TRITON, ROWS[0], None)


def test_what_a_parameter_has_kept_is_dropped() -> None:
    test_pipeline.test_what_a_parameter_has_kept_is_dropped(TRITON)


@pytest.mark.full
@pytest.mark.parametrize("row", [row for row in ROWS if not row.follows_scale], ids=str)
def test_laws_of_states(row: Row) -> None:
    """With the number of stages that SIDCo has come to, and while the ratio follows a schedule."""
    laws.test_a_saved_state_continues_identically(TRITON, row, 7)
    laws.test_every_compressor_follows_a_schedule(TRITON, row)


OPTIONS: dict[str, dict[str, Any]] = {
    "float64": {"residual": "float64"},
    "momentum": {"momentum": MomentumCorrection(0.5)},
    "nesterov": {"momentum": MomentumCorrection(0.5, nesterov=True, masking=False)},
    "learning-rate": {"lr_in_residual": True},
    "layers": {"granularity": "layer"},
    "propagate": {"not_finite": "propagate", "granularity": "layer"},
}


@pytest.mark.parametrize(
    ("make", "options"),
    [
        *((TopK, options) for options in OPTIONS.values()),
        (lambda ratio, **options: Threshold(2.0, ratio=ratio, **options), {}),
    ],
    ids=[*OPTIONS, "threshold"],
)
def test_it_reduces_what_numpy_does(make: Any, options: dict[str, Any]) -> None:
    """Two workers, several parameters, one of them without a gradient in some steps, and one gradient that is not finite."""
    rng = np.random.default_rng(0)
    shapes = {"a": (12, 20), "b": (100,), "c": (77,)}
    dtype = options.get("residual", "float32")
    sides = [
        (side, [make_pipeline(side, make(0.05, **options), shapes, world=2, position=r, dtype=dtype) for r in range(2)])
        for side in (BACKENDS[0], TRITON)
    ]
    for step in range(5):
        given = {
            (rank, n): gradients("laplace", int(np.prod(s)), rng).reshape(s)
            for rank in range(2)
            for n, s in shapes.items()
        }
        # The first step is dense.
        fails = step in (0, 3) and "not_finite" in options
        if fails:
            given[1, "b"][17] = np.inf
        results = []
        for side, pipelines in sides:
            for (rank, name), gradient in given.items():
                absent = name == "c" and step == 2
                rate = 0.1 if step < 3 else 0.05
                pipelines[rank].arrive(name, None if absent else side.array(gradient), rate)
            reduced: dict[str, Any] = {}
            for buckets in zip(*(pipeline.buckets for pipeline in pipelines), strict=True):
                reduced |= exchange(side, pipelines, buckets, divisor=2.0)[0]
            for pipeline in pipelines:
                pipeline.end_step()
            results.append(reduced)
        for name, parts in results[0].items():
            assert (parts is None) == (results[1][name] is None) == (fails and name == "b")
            if parts is not None:
                numel = int(np.prod(shapes[name]))
                np.testing.assert_array_equal(dense_sum(results[1][name], numel), dense_sum(parts, numel))
        for expected, got in zip(sides[0][1], sides[1][1], strict=True):
            for kept in ("residuals", "velocities"):
                for name, array in expected.state_dict()[kept].items():
                    np.testing.assert_array_equal(got.state_dict()[kept][name].numpy(), array)
            for one, other in zip(expected.stats().last.buckets, got.stats().last.buckets, strict=True):
                assert (other.count, other.truncated, other.target) == (one.count, one.truncated, one.target)


def test_the_error_names_every_parameter_of_this_rank_first() -> None:
    pipelines = [
        make_pipeline(TRITON, TopK(0.1, warmup=None), {"a": (300,), "b": (70,)}, world=2, position=r) for r in range(2)
    ]
    rng = np.random.default_rng(0)
    for rank, pipeline in enumerate(pipelines):
        for name, size in (("b", 70), ("a", 300)):
            gradient = gradients("laplace", size, rng)
            gradient[3] = np.nan if (rank, name) == (0, "b") else gradient[3]
            pipeline.arrive(name, TRITON.array(gradient))
    exchange(TRITON, pipelines, [pipeline.buckets[0] for pipeline in pipelines])
    with pytest.raises(FloatingPointError, match="rank 0: the gradient of parameter 'b' holds NaN or infinity"):
        pipelines[0].end_step()
    with pytest.raises(FloatingPointError, match=r"rank 1: .*bucket .* of another rank"):
        pipelines[1].end_step()


@pytest.mark.full
@pytest.mark.parametrize("change", ["reset", "rescale", "load"])
def test_a_residual_that_was_changed_is_looked_at_afresh(change: str) -> None:
    """What the last step noted says nothing of a residual that somebody has changed."""
    rng = np.random.default_rng(1)
    sides = [(side, make_pipeline(side, TopK(0.05, warmup=None), {"p": (600,)})) for side in (BACKENDS[0], TRITON)]
    for step in range(4):
        gradient = gradients("laplace", 600, rng)
        sent = [laws.send(side, pipeline, gradient) for side, pipeline in sides]
        np.testing.assert_array_equal(sent[0].indices, sent[1].indices)
        if step == 2:
            for _, pipeline in sides:
                if change == "rescale":
                    pipeline.rescale(2.0**-10)
                elif change == "reset":
                    pipeline.reset()
                else:
                    pipeline.load_state_dict(pipeline.state_dict())
            assert sides[1][1].buckets[0].device._limit == np.inf


def test_which_buckets_select_on_their_device(monkeypatch: pytest.MonkeyPatch) -> None:
    _, bucket = laws.one_bucket(TRITON, ROWS[0], 500, 0.1)
    assert on_gpu(TopK(0.1, warmup=None), bucket.layout, bucket.buffer, None) is None, "there is no GPU"
    monkeypatch.setenv("HOROVOD_SPARSE_KERNELS", "1")
    assert available()
    monkeypatch.setenv("HOROVOD_SPARSE_KERNELS", "0")
    assert not available()
