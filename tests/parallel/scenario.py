"""What a scenario is: a function that every rank calls, and that raises where a law does not hold. Imports no framework."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

from .launch import Launch

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


_TENSORFLOW = 4
"""So many scenarios of a module are run by `make test` with TensorFlow."""


@dataclass(frozen=True)
class Scenario:
    """A function with its arguments, and where it is to run."""

    name: str
    run: Callable[..., None]
    arguments: tuple[Any, ...]
    launches: tuple[Launch, ...]
    typical: bool = True
    """Whether it stands for its function's other cases: the first does."""

    leads: bool = False
    """Whether it is the first of its module that horovodrun starts too."""

    def is_quick(self, launch: Launch) -> bool:
        """Whether `make test` runs it there: with a framework's launch that is named first; what leads, with horovodrun too."""
        with_tensorflow = launch.framework == "tensorflow"
        # With four processes TensorFlow takes half a minute to start.
        quick = launch.ranks <= (2 if with_tensorflow else 4)
        with_horovodrun = self.leads and launch.launcher == "horovodrun" and not with_tensorflow
        first = next(one for one in self.launches if one.framework == launch.framework)
        return self.typical and quick and (launch == first or with_horovodrun)


Cases = Mapping[str, tuple[Any, ...]]


def scenario(
    *launches: Launch, cases: Cases | None = None, quick: bool = True
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Mark a function as a scenario; `cases` are the arguments it is run with, by the name of the case.

    Every launch runs the first case. Each of the others is run by one launch of each framework, in turns: all cases in all
    launches would take half as long again.

    The first launch is that of `make test`, unless it takes too long (`quick`): it has four ranks where two do not show what
    is tested.
    """

    def mark(function: Callable[..., None]) -> Callable[..., None]:
        name = function.__name__
        made = {f"{name}[{case}]": arguments for case, arguments in cases.items()} if cases is not None else {name: ()}
        marked: Any = function
        first = next(iter(made))
        marked.scenarios = [
            Scenario(case, function, made[case], _launches_of(number, launches), quick and case == first)
            for number, case in enumerate(made)
        ]
        return function

    return mark


def _launches_of(case: int, launches: Sequence[Launch]) -> tuple[Launch, ...]:
    """The launches that run the case of this number."""
    if case == 0:
        return tuple(launches)
    frameworks = dict.fromkeys(launch.framework for launch in launches)
    own = [[launch for launch in launches if launch.framework == framework] for framework in frameworks]
    return tuple(some[case % len(some)] for some in own)


def scenarios_of(modules: Iterable[ModuleType]) -> dict[str, Scenario]:
    """The scenarios of some modules by name, in the order of their source."""
    found: dict[str, Scenario] = {}
    seen: dict[str, Callable[..., None]] = {}
    for module in modules:
        led, typical = False, 0
        for function in vars(module).values():
            for one in getattr(function, "scenarios", ()):
                if seen.setdefault(one.name, function) is not function:
                    raise ValueError(f"there are two scenarios {one.name!r}")
                leads = not led and any(launch.launcher == "horovodrun" for launch in one.launches)
                led, typical = led or leads, typical + one.typical
                # Its graphs take seconds to trace.
                is_one_of_many = one.launches[0].framework == "tensorflow" and typical > _TENSORFLOW
                found.setdefault(one.name, replace(one, leads=leads, typical=one.typical and not is_one_of_many))
    return found


def raised(error: type[BaseException] | tuple[type[BaseException], ...], function: Callable[..., object]) -> str:
    """The message of the error that the function must raise."""
    try:
        function()
    except error as caught:
        return str(caught)
    raise AssertionError(f"nothing raised, expected {error}")
