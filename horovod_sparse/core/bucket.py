"""What one bucket keeps from step to step on this rank: memory, adaptive state and statistics. Imports no framework.

Tested by tests/core/test_machine.py.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Sequence

from horovod_sparse.compressors.base import BucketState, Compressor, Place
from horovod_sparse.compressors.selection import Checked
from horovod_sparse.core.layout import Layout, Slot
from horovod_sparse.core.plan import stage_of, warmup_steps
from horovod_sparse.core.selector import DeviceSelectorFor
from horovod_sparse.core.statistics import Counts
from horovod_sparse.exchange.protocols import Exchange, Round
from horovod_sparse.ops.protocol import Array, Ops

_log = logging.getLogger("horovod_sparse")
_LASTING, _FEW_STEPS = 100, 5
"""Numbers of consecutive steps with a truncated message that show a lack of room: the lower one if most had no room."""
_FEW = 4
"""If more than one entry in `_FEW` exceeds the cut, none are noted: that would cost more memory and time than it saves."""


class Bucket:
    """One bucket on this rank. `core.sending.Sending` is what a step makes of it.

    Args:
        ops: the framework's operations.
        compressor: settings and algorithm.
        layout: its parameters.
        place: this worker among all.
        rank: its number in messages.
        buffer: the residual, which belongs to `Feedback`.
        velocity: an array like it; None without momentum before the selection.
        device_selector: see `DeviceSelectorFor`.
        speaks: whether the log says for all buckets here that the warm-up has ended.
    """

    def __init__(
        self,
        ops: Ops,
        compressor: Compressor,
        layout: Layout,
        place: Place,
        rank: int,
        buffer: Array,
        velocity: Array | None,
        device_selector: DeviceSelectorFor,
        *,
        speaks: bool,
    ) -> None:
        self.ops, self.compressor, self.layout = ops, compressor, layout
        self.buffer, self.velocity = buffer, velocity
        self.name, self.numel = layout.name, layout.numel
        self.world, self.position, self.rank = place.world, place.position, rank
        self.slots: dict[str, Slot] = {slot.name: slot for slot in layout.slots}
        self.state: BucketState = compressor.new_state(place)
        self.steps = 0
        """The steps that have succeeded."""
        self.last = self.sums = Counts()
        """What is known of the last of them, and the sums over all."""
        self.truncated_steps = 0
        """Of how many of them in a row, up to the last one, the message had no room for all entries that qualified."""
        self.exchange = compressor.exchange
        """How the bucket was exchanged in the last step."""
        self.stage = stage_of(compressor, layout, place.world, 0)
        """What is sent in the next step, or in the one that has begun."""
        self.tracked = ops.tracked(buffer)
        """The operations for the residual."""
        self._speaks = speaks
        self.few = layout.numel // _FEW
        """The most entries above a cut that are noted."""
        # The tests hold the package's own classes to it.
        is_foreign = not type(compressor).__module__.startswith(f"{__package__.partition('.')[0]}.")
        self.select = Checked(compressor) if is_foreign else compressor.select
        """The compressor's `select`."""
        self.device = device_selector(compressor, layout, buffer, velocity)
        """What selects on the bucket's device; None if the host does."""
        correction = compressor.momentum_correction
        self.masks = correction is not None and correction.masking
        """Whether the velocity becomes zero where entries are sent."""
        self._copies: dict[int, list[Array]] = {}
        """With a velocity: copies of residuals and velocities from before a step, by offset."""

    def go_on(self, state: BucketState) -> None:
        """Go on with an adaptive state, and with what is sent in its step."""
        self.state = state
        if state.step not in self.stage.steps:
            self.stage = stage_of(self.compressor, self.layout, self.world, state.step)
            if self._speaks and state.step == warmup_steps(self.compressor):
                name, ratio = type(self.compressor).__name__, self.compressor.schedule.final
                _log.info(
                    "%s: the warm-up has ended after %d steps; from now on the ratio is %g", name, state.step, ratio
                )

    def rounds_of(self, exchange: Exchange) -> Sequence[Round]:
        """Return the collectives of an exchange of this bucket in this step."""
        return exchange.rounds(self.numel, self.stage.k, self.stage.capacity, self.world)

    def copy(self, slot: Slot) -> None:
        """Keep copies of a parameter's residual and velocity, for `put_back`."""
        now = self._parts(slot)
        if slot.offset not in self._copies:
            self._copies[slot.offset] = [self.ops.copy(array) for array in now]
        else:
            for memory, array in zip(self._copies[slot.offset], now, strict=True):
                self.ops.assign(memory, array)

    def put_back(self, slot: Slot) -> None:
        """Give a parameter the residual and the velocity that `copy` has kept."""
        for array, copied in zip(self._parts(slot), self._copies[slot.offset], strict=True):
            self.ops.assign(array, copied)

    def _parts(self, slot: Slot) -> list[Array]:
        part = slice(slot.offset, slot.offset + slot.numel)
        return [self.buffer[part]] if self.velocity is None else [self.buffer[part], self.velocity[part]]

    def warn_truncated(self) -> bool:
        """Warn and return True if messages have lacked room for long, or for some steps for most of the entries."""
        last = self.last
        if self.truncated_steps < (_FEW_STEPS if last.truncated > last.sent else _LASTING):
            return False
        warnings.warn(
            f"horovod_sparse: rank {self.rank}: for {self.truncated_steps} steps more entries of bucket {self.name!r} "
            f"qualified than its message has room for (in the last step {last.sent + last.truncated:.0f}, room for "
            f"{last.sent:.0f}); the rest waits in the residual. "
            f"Raise slack (now {self.compressor.slack:g}) or ratio or, with Threshold, the threshold",
            stacklevel=2,
        )
        return True

    def forget(self) -> None:
        """Forget what was seen of the buffer, because it no longer applies."""
        self.tracked.forget()
        if self.device is not None:
            self.device.forget()

    def reset(self) -> None:
        """Forget adaptive state and statistics; the residual has been set to zero."""
        self.forget()
        self.go_on(self.compressor.new_state(self.state.place))
        self.steps = self.truncated_steps = 0
        self.last = self.sums = Counts()
