"""What a compressor does outside an optimizer, and as an object."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from horovod.torch.compression import Compressor as HorovodCompressor

import horovod_sparse.torch as hvd
from horovod_sparse.compressors.draws import RandomCompressor
from horovod_sparse.torch import SIDCo, TopK
from tests.harness.makers import makers

EVERY = [make(hvd) for make in makers(0.1, Threshold={"threshold": 1.645}).values()]


@pytest.mark.parametrize("compression", EVERY, ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.filterwarnings("ignore:.*outside hvd.DistributedOptimizer")
def test_compress_zeroes_what_is_not_selected(compression: Any, dtype: torch.dtype) -> None:
    assert isinstance(compression, HorovodCompressor)
    tensor = torch.randn(40, 50, generator=torch.Generator().manual_seed(0)).to(dtype).t()
    before = tensor.clone()
    kept, ctx = compression.compress(tensor)
    assert ctx is None
    assert kept.shape == tensor.shape and kept.dtype == dtype
    assert torch.equal(tensor, before), "the caller's tensor is untouched"
    selected = kept != 0
    assert torch.equal(kept[selected], tensor[selected])
    assert 0.7 * compression.ratio <= selected.float().mean().item() <= 1.25 * compression.ratio
    is_random = isinstance(compression, RandomCompressor)
    if is_random:
        assert not torch.equal(compression.compress(tensor)[0], kept), "other entries at every call"
        return
    left = tensor[~selected].abs()
    assert left.numel() == 0 or tensor[selected].abs().min() >= left.max()
    assert compression.decompress(kept, ctx) is kept


@pytest.mark.filterwarnings("ignore:.*outside hvd.DistributedOptimizer")
@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(1000),
        torch.randn(255),
        torch.empty(0),
        torch.tensor(3.0),
        torch.full((1000,), torch.nan),
        torch.full((1000,), torch.inf),
        torch.eye(30).to_sparse(),
    ],
    ids=["integers", "small", "empty", "scalar", "nan", "inf", "sparse"],
)
def test_compress_leaves_alone_what_it_cannot_compress(tensor: torch.Tensor) -> None:
    assert TopK(0.1, warmup=None).compress(tensor)[0] is tensor


def test_compress_is_differentiable_and_says_that_it_saves_nothing() -> None:
    """`hvd.allreduce` can be part of a model."""
    tensor = torch.randn(300, requires_grad=True)
    with pytest.warns(UserWarning, match=r"TopK .*hvd\.DistributedOptimizer"):
        kept, _ = TopK(0.1, warmup=None).compress(tensor)
    kept.sum().backward()
    assert tensor.grad is not None
    assert torch.equal(tensor.grad, (kept != 0).float())


def test_a_compressor_without_an_optimizer() -> None:
    compression = SIDCo(0.1, warmup=None)
    assert compression.residual_bytes == 0
    calls = (compression.stats, compression.state_dict, compression.reset, lambda: compression.load_state_dict({}))
    for call in calls:
        with pytest.raises(RuntimeError, match=r"^SIDCo\(.*argument compression"):
            call()
