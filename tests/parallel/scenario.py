"""What a scenario is: a function that every rank calls, and that raises where a law does not hold.

Imports no framework before it is asked for the scenarios.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import numpy as np

from tests.harness.launch import Launch

MPI_2, MPI_4, MPI_5, GLOO_2 = Launch("mpirun", 2), Launch("mpirun", 4), Launch("mpirun", 5), Launch("horovodrun", 2)
EVERYWHERE = (MPI_2, MPI_4, GLOO_2)
MPI = (MPI_2, MPI_4)
PAIR = (MPI_2, GLOO_2)
TF_2, TF_4, TF_GLOO_2 = (
    Launch(launcher, ranks, "tensorflow", process_sets=False)
    for launcher, ranks in (("mpirun", 2), ("mpirun", 4), ("horovodrun", 2))
)
TF_SETS_4 = Launch("mpirun", 4, "tensorflow")
TORCHRUN_2, TORCHRUN_4, TORCHRUN_6 = (Launch("torchrun", ranks, "ddp") for ranks in (2, 4, 6))
TORCHRUN = (TORCHRUN_2, TORCHRUN_4)

MODULES = {
    "torch": (
        "training exchange gradients usage wrappers states resuming scaling policies momentum disagreement "
        "parameters local local_programs ahead compiled programs.laws programs.conservation"
    ),
    "tensorflow": "tf.tape tf.keras3 tf.local tf.local_programs tf.programs tf.states tf.scaling tf.parameters",
    "ddp": (
        "ddp.hook momentum resuming local local_programs ddp.sharded ddp.local_sharded ddp.nodes ahead scaling compiled "
        "programs.laws programs.conservation"
    ),
}
"""Where the scenarios of a framework are."""


@dataclass(frozen=True)
class Scenario:
    """A function with its arguments, and where it is to run."""

    name: str
    run: Callable[..., None]
    arguments: tuple[Any, ...]
    launches: tuple[Launch, ...]
    quick: bool
    """Whether `make test` runs it."""

    def is_quick(self, launch: Launch) -> bool:
        """Whether `make test` runs it there: with the first launch of a framework.

        TensorFlow takes seconds to trace a graph: of its scenarios, those that have several launches. Of torchrun's, those of
        two ranks.
        """
        own = [one for one in self.launches if one.framework == launch.framework]
        is_short = {"tensorflow": len(own) > 1, "ddp": launch.ranks == 2}.get(launch.framework, True)
        return self.quick and launch == own[0] and is_short


def scenario(
    *launches: Launch, cases: Mapping[str, tuple[Any, ...]] | None = None, quick: bool = True
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Mark a function as a scenario; `cases` are the arguments it is run with, by the name of the case.

    Every launch runs the first case, which shows that the function's law holds there. The others are run by the first launch of
    each framework. It is one of four ranks where two do not show what is tested: of two numbers, the order of a sum is none.

    `make test` runs the first case, unless it takes too long (`quick`).
    """

    def mark(function: Callable[..., None]) -> Callable[..., None]:
        name = function.__name__
        made = {f"{name}[{case}]": arguments for case, arguments in cases.items()} if cases is not None else {name: ()}
        firsts = tuple({launch.framework: launch for launch in reversed(launches)}.values())
        marked: Any = function
        marked.scenarios = [
            Scenario(case, function, arguments, firsts if number else launches, quick and not number)
            for number, (case, arguments) in enumerate(made.items())
        ]
        return function

    return mark


def scenarios(framework: str) -> dict[str, Scenario]:
    """Those of a framework by name, in the order of their source. Imports the framework."""
    found: dict[str, Scenario] = {}
    for module in MODULES[framework].split():
        for function in vars(import_module(f".{module}", __package__)).values():
            for one in getattr(function, "scenarios", ()):
                if found.setdefault(one.name, one).run is not function:
                    raise ValueError(f"there are two scenarios {one.name!r}")
    return {name: one for name, one in found.items() if any(launch.framework == framework for launch in one.launches)}


def normals(shape: Sequence[int], *, step: int, rank: int, salt: int = 0) -> np.ndarray:
    return np.random.default_rng((salt, step, rank)).standard_normal(tuple(shape)).astype(np.float32)


def selected(x: np.ndarray, count: int) -> np.ndarray:
    """Top-k of a flat array: everything else zero. Written for reading: sort by magnitude, lowest index first."""
    chosen = sorted(range(x.size), key=lambda i: (-abs(float(x[i])), i))[:count]
    kept = np.zeros_like(x)
    kept[chosen] = x[chosen]
    return kept


def raised(error: type[BaseException] | tuple[type[BaseException], ...], function: Callable[..., object]) -> str:
    """The message of the error that the function must raise."""
    try:
        function()
    except error as caught:
        return str(caught)
    raise AssertionError(f"nothing raised, expected {error}")


def logged(function: Callable[..., object]) -> list[str]:
    """What the function has the log say, and warns of on our behalf."""
    log, handler, said = logging.getLogger("horovod_sparse"), logging.Handler(logging.INFO), []
    before, handler.emit = log.level, lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    log.setLevel(logging.INFO)
    log.addHandler(handler)
    try:
        return [*warned(function), *said]
    finally:
        log.removeHandler(handler)
        log.setLevel(before)


def warned(function: Callable[..., object]) -> list[str]:
    """What the function warns of on our behalf."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        function()
    return [str(one.message) for one in caught if "horovod_sparse" in str(one.message)]
