"""Local updates: workers step alone and exchange how far their parameters have moved. Imports Horovod only where it is used.

SparseLoCo (https://arxiv.org/abs/2508.15706): theta_r are worker r's parameters after H steps from the shared theta.

    Delta_r = theta - theta_r
    e_r     = beta * e_r + Delta_r
    sent_r  = the entries of e_r that the compressor selects
    e_r     = e_r - sent_r
    theta   = theta - alpha * mean(sent_r)

By default alpha is 1, and each worker multiplies its Delta_r by the s of `Lengths`. With `outer_momentum` mu, as in DiLoCo
(https://arxiv.org/abs/2311.08105): m = mu * m + mean(sent_r), and the last line is theta = theta - alpha * (mean(sent_r) +
mu * m).

Local steps compute their gradients at theta_r - c/s * e_r, so that what a worker has found and not sent yet is not lost to
it. It is as if it began at theta - c/s * e_r, and Delta_r were what it has moved from there.

With `overlap`, as in Streaming DiLoCo (https://arxiv.org/abs/2501.18512), theta moves some local steps after the exchange.
Until then the worker goes on from theta - alpha/s * sent_r: its own part is there already, and is replaced by the mean.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from horovod_sparse.compressors.checks import check_fraction, check_integer, check_number, plain
from horovod_sparse.contrib.lengths import Lengths
from horovod_sparse.contrib.torch_keep import Detached, Waiting
from horovod_sparse.contrib.torch_movement import Movement, Sample
from horovod_sparse.core.agreement import Description, compare, divides
from horovod_sparse.core.binding import check_kind
from horovod_sparse.core.pipeline import Pipeline, Wait
from horovod_sparse.core.state import empty_state
from horovod_sparse.core.statistics import NO_STATS, Stats
from horovod_sparse.exchange.protocols import Collective
from horovod_sparse.torch import stock
from horovod_sparse.torch.compressors import NoOp, TorchCompressor
from horovod_sparse.torch.group import Group
from horovod_sparse.torch.group_reducer import GroupReducer
from horovod_sparse.torch.parameters import check_memory, follow, held, is_sharded, local_part, sums, wide
from horovod_sparse.torch.step import Step
from horovod_sparse.torch.uncompiled import uncompiled

_made = itertools.count()
_agreed = 0
"""The number of the next `LocalUpdates` that agrees with those of other workers. One that only one worker has made has none."""
_newest = -1
"""Of those that have agreed, the one that this worker made last."""


@dataclass(frozen=True)
class Outer:
    """The settings of local updates: H, beta, alpha, mu, c and overlap. `LocalUpdates` has the same arguments."""

    every: int
    residual_decay: float
    outer_lr: float | Literal["auto"]
    outer_momentum: float
    keep: float
    overlap: int

    def __post_init__(self) -> None:
        check_integer("every", self.every, 1)
        check_fraction("residual_decay", self.residual_decay)
        if self.outer_lr != "auto":
            expected = "'auto' or a finite number > 0"
            check_number("outer_lr", self.outer_lr, expected, lambda rate: 0.0 < rate < math.inf)
        check_number("outer_momentum", self.outer_momentum, "in [0, 1)", lambda m: 0.0 <= m < 1.0)
        check_number("keep", self.keep, "in [0, 1]", lambda keep: 0.0 <= keep <= 1.0)
        check_integer("overlap", self.overlap, 0)
        if self.overlap > self.every:
            raise ValueError(f"overlap must be in [0, every={self.every}], got {self.overlap}")

    def step(self, mean: Tensor, momentum: Tensor | None) -> None:
        """Turn the mean of what was sent into the step of a shared parameter. `momentum` changes, if there is one."""
        if momentum is not None:
            momentum *= self.outer_momentum
            momentum += mean
            mean += self.outer_momentum * momentum
        if self.outer_lr != "auto":
            mean *= self.outer_lr


class LocalUpdates:
    """Steps of any optimizer on each worker alone, and now and then a sparse exchange of how far the parameters have moved.

        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        local = LocalUpdates(optimizer, model, SIDCo(0.01))
        for batch in batches:
            optimizer.zero_grad()
            loss(model, batch).backward()
            local.step()

    Its module begins with the formulas. The model is not in `DistributedDataParallel`, and the optimizer is not Horovod's:
    gradients stay on their worker. All workers begin with the same parameters. The states of the optimizers and the buffers
    of the model (running means) differ between workers.

    Args:
        optimizer: the optimizer of the local steps.
        model: whose parameters the optimizer moves. Between two exchanges they differ between the workers.
        compression: a compressor of this module; None exchanges everything, as DiLoCo does.
        every: number of local steps between two exchanges, >= 1.
        residual_decay: what is left of the residual after each exchange, in (0, 1]; SparseLoCo has 0.95.
        outer_lr: learning rate of the exchanged movement, > 0. With "auto" each worker's movement grows by the factor that
            the mean over the workers takes from its length (`Lengths`), if the optimizer divides by the size of the gradient.
        outer_momentum: Nesterov momentum of the exchanged movement, in [0, 1); DiLoCo has 0.9 with `outer_lr=0.7`.
        keep: c, the part of its residual that a worker's parameters have moved already, in [0, 1], from a forward pass in
            training until the next step. Steps, exchanges and evaluations see the parameters without. It takes the memory of
            one more copy of the parameters; 0 does not.
        overlap: number of local steps that go on while an exchange travels, in [0, every]. Only then is it waited for. It takes
            the memory of three more copies of the parameters, and an exchange of one collective, such as `Pairs`. States are
            saved and loaded when nothing travels: after these steps, or after `synchronize`.
        group: a process group of `torch.distributed`, or a process set of Horovod; None for all workers of the one that was
            initialised. With a model of `fully_shard`, `mesh["replicate"]`: each replica is a worker.

    Raises:
        TypeError: the optimizer is Horovod's, the model is in `DistributedDataParallel`, the two are in the wrong order,
            `compression` is not a compressor of this module, a parameter has no memory of its own, or a number is no int.
        ValueError: a number is not in its range, the optimizer has parameters that the model has not, or nothing connects
            the workers yet.
    """

    _step_supports_amp_scaling = True
    """A `GradScaler` then calls `step` in any case, which says what to do instead."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        model: nn.Module,
        compression: TorchCompressor | None = None,
        *,
        every: int = 1,
        residual_decay: float = 1.0,
        outer_lr: float | Literal["auto"] = "auto",
        outer_momentum: float = 0.0,
        keep: float = 0.5,
        overlap: int = 0,
        group: Any = None,
    ) -> None:
        _check_arguments(optimizer, model)
        self.optimizer = optimizer
        self._model = model
        self.outer = Outer(*map(plain, (every, residual_decay, outer_lr, outer_momentum, keep, overlap)))
        self.compression = NoOp() if compression is None else compression
        check_kind(self.compression, TorchCompressor, "horovod_sparse.torch", stock=False)
        self.compression.check_free()
        _check_settings(self.compression)
        if overlap and len(self.compression.exchange.rounds(1, 1, 1, 2)) > 1:
            raise ValueError(
                f"overlap must be 0 with {self.compression.exchange}, got {overlap}: its second collective needs the result of "
                "the first; use Pairs() or SharedIndices()"
            )
        names = _names(optimizer, model)
        self._names = [*names.values()]
        self._parts, self._transport, shards = _placed(model, names, group)
        self._parameters = {names[parameter]: part for parameter, part in self._parts.items() if part.numel()}
        self._shared = {name: one.detach().to(wide(one), copy=True) for name, one in self._parameters.items()}
        self._movement = Movement([*self._parameters.values()], [*self._shared.values()])
        self._reducer = _Reducer(
            self.compression, self._transport, {one: name for name, one in self._parameters.items()}
        )
        self._reducer.shards = shards
        self._reducer.lengths.grow = outer_lr == "auto" and divides(optimizer.param_groups)
        self._keeping: Detached | None = None
        if keep and self._reducer.active and self.compression.residual and self.compression.ratio != 1.0:
            moved = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            self._keeping = Detached(keep, moved, partial(self._waiting, names))
            optimizer.register_step_pre_hook(self._restore_moved)
        self._momentum = {name: torch.zeros_like(one) for name, one in self._shared.items()} if outer_momentum else {}
        self._travelling: list[tuple[Tensor, Tensor]] = []
        """Of every parameter, how far it has moved before the exchange that travels, and what of that is sent."""
        self._steps = 0
        self._made = next(_made)
        self._number: int | None = None
        """The same on all workers; None before the first exchange."""
        self._unchecked = True
        """Whether the shared parameters are still to be compared with those of the other workers."""

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The optimizer's."""
        return self.optimizer.param_groups

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients, as the optimizer does."""
        self.optimizer.zero_grad(set_to_none)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step the optimizer, and do as `count_step`. Return what the optimizer's `step` returns."""
        if hasattr(self, "found_inf"):
            raise RuntimeError(
                "scaler.step must be given the optimizer itself, got LocalUpdates: call scaler.step(optimizer), "
                "scaler.update(), and then local.count_step(), also where the scaler has left out the optimizer's step"
            )

        def closed() -> Any:
            loss = None if closure is None else closure()
            # The optimizer is to step from where the parameters were.
            self._restore_moved()
            return loss

        loss = self.optimizer.step() if closure is None else self.optimizer.step(closed)
        self.count_step()
        return loss

    def count_step(self) -> None:
        """Count a step that the optimizer has made, or a `GradScaler` has left out. Exchange after every `every`-th."""
        self._steps += 1
        if self._steps >= self.outer.overlap:
            self._arrive()
        if self._steps >= self.outer.every:
            if self.outer.overlap:
                self._depart()
            else:
                self.synchronize()

    @uncompiled
    @torch.no_grad()
    def synchronize(self) -> None:
        """Exchange now. All workers then have the same parameters. Call this on all of them, for instance at the end.

        Raises:
            FloatingPointError: on every worker, if a parameter of any worker holds NaN or infinity. All workers then have
                the parameters of the last exchange again, and training can go on.
            ValueError: on every worker, if they differ in settings or in the parameters with which they begin.
        """
        # Not later: also if this exchange fails, all workers count from here.
        self._steps = 0
        self._finish()
        self._reducer.start_all(self._drifts())
        self._finish()

    @uncompiled
    @torch.no_grad()
    def _depart(self) -> None:
        """Start an exchange, and go on without the others' part of it."""
        self._steps = 0
        growth, rate = self._reducer.lengths.factor(self._transport.world), self.outer.outer_lr
        moved = self._drifts()
        self._reducer.start_all(moved)
        sent, part = self._reducer.sent(moved), 1.0 if rate == "auto" else rate
        travelling = [(one / growth, sent[parameter] * (part / growth)) for parameter, one in moved.items()]
        self._movement.restore()
        self._movement.go_on([own for _, own in travelling])
        # Not before the parameters are there: `_arrive` goes on from them.
        self._travelling = travelling

    @uncompiled
    @torch.no_grad()
    def _arrive(self) -> None:
        """Do as `_finish`."""
        self._finish()

    def _finish(self) -> None:
        """Wait for the exchange that travels, if there is one. The mean replaces this worker's own part."""
        if not self._reducer.in_flight:
            return
        self._restore_moved()
        follow(self._parts)
        travelling, self._travelling = self._travelling, []
        means = self._reducer.finish_all()
        if self._reducer.failed:
            self._movement.restore()
            raise FloatingPointError(
                f"rank {self._transport.rank}: the movement of a parameter holds NaN or infinity on some worker. All workers "
                "have the parameters of the last exchange again, and may go on; lower the learning rate"
            )
        self._move_shared(means)
        if travelling:
            self._movement.go_on([mean - own for mean, (_, own) in zip(means.values(), travelling, strict=True)])
        else:
            # No step was made meanwhile.
            self._movement.restore()
        self._unchecked = False

    def _restore_moved(self, *_: object) -> None:
        """Give the parameters back what they were before a forward pass."""
        if self._keeping is not None:
            self._keeping.restore()

    def _waiting(self, names: Mapping[Tensor, str]) -> list[Waiting]:
        """Return what waits between two exchanges: in the pipeline, or in a state that was loaded before the first one."""
        pipeline, state = self._reducer.pipeline, self._reducer.deferred or empty_state()
        residuals = state["residuals"]
        if pipeline is not None:
            nothing = all(bucket.is_dense for bucket in pipeline.buckets)
            residuals = {} if nothing else pipeline.residuals.views
        found, unit = [], 1.0 / self._reducer.lengths.factor(self._transport.world)
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                residual = residuals.get(names.get(parameter, "")) if parameter.requires_grad else None
                # If the shape differs, the step raises.
                if residual is not None and residual.shape == local_part(parameter).shape:
                    # A state that was loaded may be in the host's memory.
                    found.append((parameter, residual.to(parameter.device), unit))
        return found

    def _move_shared(self, means: dict[Tensor, Tensor]) -> None:
        """Move the shared parameters by the means of what all workers have sent, which become their steps."""
        for name, parameter in self._parameters.items():
            self.outer.step(means[parameter], self._momentum.get(name))
        self._movement.move([means[parameter] for parameter in self._movement.parameters])
        if self._reducer.pipeline is not None:
            self._reducer.pipeline.decay(self.outer.residual_decay)

    def _drifts(self) -> dict[Tensor, Tensor]:
        """Return how far the parameters have moved, and by how much that must grow, if the other workers agree."""
        problem = None
        self._restore_moved()
        follow(self._parts)
        try:
            _names(self.optimizer, self._model, self._names)
        except ValueError as error:
            # The others are told: they would wait.
            problem = error
        number = str(self._number)
        if self._number is None:
            # Two that begin alike may have been taken in another order elsewhere. It shows at the second.
            number = "made before another one that has exchanged already" if self._made < _newest else "new"
        drifts = [torch.empty_like(one) for one in self._movement.copies]
        self._movement.write(drifts)
        for parameter, drift in zip(self._movement.parameters, drifts, strict=True):
            if not parameter.requires_grad:
                drift.zero_()
        moved = dict(zip(self._movement.parameters, drifts, strict=True))
        values = sums(self._shared.values()) if self._unchecked else []
        mine: Description = {
            "local updates": f"{number}, {self.outer}, grows={self._reducer.lengths.grow}",
            # Nothing if they were compared before. All workers send this whenever one has loaded a state: nobody waits.
            "shared parameters": [f"{name}: {bits}" for name, bits in zip(self._shared, values, strict=False)],
            "problem": str(problem),
            "step": str(self._reducer.exchanges),
        }
        self._agree(mine, problem)
        # If this worker alone fails from here on, the others' shared parameters will be others.
        self._unchecked = True
        return self._reducer.grown(moved)

    def _agree(self, mine: Description, problem: ValueError | None) -> None:
        global _agreed, _newest
        everyone = self._transport.everyone([mine, _agreed])
        try:
            compare(mine, [theirs for theirs, _ in everyone], self._transport.rank)
        except ValueError as error:
            problem = problem or error
        for shards in self._reducer.shards:
            told = "".join(shards.everyone(str(problem or "")))
            problem = problem or (ValueError(f"in another shard: {told}") if told else None)
        if problem is not None:
            raise problem
        if self._number is None:
            self._number = max(number for _, number in everyone)
            _agreed, _newest = self._number + 1, max(_newest, self._made)

    def state_dict(self) -> dict[str, Any]:
        """Return what this worker keeps beside its parameters and its optimizer: save all three on every worker."""
        parts = {"shared": self._shared, "momentum": self._momentum}
        compression, lengths = self._reducer.state_dict(), self._reducer.lengths.state()
        return {"steps": self._steps, "lengths": lengths, **copy.deepcopy(parts), "compression": compression}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state_dict` returned, with the same parameters and settings.

        Before the first exchange, the state of the compression is checked in that exchange, and all workers raise.

        Raises:
            ValueError: the state belongs to other parameters, or is none of `LocalUpdates`; nothing was changed.
        """
        check_parts(state, {"shared": self._shared, "momentum": self._momentum})
        self.compression.load_state_dict(state["compression"])
        self._reducer.lengths.load(state["lengths"])
        self._unchecked = True
        for part, mine in (("shared", self._shared), ("momentum", self._momentum)):
            for name, array in mine.items():
                array[...] = state[part][name]
        self._steps = int(state["steps"])


class _Reducer(GroupReducer):
    def __init__(self, compressor: TorchCompressor, transport: Group, names: Mapping[Tensor, str]) -> None:
        super().__init__(compressor, transport, names)
        self.lengths = Lengths()
        """What tells by how much movements must grow."""
        self._sample = Sample()
        self._measured: Wait | None = None
        """Waits for the sums of all workers' samples, from which `lengths` learns."""
        self.in_flight = False
        """Whether an exchange travels while steps go on. The residuals lack what it has taken."""
        self.failed = False
        """Whether the last exchange has failed, because a movement was not finite on some worker."""

    @property
    def exchanges(self) -> int:
        """The number of those that buckets have made, also in a state that was loaded before the first."""
        if self.pipeline is not None:
            return max((bucket.state.step for bucket in self.pipeline.buckets), default=0)
        return max((one["step"] for one in (self.deferred or {"adaptive": {}})["adaptive"].values()), default=0)

    def grown(self, movements: dict[Tensor, Tensor]) -> dict[Tensor, Tensor]:
        """Return the movements, which have grown by what their mean over the workers loses (`Lengths`)."""
        if self.lengths.grow and movements:
            sample = self._sample.of(movements)
            self._measured = self._transport.start(Collective("allreduce", sample), ".sample")
            torch._foreach_mul_([*movements.values()], self.lengths.factor(self._transport.world))
        return movements

    def start_all(self, movements: dict[Tensor, Tensor]) -> None:
        """Start to replace movements by their means over the workers. They are as they were until `finish_all`."""
        self._step.gradients.update(movements)
        if self.active:
            self._take_all()
        self.in_flight = True

    def finish_all(self) -> dict[Tensor, Tensor]:
        """Wait for what was started, and return the means, in the memory of the movements."""
        movements = self._step.gradients
        try:
            if self.active:
                self._complete()
        finally:
            self._step, self.in_flight = Step(), False
        return movements

    def _fail_together(self, pipeline: Pipeline) -> None:
        super()._fail_together(pipeline)
        measured, self._measured, self.failed = self._measured, None, pipeline.fails
        if measured is not None:
            means = measured() / self._transport.world
            if not self.failed:
                self.lengths.note(means.tolist())

    def sent(self, moved: Mapping[Tensor, Tensor]) -> dict[Tensor, Tensor]:
        """Return what this worker sends of what has `moved`, and of its residuals, in the exchange that has started."""
        found, pipeline = {**moved}, self.pipeline
        for bucket in () if pipeline is None else pipeline.buckets:
            sent = bucket.sent_of_all()
            for name, slot in bucket.slots.items():
                parameter = self._routes.in_buckets[name]
                found[parameter] = sent[slot.offset : slot.offset + slot.numel].view(parameter.shape)
        return found

    def stats(self) -> Stats:
        return NO_STATS if self.pipeline is None else self.pipeline.stats()

    def between_steps(self) -> Pipeline | None:
        if self.in_flight:
            raise RuntimeError(
                f"rank {self._transport.rank}: state must be saved, loaded or changed when no exchange travels, but one does; "
                "do so after `overlap` local steps, or call synchronize() of LocalUpdates on all workers first"
            )
        return super().between_steps()

    def scale_with(self, scaler: torch.amp.GradScaler) -> None:
        raise RuntimeError(
            "scale_with must not be called with local updates, because the scaler's gradients stay on their worker: call "
            "scaler.step(optimizer) with the optimizer itself, and then local.count_step()"
        )


def _check_arguments(optimizer: object, model: object) -> None:
    """Raise TypeError unless the optimizer and the model leave gradients on their worker."""
    if not hasattr(optimizer, "param_groups") or not isinstance(model, nn.Module):
        raise TypeError(
            "optimizer and model must be given in this order, LocalUpdates(optimizer, model, compression), got "
            f"{type(optimizer).__name__} and {type(model).__name__}"
        )
    if hasattr(optimizer, "_allreduce_grad_async"):
        raise TypeError(
            "optimizer must be a plain one with local updates, got one of hvd.DistributedOptimizer, which would average all "
            "gradients; leave hvd.DistributedOptimizer out"
        )
    if any(isinstance(module, DistributedDataParallel) for module in model.modules()):
        raise TypeError(
            "model must be a plain one with local updates, got one in DistributedDataParallel, which would average all "
            "gradients; leave DistributedDataParallel out"
        )


def _check_settings(c: TorchCompressor) -> None:
    """Raise ValueError if a compressor does what has no meaning for movements of parameters."""
    for name, value, needed, why in (
        ("momentum", c.momentum_correction, None, "momentum is the optimizer's, or outer_momentum of LocalUpdates"),
        ("clip", c.clip, None, "what it clips off a movement is lost; clip gradients before the optimizer steps"),
        ("lr_in_residual", c.lr_in_residual, False, "residuals are in units of the parameters already"),
    ):
        if value != needed:
            raise ValueError(f"compression must have {name}={needed!r} with local updates, got {value!r}: {why}")


def _names(optimizer: torch.optim.Optimizer, model: nn.Module, known: Sequence[str] | None = None) -> dict[Tensor, str]:
    """Return the optimizer's parameters with their names, in the order of the model. They must be those that are `known`."""
    moved = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    names: dict[Tensor, str] = {p: name for name, p in model.named_parameters() if p in moved}
    if len(names) < len(moved):
        raise ValueError(
            f"optimizer must have parameters of the model only, got {len(moved) - len(names)} others; they would drift apart"
        )
    if known is not None and [*names.values()] != known:
        raise ValueError(
            f"optimizer must have the parameters {known}, with which LocalUpdates was made, got {[*names.values()]}; "
            "make it again after parameters were added"
        )
    return names


def _placed(
    model: nn.Module, names: Mapping[Tensor, str], group: Any
) -> tuple[dict[Tensor, Tensor], Group, Sequence[Group]]:
    """Return the parts of the parameters that are here, what joins the workers, and what joins the ranks of this one."""
    if any(map(is_sharded, names)):
        # They take a second to import.
        from torch.distributed.fsdp import FSDPModule

        from horovod_sparse.torch import fsdp

        if isinstance(model, FSDPModule):
            parts, mesh = held(names), fsdp.mesh_of(model, names)
            check_memory({part: names[parameter] for parameter, part in parts.items()})
            device = next(iter(parts.values())).device
            return parts, fsdp.replicas_of(group, mesh, device), fsdp.shards_of(mesh, device)
    check_memory(names)
    return held(names), transport_of(group, next(iter(names)).device), ()


def transport_of(group: Any, device: torch.device) -> Group:
    """Return the collectives of a process set, or of a process group of `torch.distributed`; None for all workers."""
    with_horovod = stock.module is not None and stock.module.is_initialized()
    if with_horovod and (isinstance(group, stock.module.ProcessSet) or (group is None and not dist.is_initialized())):
        from horovod_sparse.contrib.horovod_group import HorovodGroup

        return HorovodGroup(stock.module.global_process_set if group is None else group)
    if not dist.is_initialized():
        raise ValueError(
            "nothing connects the workers yet; call hvd.init() or torch.distributed.init_process_group() first"
        )
    return Group(group, device)


def check_parts(state: Mapping[str, Any], mine: Mapping[str, Mapping[str, Tensor]]) -> None:
    """Raise ValueError if a state is none of local updates, or if the arrays in a part have other shapes than `mine`."""
    absent = [part for part in ("steps", "lengths", "compression", *mine) if part not in state]
    if absent:
        raise ValueError(f"state must be what LocalUpdates.state_dict() returned, but it has no {absent}")
    for part, arrays in mine.items():
        shapes, theirs = ({name: tuple(one.shape) for name, one in some.items()} for some in (arrays, state[part]))
        if shapes != theirs:
            raise ValueError(f"the state's {part!r} must have the shapes {shapes}, got {theirs}; it is another model's")
