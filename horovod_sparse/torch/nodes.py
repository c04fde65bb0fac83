"""Reduces the gradients of a model in `DistributedDataParallel`, dense within a node and compressed between nodes. No Horovod.

The ranks of a node add up each of DDP's buckets by a reduce-scatter, so that each has a part of every gradient. The ranks with
the same part exchange it between nodes while backward goes on. At the end the ranks of a node gather what has come of it.

All ranks start the collectives within a node in the order of DDP's buckets. DDP packs these anew after its first step. So in
the first two, when a rank that raises could not know the buckets, they begin at the end of backward, if all ranks are there.

Tested by tests/parallel/ddp/nodes.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from horovod_sparse.core.agreement import compare
from horovod_sparse.core.step import Write, given_up_by
from horovod_sparse.torch.compressors import TorchCompressor
from horovod_sparse.torch.ddp import Future, Used, check_bucket, raise_after_step
from horovod_sparse.torch.meeting import fail_together
from horovod_sparse.torch.mesh import Nodes
from horovod_sparse.torch.parameters import check_real, description
from horovod_sparse.torch.rows import part_like
from horovod_sparse.torch.source import TensorSource, uncompiled
from horovod_sparse.torch.within import Bucket, Within


class NodeSource(TensorSource):
    """The part of each gradient that this rank has in its node.

    Args:
        compressor: whose gradients these are.
        nodes: where this rank is.
        given: the model's parameters with their names.
        optimizer: see `TensorSource`.
        finds_unused: see `DDPSource`. Then the ranks of a node tell each other which parameters they have used.
    """

    def __init__(
        self,
        compressor: TorchCompressor,
        nodes: Nodes,
        given: Mapping[Tensor, str],
        optimizer: torch.optim.Optimizer | None,
        *,
        finds_unused: bool,
        active: bool,
    ) -> None:
        node, place = nodes.node, f"{nodes.node.position} of {nodes.node.world} in a node"
        super().__init__(compressor, nodes.replicas, active=active, optimizer=optimizer, place=place)
        self._given, self._mesh, self.reduce = given, nodes.mesh, uncompiled(self._reduce)
        self._parts = {one: part_like(one, node.position, node.world) for one in given}
        self._used = Used(given) if finds_unused and active else None
        """What has got a gradient on this rank in this step; None if all parameters have."""
        self._within = Within(node, self._used)
        self._used_parts: set[Tensor] = set()
        """The parts of what some rank of the node has used."""
        self._buckets: list[Bucket] = []
        self._like: list[Tensor] = []
        """Arrays as the node adds up for all buckets of a step, without memory; none as long as DDP may pack others."""

    def gradient(self, parameter: Tensor) -> Tensor | None:
        return self.memory[parameter] if self._used is None or parameter in self._used_parts else None

    @property
    def speaks(self) -> bool:
        return super().speaks and self._within.node.position == 0

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The optimizer's groups, with the parts that are here."""
        groups = super().param_groups
        return [{**one, "params": [self._parts[p] for p in one["params"] if p in self._parts]} for one in groups]

    def waiting(self, parameters: Mapping[str, Tensor]) -> list[tuple[Tensor, Tensor, float]]:
        raise ValueError(
            f"mesh must be left out of register(model, compression, optimizer) for compression.ahead(...), got {self._mesh}: "
            "a rank knows what waits of its own part of each parameter, not of the parts of its node's other ranks"
        )

    # --- a step ---

    @torch.no_grad()
    def _reduce(self, bucket: Any) -> Future[Tensor]:
        """Take a bucket's gradients. Return the bucket, which holds the mean of all ranks' gradients once all are reduced."""
        buffer, parameters = bucket.buffer(), bucket.parameters()
        future: Future[Tensor] = Future(devices=[buffer.device] if buffer.is_cuda else None)
        if bucket.index() == 0 and self._buckets:
            self.give_up()
        check_bucket(bucket, self._given, self.compressor)
        if self._used is not None and not self._used.noted.issuperset(parameters):
            # They are trained only now, so they have gradients.
            self._used.now.update(self._used.note(parameters))
        if self._like:
            self.begin()
        self._buckets.append(Bucket(buffer, future, parameters, bucket.gradients()))
        if self._like:
            self._within.scatter(self._buckets[-1])
            if len(self._within) > 1:
                # The one before had the time that backward took for this one.
                self._take()
        if bucket.is_last():
            self._finish()
        return future

    def _take(self) -> None:
        """Wait until the node has added up a bucket, and add this rank's part of it to the step."""
        taken = {self._parts[parameter]: reduced for parameter, reduced in self._within.take().items()}
        self.memory.update(taken)
        self._used_parts = {self._parts[parameter] for parameter in self._within.used}
        for part in taken:
            self.add(part)

    def _finish(self) -> None:
        buckets, is_first = self._buckets, self.driver.feedback is None
        try:
            if not self._like:
                self._begin_late()
            while len(self._within):
                self._take()
            self._complete(self.write)
            self._within.gather()
        except RuntimeError as error:
            raise_after_step(error, self.driver.feedback, self._used)
        except ValueError:
            if self._like:
                # This rank raises alone, and the others wait.
                self.give_up()
            raise
        finally:
            self.driver.drop()
            self._forget()
            if is_first:
                self._like = []
        for one in buckets:
            one.future.set_result(one.buffer)

    def _begin_late(self) -> None:
        """Begin a step whose backward pass has ended on all ranks."""
        self._meet()
        if self.driver.feedback is None:
            self._agree()
        self.begin()
        self._like = [self._within.scatter(one) for one in self._buckets]

    def _meet(self, *, given_up: bool = False) -> None:
        """Wait for all ranks, and tell them whether this one gives the step up. Raise RuntimeError if only others do."""
        transport = self.driver.transport
        gone = [rank for rank, is_gone in transport.everyone([transport.rank, given_up]) if is_gone]
        if gone and not given_up:
            raise given_up_by(gone[0], transport.rank)

    def _agree(self) -> None:
        arrived = {parameter for one in self._buckets for parameter in one.parameters}
        new = {parameter: name for parameter, name in self._given.items() if parameter in arrived}
        transport = self.driver.transport
        mine = {**description(self.compressor, new, self.param_groups), "mesh": self._mesh}
        compare(mine, transport.everyone(mine), transport.rank)
        check_real(new)
        self.extend({self._parts[parameter]: name for parameter, name in new.items()})

    def _complete(self, write: Write) -> None:
        """Wait for all exchanges, and end the step. If it fails for one part of a gradient, it does for all."""
        step, node = self.driver.step, [self._within.node]
        assert step is not None
        try:
            self.driver.complete()
        except Exception:
            # The ranks that have other parts know nothing of it.
            step.given_up = True
            step.fail()
            fail_together(step, node)
            self.driver.finish(write)
            raise
        fail_together(step, node)
        self.driver.finish(write)

    def settle(self, call: str) -> None:
        super().settle(call)
        if self._buckets:
            self.give_up()

    def give_up(self) -> None:
        if self._like:
            self._within.give_up(self._like[len(self._buckets) :])
            if self.driver.spoil():
                self._complete(lambda *_: None)
        else:
            self._meet(given_up=True)
        self._forget()

    def _forget(self) -> None:
        self.memory, self._buckets, self._used_parts = {}, [], set()
        self._within.forget()
        if self._used is not None:
            self._used.now.clear()
