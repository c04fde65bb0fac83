"""What is written into gradients."""

from __future__ import annotations

from unittest.mock import Mock

import pytest
import torch

from horovod_sparse.core.layout import Slot
from horovod_sparse.exchange.protocols import Entries, Reduced
from horovod_sparse.torch.compressors import TopK as TorchTopK
from horovod_sparse.torch.ddp import DDPSource
from horovod_sparse.torch.ops import TorchOps


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_sums_that_the_type_of_gradients_cannot_hold_become_infinite(dtype: torch.dtype) -> None:
    """As those of a dense average do. bfloat16 has the range of float32."""
    slots = [Slot("p", 0, 20, (20,)), Slot("q", 20, 20, (4, 5))]
    gradients = [torch.zeros(slot.shape, dtype=dtype) for slot in slots]
    sums = Entries(None, torch.tensor([1.0, 1e6]).repeat_interleave(20))
    source = DDPSource(TorchTopK(0.1), Mock(world=2), {})
    source._tensors = dict(zip("pq", gradients, strict=True))
    source._gradients = {one: one for one in gradients}
    source.write(slots, Reduced(TorchOps(), sums, 1.0, {}))
    assert [bool(one.isfinite().all()) for one in gradients] == [True, dtype != torch.float16]
