"""What a compressor must not do to movements of parameters. Imports no framework. Tested by tests/parallel/local.py."""

from __future__ import annotations

from horovod_sparse.compressors.base import Compressor


def check_settings(c: Compressor) -> None:
    """Raise ValueError if a compressor does what has no meaning for movements of parameters."""
    for name, value, needed, why in (
        ("momentum", c.momentum_correction, None, "momentum is the optimizer's"),
        ("clip", c.clip, None, "what it clips off a movement is lost; clip gradients before the optimizer steps"),
        ("lr_in_residual", c.lr_in_residual, False, "residuals are in units of the parameters already"),
    ):
        if value != needed:
            raise ValueError(f"compression must have {name}={needed!r} with local updates, got {value!r}: {why}")
