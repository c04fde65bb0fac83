"""The driver, over a transport of one worker that notes what is started."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from horovod_sparse.compressors import TopK
from horovod_sparse.core.driver import Driver, log_start
from horovod_sparse.core.feedback import Feedback
from horovod_sparse.core.layout import Parameter
from horovod_sparse.core.plan import warmup_steps
from horovod_sparse.numpy.ops import NumpyOps
from tests.harness.alone import Alone
from tests.harness.table import ORACLE
from tests.harness.workers import make_worker, make_workers, take_step

SIZES = {"first": 400, "bias": 3, "second": 700, "third": 500, "scale": 5, "last": 300}
"""Of the parameters, in the order of the model: two are reduced dense, together."""
GRADIENTS = {name: np.full(size, 2.0, np.float32) for name, size in SIZES.items()}


def made(names: Any = SIZES, later: Any = (), state: dict[str, Any] | None = None) -> tuple[Driver, Alone]:
    """A driver with buckets for some parameters, after a state was loaded."""
    transport = Alone()
    compressor = TopK(0.1, granularity="layer", min_numel=10, warmup=None)
    driver = Driver(
        compressor,
        transport,
        lambda: Feedback(NumpyOps(), compressor, world=1, position=0, rank=0),
        kernels="none",
    )
    if state is not None:
        driver.load(state)
    driver.extend([Parameter(name, (SIZES[name],), "float32", "cpu") for name in names], GRADIENTS, later=later)
    return driver, transport


def run(driver: Driver, names: Any, given_up_after: int | None = None) -> None:
    """A step, which is given up when so many gradients were added."""
    driver.begin()
    for number, name in enumerate(names):
        if number == given_up_after:
            driver.give_up()
            return
        driver.add(name, GRADIENTS[name])
    driver.complete()
    driver.finish(lambda slots, reduced: None)


@pytest.mark.parametrize("given_up_after", range(len(SIZES)))
@pytest.mark.parametrize("steps", [0, 2], ids=["the first step", "a later step"])
def test_a_step_that_is_given_up_starts_the_same_exchanges_in_the_same_order(given_up_after: int, steps: int) -> None:
    """Process groups and MPI match collectives by their order."""
    # In the first step gradients come in the reverse order of the model. Later DDP may hand them over in another one.
    order = [*reversed(SIZES)] if steps == 0 else ["third", "bias", "last", "first", "scale", "second"]
    (whole, expected), (driver, transport) = made(), made()
    for one in (whole, driver):
        for _ in range(steps):
            run(one, order)
    run(whole, order)
    kept = driver.state_dict()
    run(driver, order, given_up_after)
    assert transport.started == expected.started and len(expected.started) == 5 * (steps + 1)
    assert driver.step is None
    for name, residual in kept["residuals"].items():
        np.testing.assert_allclose(driver.state_dict()["residuals"][name], residual, rtol=0, atol=1e-6)
    run(driver, order)
    np.testing.assert_equal(transport.started[-5:], expected.started[-5:])


def test_the_state_of_parameters_that_come_later_waits_for_them() -> None:
    driver, _ = made()
    run(driver, SIZES)
    state = driver.state_dict()
    early = ["first", "bias", "second"]
    resumed, _ = made(early, later=SIZES, state=state)
    assert resumed.feedback is not None and resumed.feedback.residuals.shapes.keys() == {*early}
    np.testing.assert_equal(resumed.state_dict(), state)
    resumed.extend([Parameter("third", (500,), "float32", "cpu")], GRADIENTS, later=SIZES)
    np.testing.assert_array_equal(resumed.feedback.residuals.views["third"], state["residuals"]["third"])
    np.testing.assert_equal(resumed.state_dict(), state)
    with pytest.raises(ValueError, match=r"unexpected: \['last', 'scale', 'third'\]"):
        made(early, state=state)


def test_a_step_that_an_exception_has_left_has_never_been() -> None:
    driver, _ = made()
    run(driver, SIZES)
    kept = driver.state_dict()
    driver.begin()
    driver.add("first", GRADIENTS["first"])
    with pytest.raises(RuntimeError, match="'first'"):
        driver.add("first", GRADIENTS["first"])
    driver.begin()
    assert driver.feedback is not None
    for name, residual in kept["residuals"].items():
        np.testing.assert_allclose(driver.feedback.residuals.views[name], residual, rtol=0, atol=1e-6)


@pytest.mark.parametrize("call", ["state_dict", "load", "rescale", "reset"])
def test_a_step_that_has_begun_is_given_up_before_anything_is_done_with_the_state(call: str) -> None:
    driver, _ = made()
    run(driver, SIZES)
    state = driver.state_dict()
    driver.begin()
    driver.add("first", GRADIENTS["first"])
    arguments: dict[str, tuple[Any, ...]] = {"load": (state,), "rescale": (2.0,)}
    getattr(driver, call)(*arguments.get(call, ()))
    assert driver.step is None
    run(driver, SIZES)


@pytest.mark.parametrize(
    ("settings", "world", "times", "most"),
    [
        ({}, 1, None, ""),
        ({}, 9, None, ""),
        # 1000 pairs of 8 bytes from each of 10 others, and 20 / 11 times 40 000 bytes.
        ({}, 11, "1.1", "up to 10 workers it sends no more"),
        ({"warmup": 1.0}, 32, "3.2", "up to 10 workers it sends no more"),
        ({"slack": 6.0}, 3, "1.8", "with any number of workers it sends more"),
    ],
)
def test_an_exchange_that_sends_more_than_dense_is_warned_of(
    caplog: pytest.LogCaptureFixture, settings: dict[str, Any], world: int, times: str | None, most: str
) -> None:
    compressor = TopK(0.1, **{"warmup": None, **settings})
    log_start(make_worker(ORACLE, compressor, {"p": (100, 100)}, world=world), "none")
    told = [rf"{re.escape(repr(compressor))} .*\b{world} workers .*\b{times} times .*; {most}: take"] if times else []
    assert len(caplog.messages) == len(told)
    assert all(re.search(one, text) for one, text in zip(told, caplog.messages, strict=True))


@pytest.mark.parametrize("position", [0, 1])
def test_the_end_of_the_warm_up_is_logged_once(caplog: pytest.LogCaptureFixture, position: int) -> None:
    """On the first worker; not again where a state is loaded that is beyond it."""
    caplog.set_level("INFO", "horovod_sparse")
    compressor = TopK(0.25, warmup=2.0, min_numel=0, granularity="layer")
    shapes = {"p": (40,), "q": (30,)}
    workers = make_workers(ORACLE, compressor, shapes, 2)
    gradients = {name: np.ones(shape, np.float32) for name, shape in shapes.items()}
    said = []
    for _ in range(14):
        take_step(ORACLE, workers, [gradients, gradients])
        said.append(len(caplog.messages))
    end = warmup_steps(compressor)
    assert end == 7 and said == [0] * (end - 1) + [1] * (15 - end)
    assert caplog.messages == ["TopK: the warm-up has ended after 7 steps; from now on the ratio is 0.25"]
    make_worker(ORACLE, compressor, shapes, world=2, position=position).load_state_dict(workers[0].state_dict())
    assert len(caplog.messages) == 1


def test_the_first_line_of_the_log_ends_with_advice(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "horovod_sparse")
    for position in range(2):
        worker = make_worker(ORACLE, TopK(0.01, warmup=None), {"p": (500,)}, world=2, position=position)
        for advice in ("", "Write another line"):
            log_start(worker, "none", advice)
    line = "TopK 0.01: 1 buckets, 500 entries, 0 parameters dense, kernels none"
    assert caplog.messages == [line, f"{line}. Write another line"]
    assert [record.levelname for record in caplog.records] == ["INFO", "WARNING"]
