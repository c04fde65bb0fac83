"""Scenarios: saving and resuming. What is loaded continues bit for bit; what does not fit is refused at once."""

from __future__ import annotations

import copy
import io
from typing import Any

import horovod.torch as hvd
import torch

from horovod_sparse.torch import MomentumCorrection, SIDCo, TopK

from .common import (
    BUCKET_BYTES,
    COMPRESSORS,
    MakeCompression,
    assert_identical,
    digest,
    loss_of,
    raised,
    small_model,
    train,
)
from .scenario import MPI, MPI_2, scenario


class _Run:
    """A model, its optimizer and its compressor."""

    def __init__(self, compression: Any) -> None:
        self.model = small_model()
        self.compression = compression
        adam = torch.optim.Adam(self.model.parameters(), lr=1e-3)
        self.optimizer = hvd.DistributedOptimizer(adam, self.model.named_parameters(), compression=compression)

    def train(self, *steps: int) -> None:
        train(self.model, self.optimizer, range(*steps))

    def save(self) -> bytes:
        states = {name: getattr(self, name).state_dict() for name in ("model", "optimizer", "compression")}
        file = io.BytesIO()
        torch.save(states, file)
        return file.getvalue()

    def load(self, saved: bytes) -> None:
        states = torch.load(io.BytesIO(saved), weights_only=True)
        for name, state in states.items():
            getattr(self, name).load_state_dict(state)

    def digest(self) -> str:
        residuals = self.compression.state_dict()["residuals"]
        return digest([*self.model.parameters(), *(residuals[name] for name in sorted(residuals))])


@scenario(*MPI, cases={n: (make,) for n, make in COMPRESSORS.items() if n != "NoOp"})
def resumed_run_continues_bit_for_bit(make: MakeCompression) -> None:
    first = _Run(make(bucket_bytes=BUCKET_BYTES))
    first.train(10)
    saved, ten_steps = first.save(), first.digest()
    first.train(10, 20)

    before_first_step = _Run(make(bucket_bytes=BUCKET_BYTES))
    before_first_step.load(saved)
    again = torch.load(io.BytesIO(before_first_step.save()), weights_only=True)["compression"]
    assert again["adaptive"] == torch.load(io.BytesIO(saved), weights_only=True)["compression"]["adaptive"]
    assert before_first_step.digest() == ten_steps, "saving at once gives what was loaded"
    before_first_step.train(10, 20)
    assert before_first_step.digest() == first.digest()

    after_other_steps = _Run(make(bucket_bytes=BUCKET_BYTES))
    after_other_steps.train(50, 53)
    after_other_steps.load(saved)
    after_other_steps.train(10, 20)
    assert after_other_steps.digest() == first.digest()
    assert_identical(first.model)

    without = _Run(make(bucket_bytes=BUCKET_BYTES))
    without.load(saved)
    without.compression.reset()
    without.train(10, 20)
    assert without.digest() != first.digest(), "the residuals make no difference: the scenario tests nothing"


@scenario(MPI_2)
def momentum_resumes_where_there_is_no_residual() -> None:
    def make() -> Any:
        return TopK(0.01, momentum_correction=MomentumCorrection(), exclude=["*"])

    first = _Run(make())
    first.train(5)
    saved = first.save()
    first.train(5, 10)
    second = _Run(make())
    second.load(saved)
    second.train(5, 10)
    assert second.digest() == first.digest()


@scenario(MPI_2)
def loaded_state_is_a_copy() -> None:
    first = _Run(SIDCo(0.01, bucket_bytes=BUCKET_BYTES))
    first.train(5)
    state = first.compression.state_dict()
    kept = copy.deepcopy(state)
    second = _Run(SIDCo(0.01, bucket_bytes=BUCKET_BYTES))
    second.compression.load_state_dict(state)
    first.train(5, 8)
    for residual in state["residuals"].values():
        residual.fill_(7.0)
    expected = digest(kept["residuals"].values())
    assert digest(second.compression.state_dict()["residuals"].values()) == expected
    handed_out = second.compression.state_dict()
    for residual in handed_out["residuals"].values():
        residual.fill_(9.0)
    assert digest(second.compression.state_dict()["residuals"].values()) == expected


@scenario(MPI_2, cases={to: (to,) for to in ("layer", "bucket", "model")})
def other_bucketing_can_load(granularity: str) -> None:
    first = _Run(SIDCo(0.01, bucket_bytes=BUCKET_BYTES))
    first.train(6)
    state = first.compression.state_dict()
    for trained in (0, 2):
        second = _Run(SIDCo(0.01, granularity=granularity, bucket_bytes=10**6))
        second.train(trained)
        second.model.load_state_dict(first.model.state_dict())
        second.compression.load_state_dict(state)
        loaded = second.compression.state_dict()["residuals"]
        assert loaded.keys() == state["residuals"].keys()
        assert all(torch.equal(loaded[name], residual) for name, residual in state["residuals"].items())
        second.train(6, 10)
        assert_identical(second.model)


def _damaged(state: dict[str, Any]) -> dict[str, tuple[dict[str, Any], str]]:
    """Wrong states, each with what the message must say."""

    def changed(**parts: Any) -> dict[str, Any]:
        return {**copy.deepcopy(state), **parts}

    name = sorted(state["residuals"])[0]
    residuals, adaptive = state["residuals"], state["adaptive"]
    return {
        "missing": (changed(residuals={n: r for n, r in residuals.items() if n != name}), name),
        "unexpected": (changed(residuals={**residuals, "nonsense": torch.zeros(3)}), "nonsense"),
        "shape": (changed(residuals={**residuals, name: residuals[name].reshape(-1)[1:]}), name),
        "version": (changed(version=1), "version"),
        "not_a_compressor's": ({"state": {}, "param_groups": []}, "not a compressor"),
        "incomplete": (
            {part: kept for part, kept in state.items() if part != "velocities"},
            "['velocities'] are missing",
        ),
        "adaptive": (changed(adaptive={n: a for n, a in adaptive.items() if n != name}), "adaptive"),
    }


@scenario(MPI_2, cases={f"{when}_stepping": (steps,) for when, steps in {"before": 0, "after": 2}.items()})
def wrong_state_is_refused_at_once(steps: int) -> None:
    first = _Run(TopK(0.01))
    first.train(3)
    good = first.compression.state_dict()
    second = _Run(TopK(0.01))
    second.train(steps)
    before = digest(second.compression.state_dict()["residuals"].values())
    problems = []
    for kind, (state, expected) in _damaged(good).items():
        try:
            second.compression.load_state_dict(state)
        except ValueError as error:
            if expected not in str(error):
                problems.append(f"{kind}: the message must name {expected}: {error}")
        else:
            problems.append(f"{kind}: accepted")
    assert not problems, problems
    assert digest(second.compression.state_dict()["residuals"].values()) == before, "a refused state left traces"
    second.train(3, 5)
    assert_identical(second.model)


@scenario(MPI_2)
def reset_is_a_fresh_start() -> None:
    fresh, used = _Run(SIDCo(0.01)), _Run(SIDCo(0.01))
    initial = copy.deepcopy((used.model.state_dict(), used.optimizer.state_dict()))
    used.train(100, 107)
    used.compression.reset()
    used.model.load_state_dict(initial[0])
    used.optimizer.load_state_dict(initial[1])
    for run in (fresh, used):
        run.train(6)
    assert fresh.digest() == used.digest()
    assert used.compression.stats().steps == 6


@scenario(MPI_2)
def saved_before_the_first_step() -> None:
    first, second = _Run(SIDCo(0.01)), _Run(SIDCo(0.01))
    second.load(first.save())
    for run in (first, second):
        run.train(4)
    assert first.digest() == second.digest()


@scenario(MPI_2)
def settings_are_not_part_of_the_state() -> None:
    # What a resumed run is asked for is what it does: here another ratio.
    first = _Run(TopK(0.01))
    first.train(3)
    second = _Run(TopK(0.1))
    second.compression.load_state_dict(first.compression.state_dict())
    second.train(3, 5)
    assert raised(ValueError, lambda: TopK(2.0)).startswith("ratio must be in (0, 1]")
    assert 0.09 < second.compression.stats().last.total.ratio <= 0.1
    assert_identical(second.model)


@scenario(
    *MPI,
    cases={
        f"{name}-{how}-{steps}": (make, how, steps)
        for name, make in {"SIDCo": COMPRESSORS["SIDCo"], "MiCRO": COMPRESSORS["MiCRO"]}.items()
        for how in ("reset", "load", "optimizer")
        for steps in (0, 3)
    },
)
def a_state_can_be_replaced_in_the_middle_of_a_step(make: MakeCompression, how: str, steps: int) -> None:
    """Gradients that were handed over are gone, unless the step was held back; everything else goes on."""
    run, other = (_Run(make(bucket_bytes=BUCKET_BYTES)) for _ in range(2))
    other.train(3)
    saved = copy.deepcopy((run.model.state_dict(), run.optimizer.state_dict()))
    state = other.compression.state_dict()
    results = []
    for interrupted in (False, True):
        run.train(steps)
        if interrupted:
            run.optimizer.zero_grad()
            loss_of(run.model, 40).backward()
        if how == "reset":
            run.compression.reset()
        else:
            run.compression.load_state_dict(state)
        if interrupted and how == "optimizer":
            # It reduces what is under way, which moves the compression's state on.
            run.optimizer.load_state_dict(saved[1])
            run.compression.load_state_dict(state)
        if interrupted:
            run.optimizer.step()
        run.model.load_state_dict(saved[0])
        run.optimizer.load_state_dict(saved[1])
        if how == "reset":
            run.compression.reset()
        else:
            run.compression.load_state_dict(state)
        run.train(5, 9)
        results.append(run.digest())
    assert results[0] == results[1]
    assert_identical(run.model)


@scenario(MPI_2, cases={"SIDCo": (COMPRESSORS["SIDCo"],), "MiCRO": (COMPRESSORS["MiCRO"],)})
def a_state_that_waits_is_rescaled_whole(make: MakeCompression) -> None:
    """Its thresholds too: as if it had been rescaled after it was loaded."""
    first = _Run(make(bucket_bytes=BUCKET_BYTES))
    first.train(8)
    state = first.compression.state_dict()
    waiting, first_step_done = _Run(make(bucket_bytes=BUCKET_BYTES)), _Run(make(bucket_bytes=BUCKET_BYTES))
    first_step_done.train(1)
    for run in (waiting, first_step_done):
        run.compression.load_state_dict(state)
        run.compression.rescale(2.0**-10)
    states = [run.compression.state_dict() for run in (waiting, first_step_done)]
    assert states[0]["adaptive"] == states[1]["adaptive"] != state["adaptive"]
    assert digest(states[0]["residuals"].values()) == digest(states[1]["residuals"].values())
