"""SIDCo as it is mostly written, in operations of PyTorch: what the kernels are compared with."""

from __future__ import annotations

import math

from torch import Tensor


def plain_sidco(residual: Tensor, gradient: Tensor, ratio: float, stages: int = 3) -> tuple[Tensor, Tensor]:
    """Take a whole step of SIDCo with exponential stages, written the obvious way, and return indices and values."""
    residual.add_(gradient)
    magnitudes = residual.abs()
    first = max(0.25, ratio)
    threshold = magnitudes.mean() * math.log(1.0 / first)
    rest = (ratio / first) ** (1.0 / (stages - 1))
    for _ in range(stages - 1):
        tail = magnitudes[magnitudes > threshold]
        threshold = threshold + (tail.mean() - threshold) * math.log(1.0 / rest)
    indices = (magnitudes > threshold).nonzero().view(-1)
    values = residual[indices]
    residual[indices] = 0.0
    return indices, values
