"""What is written into gradients, and what keeps `torch.compile` out of functions."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from horovod_sparse.torch import TopK
from horovod_sparse.torch.source import TensorSource, uncompiled
from tests.harness.alone import Alone


class Gradients(TensorSource):
    """Where PyTorch keeps them."""

    def gradient(self, parameter: Tensor) -> Tensor | None:
        assert parameter.grad is not None
        self.memory[parameter] = parameter.grad
        return parameter.grad


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_sums_that_the_type_of_gradients_cannot_hold_become_infinite(dtype: torch.dtype) -> None:
    """As those of a dense average do: here of what waits and what is new. bfloat16 has the range of float32."""
    source = Gradients(TopK(0.5, min_numel=0, warmup=None), Alone(), active=True)
    parameters = [nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in ((4,), (2, 2))]
    source.extend(dict(zip(parameters, "pq", strict=True)))
    large, small = torch.tensor([50_000.0, 40_000.0]).to(dtype).tolist()
    for expected in ([large, large, 0.0, 0.0], [0.0, 0.0, 2 * small, 2 * small]):
        for one in parameters:
            one.grad = torch.tensor([large, large, small, small], dtype=dtype).view(one.shape)
        source.add_rest()
        source.driver.complete()
        source.driver.finish(source.write)
        for one in parameters:
            assert one.grad is not None
            torch.testing.assert_close(one.grad.flatten(), torch.tensor(expected).to(dtype), rtol=0.0, atol=0.0)
    assert all(bool(one.grad.isinf().any()) == (dtype == torch.float16) for one in parameters if one.grad is not None)


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
