"""A worker of a test: what lasts from step to step, and its step, which begins with its first gradient."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from horovod_sparse.core.bucket import Bucket
from horovod_sparse.core.feedback import Feedback
from horovod_sparse.core.sending import Sending
from horovod_sparse.core.step import Everyone, Step, Write
from horovod_sparse.exchange.protocols import Collective


class Worker(Feedback):
    step: Step | None = None

    def start_step(self, scale: float = 1.0) -> Step:
        """Begin a step. One that has begun has never been."""
        self.abort()
        self.step = Step(self, scale)
        return self.step

    @property
    def begun(self) -> Step:
        return self.step or self.start_step()

    def arrive(self, name: str, gradient: Any, rate: float | None = None) -> Sending | None:
        return self.begun.add(name, gradient, rate)

    def sending(self, bucket: Bucket | Sending) -> Sending:
        """What the step makes of a bucket."""
        return self.begun.sendings[bucket.name]

    def advance(self, bucket: Bucket | Sending, result: Any) -> Collective | None:
        following = self.begun.advance([(self.sending(bucket), result)])
        return following[0][1] if following else None

    def spoil(self, bucket: Bucket) -> Sending:
        return self.begun.spoil(bucket)

    def end_step(self, write: Write = lambda slots, reduced: None, everyone: Everyone | None = None) -> None:
        step, self.step = self.begun, None
        step.finish(write, everyone)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.abort()
        super().load_state_dict(state)

    def reset(self) -> None:
        self.abort()
        super().reset()

    def abort(self) -> None:
        """Forget the step that has begun, if there is one."""
        step, self.step = self.step, None
        if step is not None:
            step.abandon()
