"""What is written into gradients, and what keeps `torch.compile` out of functions."""

from __future__ import annotations

from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from horovod_sparse.core.layout import Slot
from horovod_sparse.exchange.protocols import Entries, Reduced
from horovod_sparse.torch.compressors import TopK as TorchTopK
from horovod_sparse.torch.ddp import DDPSource
from horovod_sparse.torch.ops import TorchOps
from horovod_sparse.torch.source import uncompiled


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


def test_the_compiler_sees_what_comes_before_and_after_but_not_the_function() -> None:
    seen: list[str] = []

    def backend(graph: torch.fx.GraphModule, _: list[Tensor]) -> torch.fx.GraphModule:
        seen.extend(node.name for node in graph.graph.nodes if node.op == "call_method")
        return graph

    class Owner:
        def __init__(self) -> None:
            self.hidden = uncompiled(self._hidden)

        def _hidden(self, x: Tensor, *, factor: float) -> Tensor:
            assert not torch.compiler.is_compiling()
            return self.deeper(x).mul(factor)

        def deeper(self, x: Tensor) -> Tensor:
            return x.neg()

    owner = Owner()
    torch.compiler.reset()
    result = torch.compile(lambda x: owner.hidden(x.sin(), factor=2.0).cos(), backend=backend)(torch.ones(3))
    torch.testing.assert_close(result, (-2.0 * torch.ones(3).sin()).cos())
    assert seen == ["sin", "cos"]
