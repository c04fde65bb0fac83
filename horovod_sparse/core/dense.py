"""Parameters that the adapter reduces dense: they get the same momentum as those in buckets. Imports no framework."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from horovod_sparse.compressors.base import Compressor
from horovod_sparse.core.layout import Layout
from horovod_sparse.core.residuals import Residuals
from horovod_sparse.ops.protocol import Array, Ops


class DenseParameters:
    """The dense parameters of one optimizer.

    Args:
        ops: the framework's operations.
        compressor: the settings.
        velocities: the velocities of all parameters, with momentum correction.
    """

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
        """Add parameters; see `Pipeline.add_dense`."""
        for layout in layouts:
            self._layouts[layout.name] = layout
            if self._correction is not None:
                self._velocities.allocate(layout, like(layout.name))

    def finish(self, name: str, reduced: Array) -> list[str]:
        """Apply momentum in place; see `Pipeline.finish_dense`. Return the parameters that are not finite: then do nothing."""
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
            self._correction.accumulate(corrected, velocity, reduced.reshape(-1))
            reduced[...] = corrected.reshape(reduced.shape)
        return []

    def forget_before(self) -> None:
        """Forget the velocities before the last step, because another step begins."""
        self._before.clear()

    def bring_back(self) -> None:
        """Go back to the velocities before the step."""
        for name, velocity in self._before.items():
            self._ops.assign(self._velocities.buffer(name), velocity)
        self._before.clear()
