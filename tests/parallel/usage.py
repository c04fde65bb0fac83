"""Scenarios: the ways in which people use `hvd.DistributedOptimizer`, and what must be refused."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

import horovod.torch as hvd
import numpy as np
import torch
from horovod.torch import optimizer as horovod_optimizer
from torch import nn

from horovod_sparse.core.sending import Sending
from horovod_sparse.exchange import wire
from horovod_sparse.torch import DGC, MiCRO, NoOp, SIDCo, TopK, Union, seam
from tests.harness.process import is_from

from .common import (
    BUCKET_BYTES,
    assert_identical,
    assert_trains_as_one,
    batch,
    digest,
    everyone,
    feed,
    gradient_of,
    loss_of,
    raised,
    reduce,
    small_model,
    train,
    whole_numbers,
    wrap,
    wrap_parameters,
    zeros,
)
from .exchange import SHAPES, noted_calls
from .scenario import EVERYWHERE, MPI, MPI_2, PAIR, scenario


def _mean(name: str, step: int, *salts: int) -> np.ndarray:
    """The mean over ranks of the sums of some passes."""
    ranks = range(hvd.size())
    passes = [whole_numbers(SHAPES[name], step=step, rank=r, salt=s) for r in ranks for s in salts]
    return sum(passes) / hvd.size()


def _pass(parameters: Any, step: int, salt: int) -> None:
    feed(parameters, {n: whole_numbers(s, step=step, rank=hvd.rank(), salt=salt) for n, s in SHAPES.items()})


# --- accumulation ---


@scenario(*MPI, cases={"NoOp": (NoOp,), "TopK": (lambda: TopK(0.02, warmup=None),)})
def several_backward_passes(make: Any) -> None:
    # Two passes are one step; in every third step the data end after the first pass. At last three passes are one step.
    parameters = zeros(SHAPES)
    compression = make()
    optimizer = wrap_parameters(parameters, compression, backward_passes_per_step=2)
    missing = {name: np.zeros(shape) for name, shape in SHAPES.items()}
    for step in range(8):
        salts = (0, 1, 2) if step == 7 else (0,) if step % 3 == 2 else (0, 1)
        if step == 7:
            optimizer.set_backward_passes_per_step(3)
        optimizer.zero_grad()
        for salt in salts:
            _pass(parameters, step, salt)
        optimizer.step()
        residuals = everyone({n: r.double().numpy() for n, r in compression.state_dict()["residuals"].items()})
        for name, parameter in parameters.items():
            kept = sum(one[name] for one in residuals) / hvd.size() if name in residuals[0] else 0.0
            change = kept - missing[name]
            np.testing.assert_array_equal(gradient_of(parameter) + change, _mean(name, step, *salts), err_msg=name)
            missing[name] = missing[name] * 0.0 + kept


@scenario(MPI_2)
def too_many_backward_passes() -> None:
    for passes in (1, 2):
        parameters = zeros(SHAPES)
        optimizer = wrap_parameters(parameters, TopK(0.02, warmup=None), backward_passes_per_step=passes)
        for step in range(2):
            optimizer.zero_grad()
            for salt in range(passes):
                _pass(parameters, step, salt)
            text = raised(AssertionError, lambda p=parameters, s=step: _pass(p, s, 9))
            assert "backward_passes_per_step" in text, text
            # Whoever goes on after that error is told, and the next step can begin.
            assert "optimizer.skip_synchronize()" in raised(RuntimeError, optimizer.step)


# --- groups ---


def _groups(kind: str, parameters: Any) -> Any:
    names = {"pairs": [["first", "third"], ["second", "small"]], "partial": [["second", "first"]]}
    return int(kind) if kind.isdigit() else [[parameters[name] for name in group] for group in names[kind]]


@scenario(*EVERYWHERE, cases={kind: (kind,) for kind in ("1", "2", "3", "pairs", "partial")})
def groups(kind: str) -> None:
    parameters = zeros(SHAPES)
    compression = TopK(1.0, warmup=None)
    optimizer = wrap_parameters(parameters, compression, groups=_groups(kind, parameters))
    for step in range(4):
        if step == 2:
            # On one rank a member of a group has no gradient: that rank counts with zero.
            optimizer.zero_grad(set_to_none=True)
            names = [name for name in SHAPES if name != "third" or hvd.rank() != 1]
            feed(parameters, {n: whole_numbers(SHAPES[n], step=step, rank=hvd.rank()) for n in names})
        else:
            optimizer.zero_grad()
            _pass(parameters, step, 0)
        optimizer.step()
        for name, parameter in parameters.items():
            expected = _mean(name, step, 0)
            if step == 2 and name == "third":
                expected = expected - whole_numbers(SHAPES[name], step=step, rank=1) / hvd.size()
            np.testing.assert_array_equal(gradient_of(parameter), expected, err_msg=f"{name}, step {step}")
    expected_buckets = {"1": 1, "pairs": 2, "partial": 2}.get(kind)
    if expected_buckets is not None:
        assert len(compression.stats().last.buckets) == expected_buckets, "one group, one bucket"


# --- synchronize ---


@scenario(*EVERYWHERE, cases={"skipped": (False,), "made": (True,)})
def no_gradient_at_all_after_a_step(is_made: bool) -> None:
    # All ranks reduce, and may leave the update out, as GradScaler does. In the next step only one rank has something to
    # reduce, but the others must take part all the same.
    parameters = zeros(SHAPES)
    optimizer = wrap_parameters(parameters, NoOp())
    for step in range(6):
        optimizer.zero_grad()
        alone = step % 2 == 1
        if not alone or hvd.rank() == 0:
            _pass(parameters, step, 0)
        optimizer.step() if is_made else optimizer.synchronize()
        for name, parameter in parameters.items():
            expected = _mean(name, step, 0)
            if alone:
                expected = whole_numbers(SHAPES[name], step=step, rank=0) / hvd.size()
            np.testing.assert_array_equal(gradient_of(parameter), expected, err_msg=f"{name}, step {step}")


# --- gradients that are not there ---


class _TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.body = nn.Linear(32, 64)
        self.left = nn.Linear(64, 20)
        self.right = nn.Linear(64, 20)
        self.never = nn.Linear(20, 20)

    def forward(self, x: torch.Tensor, heads: str) -> torch.Tensor:
        hidden = self.body(x).tanh()
        losses = [head(hidden).square().mean() for name, head in (("l", self.left), ("r", self.right)) if name in heads]
        return 5.0 * torch.stack(losses).sum()


def _both_heads(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    return model(batch(step, rank)[0], "lr")


_HEADS: dict[str, Any] = {
    "sub_losses": lambda step, rank: "lr"[(rank + step) % 2],
    "missing_on_rank_1": lambda step, rank: "l" if rank == 1 else "lr",
    "missing_later_on_rank_0": lambda step, rank: "l" if rank == 0 and step > 1 else "lr",
    "missing_everywhere_later": lambda step, rank: "l" if step > 1 else "lr",
}


@scenario(
    *MPI,
    cases={f"{n}-{'none' if none else 'zero'}": (heads, none) for n, heads in _HEADS.items() for none in (True, False)},
)
def missing_gradients(heads: Any, set_to_none: bool) -> None:
    # A parameter without a gradient counts as zero.
    def loss(model: nn.Module, step: int, rank: int) -> torch.Tensor:
        return model(batch(step, rank)[0], heads(step, rank))

    assert_trains_as_one(_TwoHeads, loss, set_to_none=set_to_none)


# --- requires_grad that changes, and parameters that come later ---


@scenario(*MPI)
def thawed_after_wrapping() -> None:
    # Frozen when it was wrapped; stock Horovod would never reduce it.
    def make() -> nn.Module:
        model = _TwoHeads()
        model.left.requires_grad_(False)
        return model

    def prepare(model: Any, _: Any, step: int) -> None:
        model.left.requires_grad_(step >= 2)
        model.right.requires_grad_(step != 4)

    _, compression = assert_trains_as_one(make, _both_heads, prepare)
    assert "left.weight" in compression.state_dict()["residuals"]


@scenario(*MPI, cases={"before the first step": (0,), "later": (3,)})
def parameter_group_added_after_wrapping(when: int) -> None:
    # Stock Horovod never reduces it.
    def prepare(model: Any, optimizer: Any, step: int) -> None:
        if step == when:
            optimizer.add_param_group({"params": list(model.right.parameters()), "lr": 0.02})

    def trained(model: Any) -> Any:
        return [*model.body.parameters(), *model.left.parameters()]

    assert_trains_as_one(_TwoHeads, _both_heads, prepare, trained=trained)


# --- several optimizers ---


@scenario(*EVERYWHERE)
def two_optimizers_in_flight() -> None:
    # The same tensor names, both backward passes before both steps.
    models = [small_model(seed) for seed in (1, 2)]
    optimizers = [wrap(model, SIDCo(0.05, granularity=BUCKET_BYTES, warmup=None)) for model in models]
    alone = [small_model(seed) for seed in (1, 2)]
    for model in alone:
        train(model, wrap(model, SIDCo(0.05, granularity=BUCKET_BYTES, warmup=None)), range(6))
    for step in range(6):
        for optimizer in optimizers:
            optimizer.zero_grad()
        for model in models:
            loss_of(model, step).backward()
        for optimizer in reversed(optimizers):
            optimizer.step()
    for together, single in zip(models, alone, strict=True):
        assert_identical(together)
        assert digest(together.parameters()) == digest(single.parameters())


# --- defects of stock Horovod that our path must not have ---


@scenario(MPI_2, cases={"none": (True,), "zero": (False,), "default": (None,)})
def zero_grad_takes_its_argument(set_to_none: bool | None) -> None:
    model, compression = small_model(), SIDCo(0.05, warmup=None)
    optimizer = wrap(model, compression)
    for step in range(4):
        optimizer.zero_grad() if set_to_none is None else optimizer.zero_grad(set_to_none=set_to_none)
        gradients = [parameter.grad for parameter in model.parameters()]
        if set_to_none is False and step > 0:
            assert all(not gradient.any() for gradient in gradients)
        else:
            assert gradients == [None] * len(gradients)
        loss_of(model, step).backward()
        assert "before optimizer.step()" in raised(AssertionError, optimizer.zero_grad)
        if step:
            assert "call optimizer.step() first" in raised(RuntimeError, compression.state_dict)
        optimizer.step()
    assert_identical(model)


@scenario(*PAIR, cases={"none": (True,), "zeros": (False,)})
def what_the_model_drops_after_synchronize_is_reduced_anew(set_to_none: bool) -> None:
    """Also on a rank that then has no gradient at all, for which the others would wait."""
    model = small_model()
    optimizer = wrap(model, TopK(0.05, warmup=None))
    for step in range(3):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.synchronize()
        model.zero_grad(set_to_none)
        if hvd.rank() == 0:
            loss_of(model, step).backward()
        optimizer.step()
        assert_identical(model)
        assert all(parameter.grad is not None for parameter in model.parameters())


# --- NaN and infinity ---


@scenario(*EVERYWHERE)
def gradient_scaler_skips_on_all_ranks() -> None:
    model = small_model()
    compression = SIDCo(0.05, granularity=BUCKET_BYTES, warmup=None)
    optimizer = wrap(model, compression, momentum=0.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=100)
    for step in range(8):
        before = digest(model.parameters())
        optimizer.zero_grad()
        loss = loss_of(model, step)
        if step in (0, 3) and hvd.rank() == 1:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        optimizer.synchronize()
        scaler.unscale_(optimizer)
        with optimizer.skip_synchronize():
            scaler.step(optimizer)
        scaler.update()
        skipped = digest(model.parameters()) == before
        assert skipped == (step in (0, 3)), f"step {step}"
        assert_identical(model)
        assert all(bool(torch.isfinite(r).all()) for r in compression.state_dict()["residuals"].values())
    assert everyone(scaler.get_scale()) == [2.0] * hvd.size()


def _clip(model: nn.Module) -> object:
    return torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)


@scenario(MPI_2, cases={"first step": (0,), "later": (2,)})
def gradients_changed_behind_the_hook_are_refused(steps: int) -> None:
    """The change would be lost without a word. The next step is not disturbed."""
    model = small_model()
    optimizer = wrap(model, SIDCo(0.02, warmup=None))
    train(model, optimizer, range(steps))
    optimizer.zero_grad()
    loss_of(model, 2).backward()
    _clip(model)
    message = raised(RuntimeError, optimizer.step)
    assert message.startswith(f"rank {hvd.rank()}: "), message
    assert any(repr(name) in message for name, _ in model.named_parameters()), message
    assert "skip_synchronize" in message and "GradScaler" in message
    train(model, optimizer, range(3, 6))
    assert_identical(model)


# --- steps that are given up ---


class _StoppedError(Exception):
    """Raised by the user's own code."""


def _stop(*_: Any) -> None:
    raise _StoppedError


def _stopped_in_backward(model: nn.Module, step: int, where: str = "0.weight") -> None:
    # The last weight in backward: the others are on their way.
    with model.get_parameter(where).register_hook(_stop):
        raised(_StoppedError, loss_of(model, step).backward)


_EXCHANGED: dict[str, Any] = {
    "TopK": lambda **s: TopK(0.02, warmup=None, **s),
    "union": lambda **s: TopK(0.02, exchange=Union(), warmup=None, **s),
    "MiCRO": lambda **s: MiCRO(0.02, warmup=None, **s),
    "momentum": lambda **s: DGC(0.02, momentum=0.9, warmup=None, **s),
    "dense": lambda **s: TopK(0.02, min_numel=10**6, warmup=None, **s),
    "warm-up": lambda **s: TopK(0.02, warmup=2.0, **s),
}
_MADE = {name: (make,) for name, make in _EXCHANGED.items()}


def _assert_never_been(compression: Any, before: Any, steps: int) -> None:
    """What waits is as before a step, to rounding, or bit for bit with momentum. Everything else is as before."""
    now, exactly = compression.state_dict(), compression.momentum_correction is not None
    assert now["adaptive"] == before["adaptive"] and compression.steps == steps
    for part in ("residuals", "velocities"):
        assert now[part].keys() == before[part].keys()
        for name, array in before[part].items():
            tolerance = 0.0 if exactly else 1e-6
            torch.testing.assert_close(now[part][name], array, rtol=tolerance, atol=tolerance, msg=name)


@scenario(*EVERYWHERE, cases=_MADE)
def an_interrupted_backward_pass_has_never_been(make: Any) -> None:
    """On all ranks: what comes next, a call of `zero_grad` or another pass, gives the step up."""
    model, compression = small_model(), make(granularity=BUCKET_BYTES)
    optimizer = wrap(model, compression, momentum=0.0)
    for step in range(7):
        if step in (0, 3, 4, 6):
            before, steps = compression.state_dict(), compression.steps
            optimizer.zero_grad()
            _stopped_in_backward(model, 40 + step)
            if step == 6:
                # The next backward pass finds that the last one was interrupted.
                model.zero_grad()
                loss_of(model, step).backward()
                optimizer.step()
                continue
            optimizer.zero_grad()
            if step:
                _assert_never_been(compression, before, steps)
        train(model, optimizer, [step])
        assert_identical(model)
    assert compression.steps == (7 if compression.residual_bytes else 0)


@scenario(*EVERYWHERE, cases=_MADE)
def a_rank_that_raises_in_a_step_gives_it_up_for_all(make: Any) -> None:
    """The others raise; nothing of the step is left anywhere, and all go on."""
    model, compression = small_model(), make(granularity=BUCKET_BYTES)
    optimizer = wrap(model, compression, momentum=0.0)
    train(model, optimizer, range(3))
    culprit = hvd.size() - 1
    for step, where in ((3, "0.weight"), (5, "2.weight")):
        parameters, before, steps = digest(model.parameters()), compression.state_dict(), compression.steps
        optimizer.zero_grad()
        if hvd.rank() == culprit:
            _stopped_in_backward(model, step, where)
            optimizer.zero_grad()
        else:
            text = raised(RuntimeError, lambda step=step: train(model, optimizer, [step]))
            assert text.startswith(f"rank {hvd.rank()}: rank {culprit} "), text
        assert digest(model.parameters()) == parameters
        _assert_never_been(compression, before, steps)
        train(model, optimizer, [step + 1])
        assert_identical(model)


class _Stopping(nn.Module):
    """An embedding with sparse gradients, and a layer before it in backward."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(6)
        self.embedding, self.out = nn.Embedding(60, 20, sparse=True), nn.Linear(20, 30)

    def forward(self, words: torch.Tensor, *, stops: bool = False) -> torch.Tensor:
        vectors = self.embedding(words)
        if stops:
            vectors.register_hook(_stop)
        return self.out(vectors).square().mean()


@scenario(*PAIR)
def a_rank_that_gives_up_takes_part_in_the_reduction_of_embeddings() -> None:
    model, compression = _Stopping(), TopK(0.1, warmup=None)
    optimizer = wrap(model, compression, momentum=0.0)
    words = torch.arange(8) + hvd.rank()
    for step in range(6):
        optimizer.zero_grad()
        if step != 3:
            model(words).backward()
            optimizer.step()
        elif hvd.rank() == 1:
            raised(_StoppedError, model(words, stops=True).backward)
            optimizer.zero_grad()
        else:
            model(words).backward()
            assert "rank 1 has given up this step" in raised(RuntimeError, optimizer.step)
        assert_identical(model)
    assert compression.steps == 5


@scenario(*PAIR)
def saving_changes_nothing() -> None:
    """Between the passes of one step, after the reduction, and between two steps."""
    models = []
    for saves in (False, True):
        model, compression = small_model(), TopK(0.02, granularity=BUCKET_BYTES, warmup=None)
        optimizer = wrap(model, compression, backward_passes_per_step=2)
        for step in range(6):
            optimizer.zero_grad()
            loss_of(model, 2 * step).backward()
            if saves:
                compression.state_dict()
            loss_of(model, 2 * step + 1).backward()
            optimizer.synchronize()
            if saves:
                compression.state_dict()
            # It does not reduce a second time.
            optimizer.step()
            if saves:
                compression.state_dict()
        models.append(model)
        assert_identical(model)
        assert compression.steps == 6
    assert all(torch.equal(one, other) for one, other in zip(*(m.parameters() for m in models), strict=True))


@scenario(*PAIR, cases={"load": (False,), "reset": (True,)})
def after_an_exception_while_it_waits_a_compression_refuses_to_go_on(resets: bool) -> None:
    """Until all ranks load a state, or begin anew."""
    model, compression = small_model(), TopK(0.02, granularity=BUCKET_BYTES, warmup=None)
    optimizer = wrap(model, compression)
    train(model, optimizer, range(3))
    state = compression.state_dict()
    with patch.object(Sending, "advance", side_effect=_StoppedError):
        raised(_StoppedError, lambda: train(model, optimizer, [3]))
    for _ in range(2):
        text = raised(RuntimeError, lambda: train(model, optimizer, [4]))
        assert text.startswith(f"rank {hvd.rank()}: ") and "compression.reset()" in text, text
    if resets:
        compression.reset()
    else:
        compression.load_state_dict(state)
        _assert_never_been(compression, state, 3)
    train(model, optimizer, range(5, 8))
    assert_identical(model)


# --- what one rank does alone ---


@scenario(*PAIR)
def an_optimizer_that_one_rank_makes_alone_disturbs_nobody() -> None:
    if hvd.rank() == 1:
        wrap(small_model(), TopK(0.02, warmup=None))
    models = small_model(1), small_model(2)
    for model in models:
        train(model, wrap(model, SIDCo(0.02, warmup=None)), range(3))
        assert_identical(model)


@scenario(MPI_2)
def optimizers_that_step_in_another_order_raise_on_all() -> None:
    models = small_model(1), _TwoHeads()
    optimizers = [wrap(model, TopK(0.02, warmup=None)) for model in models]
    losses = [loss_of(models[0], 0), _both_heads(models[1], 0, hvd.rank())]
    losses[hvd.rank()].backward()
    message = raised(ValueError, optimizers[hvd.rank()].step)
    assert message.startswith(f"rank {hvd.rank()}: ") and "'parameters'" in message, message
    train(models[0], optimizers[0], range(3))
    assert_identical(models[0])


# --- what is frozen in the middle of training ---


@scenario(
    *MPI,
    cases={
        "compressed": (lambda: TopK(0.02, warmup=None), None),
        "together": (lambda: TopK(0.02, granularity="model", warmup=None), None),
        "momentum": (lambda: DGC(0.02, momentum=0.9, warmup=None), None),
        "dense_momentum": (lambda: DGC(0.02, momentum=0.9, exclude=["*"], warmup=None), None),
        "on_one_rank": (lambda: TopK(0.02, warmup=None), 1),
    },
)
def what_waits_of_a_frozen_parameter_is_set_aside(make: Any, alone: int | None) -> None:
    """Nothing of it is sent, and it goes on with what has waited, bit for bit. Its gradient is what others send, or zeros.

    With stock Horovod, too, an optimizer steps frozen parameters with gradients of zeros, and their momentum goes on.
    """
    parameters = zeros(SHAPES)
    compression = make()
    optimizer = wrap_parameters(parameters, compression, op=hvd.Sum)
    frozen, waited = parameters["second"], np.zeros(SHAPES["second"])
    for step in range(9):
        thawed = not 3 <= step < 6 or alone not in (None, hvd.rank())
        frozen.requires_grad_(thawed)
        names = [name for name in SHAPES if thawed or name != "second"]
        reduce(optimizer, parameters, {n: whole_numbers(SHAPES[n], step=step, rank=hvd.rank()) for n in names})
        state = compression.state_dict()
        kept = state["residuals"].get("second", torch.zeros(SHAPES["second"])).numpy()
        mine = whole_numbers(SHAPES["second"], step=step, rank=hvd.rank()) if thawed else 0.0
        given, change = sum(everyone(mine)), sum(everyone(kept - waited))
        if not thawed:
            np.testing.assert_array_equal(kept, waited)
            assert alone is not None or "second" not in state["residuals"] or not gradient_of(frozen).any()
        elif compression.momentum_correction is None:
            np.testing.assert_array_equal(gradient_of(frozen) + change, given)
        waited = kept.copy()
    assert waited.any() or compression.exclude
    assert_identical(parameters.values())


# --- small parameters ---


@scenario(
    *PAIR, cases={"average": ({},), "sum": ({"op": hvd.Sum},), "predivide": ({"gradient_predivide_factor": 2.0},)}
)
def small_parameters_share_one_allreduce(arguments: dict[str, Any]) -> None:
    shapes: dict[str, Sequence[int]] = {"weight": (40, 50), **{f"bias{n}": (n,) for n in range(1, 20)}}
    shapes |= {"scalar": (), "empty": (0,), "large": (30, 30)}
    parameters = zeros(shapes) | zeros({"double": (5,)}, torch.float64)
    shapes["double"] = (5,)
    optimizer = wrap_parameters(parameters, TopK(0.02, exclude=["lar*"], warmup=None), **arguments)
    divisor = 1 if "op" in arguments else hvd.size()
    for step in range(3):
        # Some have no gradient: on one rank, or on any.
        left_out = {"bias3"} | ({"bias5"} if hvd.rank() == 1 else set())
        given = {n: np.array(whole_numbers(s, step=step, rank=hvd.rank())) for n, s in shapes.items()}
        with noted_calls() as events:
            reduce(optimizer, parameters, {n: g for n, g in given.items() if n not in left_out})
        sums = [shape for kind, _, shape in events if kind == "sum"]
        sizes = [one[0] - len(wire.tail(0)) for one in sums]
        assert sorted(sizes) == [5, sum(range(1, 20)) + 1, 900], "one for each type, and the large one's"
        for name in shapes.keys() - {"weight", "bias3"}:
            ranks = [rank for rank in range(hvd.size()) if name != "bias5" or rank != 1]
            total = sum(np.array(whole_numbers(shapes[name], step=step, rank=rank)) for rank in ranks)
            np.testing.assert_array_equal(gradient_of(parameters[name]), total / divisor, err_msg=name)
            assert parameters[name].grad.dtype == parameters[name].dtype
        assert not parameters["bias3"].grad.any()
    assert_identical(parameters.values())


# --- what is refused ---


@scenario(MPI_2)
def refused_arguments() -> None:
    def attempt(compression: Any, **arguments: Any) -> Any:
        return lambda: wrap(small_model(), compression, **arguments)

    assert "Adasum" in raised(ValueError, attempt(SIDCo(0.01, warmup=None), op=hvd.Adasum))
    for op in (hvd.Min, hvd.Max, hvd.Product):
        assert "hvd.Average or hvd.Sum" in raised(ValueError, attempt(SIDCo(0.01, warmup=None), op=op))
    assert "must be an instance" in raised(TypeError, attempt(SIDCo))
    assert "must be an instance" in raised(TypeError, attempt(SIDCo, op=hvd.Adasum))
    assert "must be a compressor of horovod_sparse.torch" in raised(TypeError, attempt("SIDCo"))
    assert "granularity='layer'" in raised(ValueError, attempt(SIDCo(0.01, granularity="layer", warmup=None), groups=2))
    shared = SIDCo(0.01, warmup=None)
    wrap(small_model(), shared)
    assert "serve one optimizer" in raised(ValueError, attempt(shared))
    wrap(small_model(), copy.deepcopy(shared))
    predivided = attempt(SIDCo(0.01, warmup=None), op=hvd.Sum, gradient_predivide_factor=2.0)
    assert "gradient_predivide_factor" in raised(ValueError, predivided)


def _other_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 60 + hvd.rank()), nn.ReLU(), nn.Linear(60 + hvd.rank(), 10))


def _partly_frozen() -> nn.Module:
    model = small_model()
    model[2].requires_grad_(hvd.rank() == 0)
    return model


_DIFFERENCES: dict[str, tuple[Any, str]] = {
    "ratio": (lambda rank: {"compression": TopK(0.01 * (1 + rank))}, "ratio="),
    "algorithm": (lambda rank: {"compression": (TopK, SIDCo)[rank](0.01)}, "TopK("),
    "operation": (lambda rank: {"op": (hvd.Sum, hvd.Average)[rank]}, "'hvd.Sum'"),
    "passes": (lambda rank: {"backward_passes_per_step": 1 + rank}, "'backward_passes"),
    "rate": (lambda rank: {"compression": TopK(0.01, lr_in_residual=True), "lr": 0.1 + 0.1 * rank}, "'lr'"),
    "sparse_as_dense": (lambda rank: {"sparse_as_dense": rank == 0}, "'sparse_as_dense'"),
    "groups": (lambda rank: {"groups": 1 + rank}, "'groups'"),
    "model": (lambda rank: {"model": _other_model()}, "'parameters'"),
    "frozen": (lambda rank: {"model": _partly_frozen()}, "'parameters'"),
}


@scenario(MPI_2, cases=_DIFFERENCES)
def difference_between_ranks_raises_on_all(settings: Any, difference: str) -> None:
    given = {"model": small_model(), "compression": TopK(0.01), **settings(hvd.rank())}
    optimizer = wrap(**given)
    loss = torch.stack([one.sum() for one in given["model"].parameters() if one.requires_grad]).sum()
    loss.backward()
    text = raised(ValueError, optimizer.step)
    assert text.startswith(f"rank {hvd.rank()}: ") and difference in text, text


@scenario(MPI_2)
def complex_parameters_are_refused_by_name() -> None:
    parameters = zeros({"weight": (40, 50)}) | zeros({"phase": (300,)}, torch.complex64)
    optimizer = wrap_parameters(parameters, TopK(0.01, warmup=None))
    sum(parameter.abs().sum() for parameter in parameters.values()).backward()
    message = raised(TypeError, optimizer.step)
    assert "parameter 'phase' must be real, got torch.complex64" in message and "torch.view_as_real" in message


# --- stock Horovod beside us ---


@scenario(MPI_2, cases={"none": (hvd.Compression.none,), "fp16": (hvd.Compression.fp16,)})
def stock_compression_is_untouched(compression: Any) -> None:
    extended, stock = small_model(), small_model()
    optimizer = wrap(extended, compression)
    train(extended, optimizer, range(5))
    assert "'set_to_none'" in raised(TypeError, lambda: optimizer.zero_grad(set_to_none=True))
    extensions = vars(horovod_optimizer._DistributedOptimizer)
    members = {
        name: one.__wrapped__ if is_from(seam, one) else one
        for name, one in extensions.items()
        if name != "add_param_group"
    }
    with patch.object(horovod_optimizer, "_DistributedOptimizer", type("Stock", (torch.optim.Optimizer,), members)):
        optimizer = wrap(stock, compression)
        assert "'set_to_none'" in raised(TypeError, lambda: optimizer.zero_grad(set_to_none=True))
        train(stock, optimizer, range(5))
    assert "add_param_group" not in vars(type(optimizer)), "it has the stock methods"
    assert digest(extended.parameters()) == digest(stock.parameters())


@scenario(MPI_2)
def an_optimizer_that_could_not_be_made_leaves_no_hooks() -> None:
    model, serving = small_model(), TopK(0.05)
    wrap(small_model(), serving)
    raised(ValueError, lambda: wrap(model, serving))
    loss_of(model, 0).backward()
