"""The numbers of `compression.stats()`, written down while training goes on: lines of JSON, and scalars for TensorBoard.

The first line of a log says what wrote it, and after which step it goes on. Imports no framework.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

from horovod_sparse import __version__
from horovod_sparse.compressors.checks import check_integer

_TOTAL = (
    "numel", "target", "count", "ratio", "threshold", "stages", "truncated", "bytes_sent", "residual_norm",
)  # fmt: skip
"""What a line has of `StepStats.total`; see `BucketStats`. A number that is not finite is None."""


class StatsLog:
    """Writes down what `compression.stats()` says of every `every`-th step, as a line of JSON, for TensorBoard, or both.

        log = StatsLog(compression, "stats.jsonl")
        for batch in batches:
            train(batch)
            log()

    Call it after each step. It ignores its arguments, so it can be a hook: `optimizer.register_step_post_hook(log)` in
    PyTorch, `keras.callbacks.LambdaCallback(on_train_batch_end=log)` in Keras. A step is what was exchanged: a call after
    which the compressor counts no more steps than before does nothing. The numbers are those of this worker.

    A file that exists gets more lines.

    Args:
        compression: a compressor that serves an optimizer, a tape or `LocalUpdates`, or a `SparseAllreduce`.
        path: the file that gets the lines; None for no file.
        writer: a `SummaryWriter` of `torch.utils.tensorboard` or tensorboardX; it gets the same numbers, by
            `add_scalar("horovod_sparse/ratio", value, step)` and so on. None for no writer.
        every: a line is written after so many steps, >= 1. It costs one pass over the residuals.
        start: number of steps that were done before, for instance those of a checkpoint.

    Raises:
        TypeError: `compression` has no statistics, or `writer` no `add_scalar`.
        ValueError: a number is out of range, or there is neither path nor writer.
    """

    def __init__(
        self,
        compression: Any,
        path: str | os.PathLike[str] | None = None,
        *,
        writer: Any = None,
        every: int = 10,
        start: int = 0,
    ) -> None:
        check_integer("every", every, 1)
        check_integer("start", start, 0)
        if isinstance(compression, type) or not (hasattr(compression, "stats") and hasattr(compression, "steps")):
            raise TypeError(
                "compression must be a compressor of horovod_sparse.torch or horovod_sparse.tensorflow, or a SparseAllreduce, "
                f"got {compression!r}"
            )
        if path is None and writer is None:
            raise ValueError("path or writer must be given, such as path='stats.jsonl', got None for both")
        if writer is not None and not callable(getattr(writer, "add_scalar", None)):
            raise TypeError(f"writer must have a method add_scalar, as a SummaryWriter has, got {writer!r}")
        self._compression, self._writer, self._every = compression, writer, every
        self._path = None if path is None else Path(path)
        self.step = start
        """The number of the last step."""
        self._written = self.step
        self._seen = compression.steps
        """Number of steps that the compressor counted at the last call."""
        self._since: float | None = None
        """When the last step ended; None before the first."""
        self._times: list[float] = []
        """Seconds of the steps since the last line."""
        self._append({"package": __version__, "compressor": repr(compression), "step": self.step})

    def __call__(self, *_: object, **__: object) -> None:
        """Count what was exchanged since the last call, and write if it is time to."""
        now, steps = time.perf_counter(), self._compression.steps
        # The compressor counts anew after a reset and when the workers of an elastic job change.
        new = steps - self._seen if steps >= self._seen else min(steps, 1)
        self._seen = steps
        if new == 0:
            return
        self.step += new
        if self._since is not None:
            self._times.append((now - self._since) / new)
        if self.step - self._written >= self._every:
            self._write()
        # What the log itself takes is no part of the next step.
        self._since = time.perf_counter()

    def _write(self) -> None:
        last = self._compression.stats().last
        total = last.total
        found = {"seconds": median(self._times) if self._times else math.nan}
        found |= {name: getattr(total, name) for name in _TOTAL} | {"dense_bytes_sent": last.dense_bytes_sent}
        numbers = {name: value if math.isfinite(value) else None for name, value in found.items()}
        self._append({"step": self.step, **numbers, "exchange": total.exchange})
        if self._writer is not None:
            for name, value in numbers.items():
                if value is not None:
                    self._writer.add_scalar(f"horovod_sparse/{name}", value, self.step)
        self._written = self.step
        self._times.clear()

    def _append(self, record: Mapping[str, Any]) -> None:
        if self._path is not None:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(record, allow_nan=False) + "\n")
