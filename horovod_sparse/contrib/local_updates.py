"""Local updates: workers step alone and exchange how far their parameters have moved. Imports Horovod only where it is used.

theta_r are worker r's parameters after H = `every` steps of its optimizer from the shared theta, and s the growth of `Lengths`:

    Delta_r = s (theta_r - theta)
    e_r     = e_r + Delta_r
    sent_r  = the entries of e_r that the compressor selects
    e_r     = e_r - sent_r
    theta   = theta + mean(sent_r)

This is SparseLoCo (https://arxiv.org/abs/2508.15706) without decay of e and without an outer learning rate, and with s.

Tested by tests/parallel/local.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from horovod_sparse.compressors.checks import check_integer, check_number
from horovod_sparse.contrib.settings import check_settings
from horovod_sparse.contrib.torch_rounds import Rounds
from horovod_sparse.contrib.torch_workers import check_arguments, check_state, names_of, placed, refuse_steps
from horovod_sparse.core.agreement import divides
from horovod_sparse.core.binding import check_kind
from horovod_sparse.torch.ahead import Ahead
from horovod_sparse.torch.compressors import NoOp, TorchCompressor


class LocalUpdates:
    """Steps of any optimizer on each worker alone, and a sparse exchange of how far they have moved the parameters.

        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        local = LocalUpdates(optimizer, model, SIDCo(0.01))
        for batch in batches:
            optimizer.zero_grad()
            with local.ahead():
                loss(model, batch).backward()
            local.step()

    Its module begins with the formulas. Where `every` is 1, nothing counts but what the optimizer's step does: `step` reads the
    parameters as the program left them, and nothing is remembered between steps but the residuals e. Call `step` of this object
    and not the optimizer's; a `GradScaler` takes this object for the optimizer. The model is not in `DistributedDataParallel`,
    and the optimizer is not Horovod's: gradients stay on their worker. All workers begin with the same parameters. The states
    of the optimizers and the buffers of the model (running means) differ between workers.

    Args:
        optimizer: the optimizer of the local steps.
        model: whose parameters the optimizer moves.
        compression: a compressor of this module; None exchanges everything.
        every: number of local steps between two exchanges, >= 1. With more than 1, parameters are the worker's own in between.
        grow: whether movements grow by s, but for the weight decay of groups with `decoupled_weight_decay`. None: if the
            optimizer divides by the size of the gradient, as Adam does.
        skip_nonfinite: whether a worker whose gradients hold NaN or infinity leaves out its step, as by `skip`. Otherwise such
            parameters become NaN on all workers, as with dense averages.
        group: a process group of `torch.distributed`, or a process set of Horovod; None for all workers of the one that was
            initialised. With a model of `fully_shard`, `mesh["replicate"]`: each replica is a worker.

    Raises:
        TypeError: the optimizer is Horovod's, the model is in `DistributedDataParallel`, the two are in the wrong order,
            `compression` is not a compressor of this module, a parameter has no memory of its own, or a number is no int.
        ValueError: a number is not in its range, the optimizer has parameters that the model has not, or nothing connects
            the workers yet.
    """

    _step_supports_amp_scaling = True
    """A `GradScaler` then calls `step` in any case, and sets the next two for that."""
    found_inf: Tensor | None = None
    """Above 0 if gradients are not finite."""
    grad_scale: Tensor | float | None = 1.0
    """A tensor is what gradients are still multiplied by."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        model: nn.Module,
        compression: TorchCompressor | None = None,
        *,
        every: int = 1,
        grow: bool | None = None,
        skip_nonfinite: bool = False,
        group: Any = None,
    ) -> None:
        check_arguments(optimizer, model)
        check_integer("every", every, 1)
        self.optimizer, self.every, self.skip_nonfinite = optimizer, int(every), skip_nonfinite
        self.compression = NoOp() if compression is None else compression
        check_kind(self.compression, TorchCompressor, "horovod_sparse.torch", stock=False)
        check_settings(self.compression)
        names = names_of(optimizer, model)
        known = [*names.values()]
        parts, transport, shards = placed(model, names, group)
        # A rank may hold nothing of a sharded parameter.
        parts = {whole: part for whole, part in parts.items() if part.numel()}
        self._names = {part: names[whole] for whole, part in parts.items()}
        self._by_name = {names[whole]: whole for whole in parts}
        self._rounds = Rounds(
            self.compression,
            parts,
            self._names,
            transport,
            shards,
            every=int(every),
            grow=divides(optimizer.param_groups) if grow is None else bool(grow),
            check=lambda: names_of(optimizer, model, known),
            device=next(iter(names)).device,
        )
        self._ahead = Ahead()
        self._stepping = False
        if self._rounds.active:
            refuse_steps(self, optimizer, lambda local: local._stepping)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The optimizer's."""
        return self.optimizer.param_groups

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients, as the optimizer does."""
        self.optimizer.zero_grad(set_to_none)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Let the optimizer step, and exchange after every `every`-th step. Return what the optimizer's `step` returns.

        Raises:
            ValueError: on all workers, if they differ in settings, in their steps, or in the parameters with which they begin.
            RuntimeError: another worker has given up the step; the parameters are where they began.
        """
        if not self._rounds.active:
            return self._step_alone(closure)
        if self._unfit():
            self.skip()
            return None
        self._rounds.begin_step(self.optimizer)
        try:
            loss = self._step_alone(closure)
        except Exception as error:
            # The others wait for this worker.
            self._rounds.end_step(error)
            raise
        self._rounds.movement.note_decay(self.param_groups)
        self._rounds.end_step()
        return loss

    def skip(self) -> None:
        """Count a step that this worker leaves out: where it has moved to since the last exchange is exchanged all the same."""
        if self._rounds.active:
            self._rounds.begin_step(self.optimizer)
            self._rounds.end_step()

    def synchronize(self) -> None:
        """Exchange now if a step was made since the last exchange. Call this on all workers, for instance at the end."""
        if self._rounds.movement.begun:
            self._rounds.exchange()

    def ahead(self, coefficient: float = 0.5) -> AbstractContextManager[None]:
        """A block for forward and backward in which this worker's parameters are at `theta + coefficient e / s`.

        What a worker has found and not sent yet is then not lost to its gradients. When the block ends, the parameters are what
        they were, bit by bit. The copies have the memory of the parameters.

        Args:
            coefficient: in [0, 1].

        Raises:
            RuntimeError: something has written to parameters within the block.
        """
        check_number("coefficient", coefficient, "in [0, 1]", lambda c: 0.0 <= c <= 1.0)
        return self._ahead.block(self._by_name, coefficient, self._rounds.waiting)

    def shared(self) -> AbstractContextManager[None]:
        """A block in which parameters are those of the last exchange, the same on all workers, also on one worker alone."""
        return self._rounds.movement.shared()

    # --- a step ---

    def _step_alone(self, closure: Callable[[], Any] | None) -> Any:
        self._stepping = True
        try:
            return self.optimizer.step() if closure is None else self.optimizer.step(closure)
        finally:
            self._stepping = False

    def _unfit(self) -> bool:
        """Return whether this worker leaves out the step. Otherwise gradients have no loss scale any more."""
        gradients = [parameter.grad for group in self.param_groups for parameter in group["params"]]
        found = [one for one in gradients if one is not None]
        if self.found_inf is not None and self.found_inf.item():
            return True
        if isinstance(self.grad_scale, Tensor):
            for gradient in found:
                gradient.div_(self.grad_scale.to(gradient.device))
        return self.skip_nonfinite and not all(bool(one.isfinite().all()) for one in found)

    def state_dict(self) -> dict[str, Any]:
        """Return what this worker keeps beside its parameters and its optimizer: save all three on every worker."""
        return self._rounds.state()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state_dict` returned, with the same parameters and settings.

        Before the first exchange, the state of the compression is checked in that exchange, and all workers raise.

        Raises:
            ValueError: the state belongs to other parameters, or is none of `LocalUpdates`; nothing was changed.
        """
        check_state(state, self._names)
        self._rounds.load(state)
