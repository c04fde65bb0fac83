"""Scenarios: a plan chooses the exchange of each bucket, the same on all ranks, also where they measure different numbers."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import horovod.torch as hvd
import numpy as np

from horovod_sparse.compressors.schedules import warmup
from horovod_sparse.core import costs
from horovod_sparse.exchange import measure
from horovod_sparse.exchange.network import Call
from horovod_sparse.torch import SIDCo, TopK
from horovod_sparse.torch.network import TimedCollectives

from .common import (
    BUCKET_BYTES,
    assert_identical,
    everyone,
    gradient_of,
    raised,
    reduce,
    small_model,
    train,
    whole_numbers,
    wrap,
    wrap_parameters,
    zeros,
)
from .scenario import EVERYWHERE, MPI, MPI_2, PAIR, scenario


def exchanges_of(compression: Any) -> list[str]:
    """How each bucket was exchanged in the last step, which must be the same on all ranks."""
    exchanges = [bucket.exchange for bucket in compression.stats().last.buckets]
    assert all(others == exchanges for others in everyone(exchanges)), everyone(exchanges)
    return exchanges


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


@scenario(
    *EVERYWHERE,
    cases={
        "slow": ("100kbit 0us", 0.01, {"pairs", "compact pairs", "balanced"}),
        "fast": ("100gbit 0us", 0.5, {"dense float16"}),
        "measured": ("measured", 0.01, {"pairs", "compact pairs", "balanced", "dense float16"}),
    },
)
def replicas_stay_the_same_with_a_plan(network: str, ratio: float, expected: set[str]) -> None:
    model = small_model()
    compression = SIDCo(ratio, bucket_bytes=BUCKET_BYTES, network=network)
    train(model, wrap(model, compression), range(6))
    exchanges = exchanges_of(compression)
    assert len(exchanges) == 3 and set(exchanges) <= expected, exchanges
    assert_identical(model)


@scenario(*MPI)
def half_precision_gives_the_sum_of_all() -> None:
    """Whole numbers up to 2048 are exact in float16."""
    shapes = {"w": (40, 30), "v": (500,)}
    parameters = zeros(shapes)
    compression = TopK(0.5, min_numel=0, network="1tbit 0us")
    optimizer = wrap_parameters(parameters, compression, op=hvd.Sum)

    def gradients(step: int, rank: int) -> dict[str, np.ndarray]:
        return {name: whole_numbers(shape, step=step, rank=rank).clip(-500, 500) for name, shape in shapes.items()}

    for step in range(3):
        reduce(optimizer, parameters, gradients(step, hvd.rank()))
        for name, parameter in parameters.items():
            total = sum(gradients(step, rank)[name] for rank in range(hvd.size()))
            np.testing.assert_array_equal(gradient_of(parameter), total)
    assert exchanges_of(compression) == ["dense float16"]
    assert not any(residual.any() for residual in compression.state_dict()["residuals"].values())


@scenario(*PAIR)
def a_gradient_that_is_not_finite_raises_on_all() -> None:
    parameters = zeros({"w": (500,)})
    compression = TopK(0.5, network="1tbit 0us")
    optimizer = wrap_parameters(parameters, compression)
    gradient = np.full(500, 3e-9, np.float32)
    reduce(optimizer, parameters, {"w": gradient})
    kept = compression.state_dict()["residuals"]["w"].numpy()
    bad = gradient.copy()
    bad[3] = math.nan if hvd.rank() == 1 else 1.0
    raised(FloatingPointError, lambda: reduce(optimizer, parameters, {"w": bad}))
    expected = kept + np.nan_to_num(bad)
    np.testing.assert_array_equal(compression.state_dict()["residuals"]["w"].numpy(), expected)
    reduce(optimizer, parameters, {"w": gradient})
    assert_identical([parameters["w"].grad])


@scenario(*EVERYWHERE)
def ranks_that_measure_different_numbers_plan_the_same() -> None:
    """Each rank's clock runs at its own speed, and so do its processors."""
    pace = 10.0 ** (2 * hvd.rank())
    seconds, costs_of = measure.seconds, costs.measured_costs

    def slower(*arguments: Any) -> float:
        return pace * seconds(*arguments)

    def computing(*arguments: Any) -> costs.Costs:
        return costs.Costs(*(pace * cost for cost in costs_of(*arguments)))

    model = small_model()
    compression = SIDCo(0.01, bucket_bytes=BUCKET_BYTES, network="measured")
    with replaced(measure, "seconds", slower), replaced(costs, "measured_costs", computing):
        train(model, wrap(model, compression), range(4))
    server = compression.server
    assert server is not None and server.pipeline is not None and server.pipeline.planner is not None
    found = server.pipeline.planner.conditions
    assert all(others == repr(found) for others in everyone(repr(found)))
    exchanges_of(compression)
    assert_identical(model)


@scenario(*PAIR)
def a_rank_that_cannot_measure_stops_all() -> None:
    def fails(*arguments: Any) -> Any:
        raise MemoryError("no room for the sample")

    model = small_model()
    compression = SIDCo(0.01, network="measured")
    optimizer = wrap(model, compression)
    with replaced(costs, "measured_costs", fails if hvd.rank() == 1 else costs.measured_costs):
        message = raised(RuntimeError, lambda: train(model, optimizer, range(1)))
    assert "worker 1 could not measure" in message and "no room for the sample" in message, message
    # It is measured again, and found.
    train(model, optimizer, range(3))
    exchanges_of(compression)
    assert_identical(model)


@scenario(MPI_2)
def all_ranks_measure_the_same_network() -> None:
    collectives = TimedCollectives(hvd.global_process_set, "scenario")
    found = measure.measure(collectives, measure.QUICK)
    assert found.bandwidth > 0.0 and all(one == repr(found) for one in everyone(repr(found)))
    assert collectives.run([Call("allreduce", 3, 2)], "half")() is None


@scenario(*PAIR, cases={"pairs": ("100kbit 0us",), "half": ("10gbit 0us",)})
def ranks_in_different_steps_of_a_schedule_raise_on_all(network: str) -> None:
    """The ratio falls from 0.5 to 0.001 after two steps, and so the plan changes from half precision to pairs."""
    model = small_model()
    schedule = warmup(0.5, 0.0001, 2, stairs=1)
    compression = SIDCo(schedule, bucket_bytes=BUCKET_BYTES, network=network)
    optimizer = wrap(model, compression)
    train(model, optimizer, range(1))
    state = compression.state_dict()
    before = exchanges_of(compression)
    train(model, optimizer, range(1, 4))
    after = exchanges_of(compression)
    if network == "100kbit 0us":
        assert before != after, (before, after)
    if hvd.rank() == 1:
        compression.load_state_dict(state)
    message = raised(RuntimeError, lambda: train(model, optimizer, range(4, 5)))
    assert f"rank {hvd.rank()}: the ranks disagree on the state of bucket" in message, message
    compression.load_state_dict(state)
    train(model, optimizer, range(1, 6))
    assert_identical(model)
    assert exchanges_of(compression) == after


@scenario(*PAIR)
def another_network_raises_on_all() -> None:
    model = small_model()
    optimizer = wrap(model, SIDCo(0.01, network="1gbit" if hvd.rank() else "10gbit"))
    message = raised(ValueError, lambda: train(model, optimizer, range(1)))
    assert "network='1gbit'" in message and "network='10gbit'" in message, message


class Kept(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


@scenario(MPI_2)
def the_plan_is_logged_once() -> None:
    handler = Kept()
    logger = logging.getLogger("horovod_sparse")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        model = small_model()
        train(model, wrap(model, SIDCo(0.01, bucket_bytes=BUCKET_BYTES, network="1gbit")), range(3))
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
    assert len(handler.texts) == (hvd.rank() == 0), handler.texts
    for text in handler.texts:
        assert text.startswith("plan for 2 workers, 125.0 MB/s each way, 50 us per message: "), text
        assert text.count(" entries): ") == 3, text
