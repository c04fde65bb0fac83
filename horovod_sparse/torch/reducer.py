"""What a wrapped optimizer does with its gradients when its compression is one of ours.

One `Reducer` per optimizer. Hooks feed it gradients while backward goes on and never wait for another rank (on a GPU, buckets
that have no selector do wait for the device); `synchronize` waits, once.
The first step is reduced as a whole, after the ranks have compared their settings: a difference raises on all of them
instead of hanging, and the embeddings with sparse gradients are known to all.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from horovod.torch import mpi_ops
from torch import Tensor

from horovod_sparse.bucket import Bucket
from horovod_sparse.buckets import Slot
from horovod_sparse.exchanges import Collective, Entries, add_up
from horovod_sparse.pipeline import Pipeline
from horovod_sparse.serving import compresses, stats_of
from horovod_sparse.state import check_state, empty_state, holds_anything
from horovod_sparse.statistics import Stats
from horovod_sparse.torch.agreement import agree, agree_on_states, check_momentum
from horovod_sparse.torch.compressors import TorchCompressor
from horovod_sparse.torch.device import on_gpu
from horovod_sparse.torch.exchange import allreduce_async, gather_async, sum_async
from horovod_sparse.torch.ops import TorchOps
from horovod_sparse.torch.routes import Routes, wire_dtype

# Optimizers made so far per process set. All its ranks make theirs in the same order, so the number names one everywhere.
# The ranks are part of the key because Horovod gives the number of a removed set to the next one that is added.
_made: Counter[tuple[int, ...]] = Counter()


class Reducer:
    """Reduces the gradients of one `hvd.DistributedOptimizer`.

    Args:
        optimizer: the wrapped optimizer, fully constructed.
        compressor: the `compression` it was given, checked by `check_arguments` and `check_momentum`.
    """

    def __init__(self, optimizer: Any, compressor: TorchCompressor) -> None:
        compressor.bind(self)
        self.compressor = compressor
        self.pipeline: Pipeline | None = None
        self._optimizer = optimizer
        self._ops = TorchOps()
        self._process_set = optimizer.process_set
        set_id = self._process_set.process_set_id
        key = (set_id, *self._process_set.ranks)
        self._prefix = f"horovod_sparse.{set_id}.{_made[key]}"
        _made[key] += 1
        self._agreements = 0
        self._routes = Routes(optimizer, compressor)
        self._submitted: dict[Tensor, tuple[Tensor | None, int]] = {}
        """Parameters whose gradients are under way, with those gradients and their versions when they were handed over."""
        self._exchanges: list[tuple[Bucket, Callable[[], Tensor]]] = []
        """Buckets under way, with what waits for the collective that each has started."""
        self._allreduces: dict[Tensor, tuple[Tensor, Callable[[], Tensor]]] = {}
        self._sparse_handles: dict[Tensor, Callable[[], Tensor]] = {}
        self._learning_rates: dict[Tensor, float] = {}
        """Of this step, looked up when first needed."""
        self._pending_state: Mapping[str, Any] | None = None
        self.active = self._activate()

    def _activate(self) -> bool:
        if not self._process_set.included() or not compresses(self._process_set.size()):
            return False
        if mpi_ops.size() == 1:
            # Stock Horovod leaves out the hooks then.
            self._optimizer._register_hooks()
        return True

    # --- gradients in: called from hooks, never waits ---

    @torch.no_grad()
    def submit(self, parameter: Tensor) -> None:
        """Take in a gradient that is ready. In the first step, before there is a plan, it waits for `synchronize`."""
        if self.pipeline is None or parameter not in self._routes.names:
            return
        gradient, name = parameter.grad, self._routes.names[parameter]
        if parameter in self._routes.sparse:
            if gradient is None:
                parameter.grad = _empty_sparse(parameter)
            self._sparse_handles[parameter] = self._optimizer._sparse_allreduce_grad_async(
                parameter, f"{self._prefix}.{name}"
            )[0]
        elif parameter in self._routes.dense:
            self._submit_dense(parameter, name)
        else:
            if gradient is not None and gradient.is_sparse:
                gradient = gradient.to_dense()
            bucket = self.pipeline.arrive(name, gradient, self._learning_rate(parameter))
            if bucket is not None:
                self._exchanges.append((bucket, self._start(bucket, self.pipeline.begin(bucket))))
        gradient = parameter.grad
        self._submitted[parameter] = (gradient, 0 if gradient is None else gradient._version)

    def _start(self, bucket: Bucket, collective: Collective) -> Callable[[], Tensor]:
        start = gather_async if collective.kind == "allgather" else sum_async
        name = f"{self._prefix}.{bucket.name}.{bucket.rounds}"
        return start(collective.message, name, self._process_set)

    def _learning_rate(self, parameter: Tensor) -> float | None:
        if not self.compressor.lr_in_residual:
            return None
        if not self._learning_rates:
            groups = self._optimizer.param_groups
            self._learning_rates = {member: float(group["lr"]) for group in groups for member in group["params"]}
        return self._learning_rates[parameter]

    def _submit_dense(self, parameter: Tensor, name: str) -> None:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        gradient = parameter.grad.to_dense() if parameter.grad.is_sparse else parameter.grad
        assert self.pipeline is not None
        clipped = self.pipeline.clipped(gradient, "float64" if gradient.dtype == torch.float64 else "float32")
        tensor = clipped.to(wire_dtype(gradient)).contiguous()
        predivide = self._optimizer.gradient_predivide_factor
        wait = allreduce_async(tensor, f"{self._prefix}.{name}", self._optimizer.op, predivide, self._process_set)
        self._allreduces[parameter] = (tensor, wait)

    # --- reduced gradients out ---

    def synchronize(self) -> None:
        """Reduce all gradients and leave the results in `.grad`. A second call without new gradients does nothing."""
        optimizer = self._optimizer
        fresh = bool(optimizer._handles) or not optimizer._synchronized
        if self.active and fresh:
            self._check_unchanged()
            self._routes.adopt()
            if not self._routes.complete:
                self._extend_routes()
            for parameter in self._routes.names:
                if parameter not in self._submitted:
                    self.submit(parameter)
            self._finish()
        if fresh:
            # Stock hooks count down, also those of a process set of one worker.
            for parameter in optimizer._allreduce_delay:
                optimizer._allreduce_delay[parameter] = optimizer.backward_passes_per_step
            for group in optimizer._group_counts:
                optimizer._group_counts[group] = 0
        optimizer._handles.clear()
        optimizer._synchronized = True
        if self.active and fresh and self.pipeline is not None:
            self.pipeline.end_step()

    def _check_unchanged(self) -> None:
        for parameter, (gradient, version) in self._submitted.items():
            if parameter.grad is not gradient or (gradient is not None and gradient._version != version):
                name = self._routes.names[parameter]
                raise RuntimeError(
                    f"rank {mpi_ops.rank()}: the gradient of parameter {name!r} was changed after backward "
                    "had handed it over, and the change would be lost. Change reduced gradients: call "
                    "optimizer.synchronize(), change them, and step with optimizer.skip_synchronize(); or local ones, with "
                    "parameter.register_hook()"
                )

    @torch.no_grad()
    def _finish(self) -> None:
        pipeline = self.pipeline
        assert pipeline is not None
        divisor = float(pipeline.world) if self._optimizer.op == mpi_ops.Average else 1.0
        under_way = self._exchanges
        while under_way:
            # Every bucket's next collective is started before the first of those is waited for.
            following = []
            for bucket, result in under_way:
                collective = pipeline.advance(bucket, result(), divisor, self._write)
                if collective is not None:
                    following.append((bucket, self._start(bucket, collective)))
            under_way = following
        for parameter, (tensor, wait) in self._allreduces.items():
            wait()
            pipeline.finish_dense(self._routes.names[parameter], tensor)
            self._replace_gradient(parameter, tensor)
        for parameter, wait in self._sparse_handles.items():
            parameter.grad = wait()
            pipeline.check_reduced(self._routes.names[parameter], parameter.grad._values())
        self._exchanges.clear()
        self._learning_rates.clear()
        self._allreduces.clear()
        self._sparse_handles.clear()
        self._submitted.clear()

    def _write(self, slot: Slot, parts: list[Entries] | None) -> None:
        parameter = self._routes.compressed[slot.name]
        gradient = parameter.grad
        in_place = (
            gradient is not None
            and parameter not in self._routes.sparse_as_dense
            and not gradient.is_sparse
            and gradient.is_contiguous()
            and gradient.dtype in (torch.float32, torch.float64)
        )
        if in_place:
            assert gradient is not None
            flat = gradient.view(-1)
        else:
            # Half-precision sums are rounded once, at the end, and not after every rank.
            wide = torch.float64 if parameter.dtype == torch.float64 else torch.float32
            flat = torch.empty(parameter.numel(), dtype=wide, device=parameter.device)
        add_up(self._ops, parts, flat)
        if not in_place:
            self._replace_gradient(parameter, flat.view(parameter.shape))

    def _replace_gradient(self, parameter: Tensor, dense: Tensor) -> None:
        """Put a reduced gradient where the optimizer looks for it, in the layout that the gradient had."""
        gradient = parameter.grad
        # Sparse or dense on all ranks alike, whatever a rank has: optimizers round the two differently.
        if parameter in self._routes.sparse_as_dense:
            parameter.grad = dense.to(parameter.dtype).to_sparse()
        elif gradient is None or gradient.is_sparse:
            parameter.grad = dense.to(parameter.dtype)
        elif gradient.data_ptr() != dense.data_ptr():
            gradient.copy_(dense)

    def parameters_added(self) -> None:
        """Called when the optimizer has got another group of parameters."""
        self.settings_changed()
        if self.active:
            self._routes.adopt()

    def settings_changed(self) -> None:
        """Called when the optimizer's settings may have changed."""
        check_momentum(self._optimizer.param_groups, self.compressor)

    def _extend_routes(self) -> None:
        new = self._routes.without_route()
        known = (self._pending_state or {}).get("sparse", ())
        self._agreements += 1
        name, process_set = f"{self._prefix}.agree.{self._agreements}", self._process_set
        sparse = agree(self._optimizer, self.compressor, new, known, name)
        agree_on_states(self._problem_with_state(sparse), f"{name}.state", process_set)
        if self.pipeline is None:
            self.pipeline = Pipeline(
                self._ops,
                self.compressor,
                world=process_set.size(),
                position=process_set.rank(),
                rank=mpi_ops.rank(),
                averages=self._optimizer.op == mpi_ops.Average,
                selector_for=on_gpu,
            )
        self._routes.extend(new, sparse, self.pipeline)
        if self._pending_state is not None:
            self.pipeline.load_state_dict(self._pending_state)
            self._pending_state = None

    def _problem_with_state(self, sparse: Collection[str]) -> str:
        """What a state that waits cannot be loaded for, now that it is known which gradients are sparse; "" if it can."""
        if self._pending_state is None:
            return ""
        left_out = () if self._optimizer.sparse_as_dense else sparse
        try:
            check_state(self._pending_state, self.compressor, *self._routes.expected_shapes(left_out))
        except ValueError as error:
            return str(error)
        return ""

    # --- statistics and state: see `ServingCompressor` ---

    def stats(self) -> Stats:
        return stats_of(self.pipeline)

    @property
    def residual_bytes(self) -> int:
        return 0 if self.pipeline is None else self.pipeline.residuals.nbytes

    def state_dict(self) -> dict[str, Any]:
        """The pipeline's state and the names of the parameters with sparse gradients, which have none."""
        if self._pending_state is not None:
            return copy.deepcopy(dict(self._pending_state))
        if self.pipeline is None:
            return empty_state()
        sparse = sorted(self._routes.names[parameter] for parameter in self._routes.sparse)
        return {**self.pipeline.state_dict(), "sparse": sparse}

    def load_compression_state(self, state: Mapping[str, Any]) -> None:
        """Load now, or, before the first step, when the buckets are made."""
        if self.pipeline is not None:
            self.pipeline.load_state_dict(state)
            return
        if self.active and holds_anything(state):
            # A wrong state is found when it is loaded, not in the middle of the first step.
            check_state(state, self.compressor, *self._routes.expected_shapes(state.get("sparse", ())))
        self._pending_state = copy.deepcopy(dict(state)) if holds_anything(state) else None

    def rescale(self, factor: float) -> None:
        """Multiply all residuals and velocities."""
        if self._pending_state is not None:
            for kept in ("residuals", "velocities"):
                for array in self._pending_state[kept].values():
                    array *= factor
        if self.pipeline is not None:
            self.pipeline.rescale(factor)

    def reset(self) -> None:
        """Forget residuals, adaptive state and statistics."""
        self._pending_state = None
        if self.pipeline is not None:
            self.pipeline.reset()

    def discard_step(self) -> None:
        """See `ServingCompressor.discard_step`."""
        if self.pipeline is None:
            raise RuntimeError("there is no step to discard: nothing was reduced yet")
        self.pipeline.discard_step()


def _empty_sparse(parameter: Tensor) -> Tensor:
    indices = torch.empty((1, 0), dtype=torch.int64, device=parameter.device)
    values = torch.empty((0, *parameter.shape[1:]), dtype=parameter.dtype, device=parameter.device)
    return torch.sparse_coo_tensor(indices, values, parameter.shape)
