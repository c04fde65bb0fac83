"""Parameters that the adapter reduces dense: they get the same momentum as those in buckets. Imports no framework."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from horovod_sparse.compressors.base import Compressor
from horovod_sparse.core.layout import Layout
from horovod_sparse.core.residuals import Residuals
from horovod_sparse.ops.protocol import Array, Ops


class DenseParameters:
    """The dense parameters of one optimizer. With momentum correction, their velocities are kept among all others."""

    def __init__(self, ops: Ops, compressor: Compressor, velocities: Residuals) -> None:
        self._ops = ops
        self._correction = compressor.momentum_correction
        self._discardable = compressor.discardable
        self._velocities = velocities
        self._layouts: dict[str, Layout] = {}
        """The parameters that are reduced together, by the name of the first."""
        self._before: dict[str, Array] = {}
        """The velocities before this step or the last one."""

    def add(self, layouts: Sequence[Layout], like: Callable[[str], Array]) -> None:
        for layout in layouts:
            self._layouts[layout.name] = layout
            if self._correction is not None:
                self._velocities.allocate(layout, like(layout.name))

    def finish(self, name: str, reduced: Array, scale: float) -> list[str]:
        """Apply momentum in place; see `Pipeline.finish_dense`. Return the parameters that are not finite: then do nothing.

        Velocities are kept without the loss scale, by which `reduced` is multiplied.
        """
        if not self._ops.all_finite(reduced):
            flat, slots = reduced.reshape(-1), self._layouts[name].slots
            parts = {slot.name: flat[slot.offset : slot.offset + slot.numel] for slot in slots}
            return [part for part, entries in parts.items() if not self._ops.all_finite(entries)]
        if self._correction is not None:
            velocity = self._velocities.buffer(name)
            if self._discardable:
                self._before[name] = self._ops.copy(velocity)
            corrected = self._ops.copy(velocity)
            corrected[:] = 0
            if scale != 1.0:
                reduced /= scale
            self._correction.accumulate(self._ops, corrected, velocity, reduced)
            if scale != 1.0:
                corrected *= scale
            reduced[...] = corrected.reshape(reduced.shape)
        return []

    def forget_before(self) -> None:
        """Forget the velocities before the last step, because another step begins."""
        self._before.clear()

    def bring_back(self) -> None:
        for name, velocity in self._before.items():
            self._ops.assign(self._velocities.buffer(name), velocity)
        self._before.clear()
