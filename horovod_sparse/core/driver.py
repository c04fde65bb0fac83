"""The driver: what every adapter does with gradients. It knows no framework, and not where gradients come from.

A source gives it gradients by name (`add`) and has the reduced ones written (`finish`). A transport carries messages.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress

from horovod_sparse.compressors.base import Compressor
from horovod_sparse.core.agreement import agree_on_states
from horovod_sparse.core.feedback import Feedback
from horovod_sparse.core.layout import Parameter
from horovod_sparse.core.plan import bytes_beside_dense, most_workers, planned
from horovod_sparse.core.sending import Sending
from horovod_sparse.core.state import empty_state, holds_anything, merged, names_in, part_of
from horovod_sparse.core.step import Step, Wait, Write
from horovod_sparse.core.store import Settle, Store
from horovod_sparse.core.transport import Transport
from horovod_sparse.exchange.protocols import Collective
from horovod_sparse.ops.protocol import Array

_log = logging.getLogger("horovod_sparse")


class Driver(Store):
    """Runs the steps of one model's gradients over a transport.

    Args:
        compressor: settings and algorithm.
        transport: the workers that exchange.
        new_feedback: makes what lasts, when the first parameters are known.
        kernels: the compiled kernels, for the log.
        settle, place: see `Store`; by default a step that has begun is given up.
    """

    def __init__(
        self,
        compressor: Compressor,
        transport: Transport,
        new_feedback: Callable[[], Feedback],
        *,
        kernels: str,
        settle: Settle | None = None,
        place: str = "",
    ) -> None:
        super().__init__(compressor, (lambda *_: self.give_up()) if settle is None else settle, place)
        self.transport = transport
        self._new_feedback, self._kernels = new_feedback, kernels
        self._waits: dict[str, Wait] = {}
        """What waits for the first collective of each exchange that has begun, by bucket, in the order of their beginnings."""
        self._order: list[str] = []
        """Names of the buckets, in the order in which their exchanges began in the last step: the same on all ranks."""

    def meet(self, transport: Transport) -> None:
        """Forget all that was agreed on with other workers, and everything that depends on their number."""
        self.transport = transport
        self.feedback, self.step, self.sparse, self._order = None, None, (), []

    def begin(self, scale: float = 1.0) -> Step:
        """Begin a step, before its first gradient is added: see `Step`. One that an exception has left has never been."""
        assert self.feedback is not None
        if self.step is not None:
            self.drop()
        self._waits = {}
        self.step = Step(self.feedback, scale)
        return self.step

    def add(self, name: str, gradient: Array | None, learning_rate: float | None = None) -> None:
        """Add a gradient: see `Step.add`. Start the exchange of its bucket once that is complete."""
        step = self.step
        assert step is not None
        sending = step.add(name, gradient, learning_rate)
        if sending is not None:
            self._waits[sending.name] = self._start(sending, sending.begin())

    def _start(self, sending: Sending, collective: Collective) -> Wait:
        return self.transport.start(collective, f"{sending.name}.{sending.rounds}", sending)

    def complete(self) -> Step:
        """Wait for all exchanges of the step, whose gradients have all been added, to their ends."""
        step, waits = self.step, self._waits
        assert step is not None
        self._order = [*waits]
        step.feedback.is_broken = True
        try:
            while waits:
                # In an order that is the same on every rank: all have started the same collectives if one of them raises.
                results: list[tuple[Sending, Array]] = []
                for bucket in step.feedback.buckets:
                    if bucket.name in waits:
                        results.append((step.sendings[bucket.name], waits.pop(bucket.name)()))
                for sending, collective in step.advance(results):
                    waits[sending.name] = self._start(sending, collective)
        except Exception:
            # All ranks have started these. What has not ended could not be started again.
            for wait in waits.values():
                with suppress(Exception):
                    wait()
            raise
        step.feedback.is_broken = False
        return step

    def finish(self, write: Write) -> None:
        """End a step that is complete: see `Step.finish`."""
        step, self.step = self.step, None
        assert step is not None
        step.finish(write, self.transport.everyone)

    def give_up(self) -> None:
        """Give up the step that has begun. Tell the other ranks, which wait for this one's part of it, and wait for theirs."""
        if self.spoil():
            self.complete()
            self.finish(lambda *_: None)

    def spoil(self) -> bool:
        """Start what this rank has not started of the step that has begun, so that it fails. Return whether there is one."""
        step, feedback = self.step, self.feedback
        if step is None or feedback is None or feedback.is_broken:
            self.drop()
            return False
        buckets = {bucket.name: bucket for bucket in feedback.buckets}
        # A process group, and MPI, match collectives by their order.
        for name in dict.fromkeys([*self._order, *buckets]):
            if name not in self._waits:
                sending = step.spoil(buckets[name])
                self._waits[name] = self._start(sending, sending.begin())
        return True

    def extend(
        self, parameters: Sequence[Parameter], like: Mapping[str, Array], advice: str = "", later: Collection[str] = ()
    ) -> None:
        """Make buckets for new parameters, and load what is deferred of them if it fits on all ranks. Blocks.

        Args:
            parameters: in the order of the model.
            like: an array for each by name, on the device where its residual is kept.
            advice: what is logged in the first step.
            later: the names of the parameters that may come later, whose state stays deferred.
        """
        shapes, state = {one.name: one.shape for one in parameters}, self.deferred or empty_state()
        mine = part_of(state, names_in(state).difference(later).union(shapes))
        agree_on_states(lambda: self.check(mine, shapes), mine, self.transport)
        before, feedback = self.feedback, self.feedback or self._new_feedback()
        feedback.add_buckets(planned(parameters, self.compressor, feedback.world), like.__getitem__)
        self.feedback = feedback
        try:
            if holds_anything(mine):
                self.load_part(merged(feedback.state_dict(), state), feedback.bucket_of)
        except BaseException:
            self.feedback = before
            raise
        last = {feedback.bucket_of[one.name].name: number for number, one in enumerate(reversed(parameters))}
        # As exchanges begin if the gradients come in the reverse order of the parameters.
        self._order += sorted(last, key=last.__getitem__)
        if before is None:
            log_start(feedback, self._kernels, advice)


def log_start(feedback: Feedback, kernels: str, advice: str = "") -> None:
    """Log in the first step, on one worker, what is compressed, and `advice`. `kernels` names the compiled ones."""
    if feedback.speaks:
        compressor, world = feedback.compressor, feedback.world
        ratio = compressor.ratio
        what = f"{ratio:g}" if isinstance(ratio, float) else repr(ratio)
        buckets = feedback.compressed
        numel = sum(one.numel for one in buckets)
        dense = len(feedback.bucket_of) - sum(len(one.slots) for one in buckets)
        entries = f"{numel / 1e6:.1f} M" if numel >= 1e5 else str(numel)
        found = f"{len(buckets)} buckets, {entries} entries, {dense} parameters dense"
        hint = advice and f". {advice}"
        # Advice is seen by all who have not set up logging.
        level = logging.WARNING if advice else logging.INFO
        _log.log(level, "%s %s: %s, kernels %s%s", type(compressor).__name__, what, found, kernels, hint)
        sizes = [bucket.numel for bucket in buckets]
        times = bytes_beside_dense(compressor, sizes, world)
        # Beside what is sent, a message has a few numbers.
        if times > 1.05:
            most = most_workers(compressor, sizes, world)
            pays = f"up to {most} workers it sends no more" if most > 1 else "with any number of workers it sends more"
            _log.warning(
                f"{compressor!r} with {world} workers sends {times:.1f} times as many bytes as a dense allreduce of float32; "
                f"{pays}: take a ratio that is {times:.1f} times smaller, or MiCRO, or with DDP exchange between nodes alone, "
                "by register(..., mesh=)"
            )
