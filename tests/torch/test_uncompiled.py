"""What keeps `torch.compile` out of functions."""

from __future__ import annotations

import torch
from torch import Tensor

from horovod_sparse.torch.uncompiled import uncompiled


def test_the_compiler_sees_what_comes_before_and_after_but_not_the_function() -> None:
    seen: list[str] = []

    def backend(graph: torch.fx.GraphModule, _: list[Tensor]) -> torch.fx.GraphModule:
        seen.extend(node.name for node in graph.graph.nodes if node.op == "call_method")
        return graph

    class Owner:
        @uncompiled
        def hidden(self, x: Tensor, *, factor: float) -> Tensor:
            assert not torch.compiler.is_compiling()
            return self.deeper(x).mul(factor)

        def deeper(self, x: Tensor) -> Tensor:
            return x.neg()

    owner = Owner()
    torch.compiler.reset()
    result = torch.compile(lambda x: owner.hidden(x.sin(), factor=2.0).cos(), backend=backend)(torch.ones(3))
    torch.testing.assert_close(result, (-2.0 * torch.ones(3).sin()).cos())
    assert seen == ["sin", "cos"]
