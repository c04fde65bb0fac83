"""What a scenario is: a function that every rank calls, and that raises where a law does not hold. Imports no framework."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
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
TORCHRUN_2, TORCHRUN_4 = Launch("torchrun", 2, "ddp"), Launch("torchrun", 4, "ddp")
TORCHRUN = (TORCHRUN_2, TORCHRUN_4)


@dataclass(frozen=True)
class Scenario:
    """A function with its arguments, and where it is to run."""

    name: str
    run: Callable[..., None]
    arguments: tuple[Any, ...]
    launches: tuple[Launch, ...]
    typical: bool = True
    """Whether it stands for its function's other cases: the first and the last do; with TensorFlow only the first."""

    leads: bool = False
    """Whether it is the first of its module that horovodrun starts too."""

    def is_quick(self, launch: Launch) -> bool:
        """Whether `make test` runs it there: with the launch that is named first; what leads, with horovodrun too."""
        with_horovodrun = self.leads and launch.launcher == "horovodrun"
        # With four processes TensorFlow takes half a minute to start.
        quick = launch.ranks <= (2 if launch.framework == "tensorflow" else 4)
        return self.typical and quick and (launch == self.launches[0] or with_horovodrun)


Cases = Mapping[str, tuple[Any, ...]]


def scenario(
    *launches: Launch, cases: Cases | None = None, quick: bool = True
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Mark a function as a scenario; `cases` are the arguments it is run with, by the name of the case.

    The first launch is that of `make test`, unless it takes too long (`quick`): it has four ranks where two do not show what
    is tested.
    """

    def mark(function: Callable[..., None]) -> Callable[..., None]:
        name = function.__name__
        made = {f"{name}[{case}]": arguments for case, arguments in cases.items()} if cases is not None else {name: ()}
        marked: Any = function
        first, last = next(iter(made)), next(reversed(made))
        ends = (first,) if launches[0].framework == "tensorflow" else (first, last)
        ends = ends if quick else ()
        marked.scenarios = [Scenario(case, function, made[case], launches, case in ends) for case in made]
        return function

    return mark


def scenarios_of(modules: Iterable[ModuleType]) -> dict[str, Scenario]:
    """The scenarios of some modules by name, in the order of their source."""
    found = {}
    seen: dict[str, Callable[..., None]] = {}
    for module in modules:
        led = False
        for function in vars(module).values():
            for one in getattr(function, "scenarios", ()):
                if seen.setdefault(one.name, function) is not function:
                    raise ValueError(f"there are two scenarios {one.name!r}")
                leads = not led and any(launch.launcher == "horovodrun" for launch in one.launches)
                led = led or leads
                found.setdefault(one.name, replace(one, leads=leads))
    return found
