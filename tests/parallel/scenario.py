"""What a scenario is: a function that every rank calls, and that raises where a law does not hold. Imports no framework."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Scenario:
    """A function with its arguments, and where it is to run."""

    name: str
    run: Callable[..., None]
    arguments: tuple[Any, ...]
    launches: tuple[Launch, ...]


Cases = Mapping[str, tuple[Any, ...]]


def scenario(*launches: Launch, cases: Cases | None = None) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Mark a function as a scenario; `cases` are the arguments it is run with, by the name of the case."""

    def mark(function: Callable[..., None]) -> Callable[..., None]:
        name = function.__name__
        made = {f"{name}[{case}]": arguments for case, arguments in cases.items()} if cases is not None else {name: ()}
        marked: Any = function
        marked.scenarios = [Scenario(case, function, arguments, launches) for case, arguments in made.items()]
        return function

    return mark


def scenarios_of(modules: Iterable[ModuleType]) -> dict[str, Scenario]:
    """The scenarios of some modules by name, in the order of their source."""
    found = {}
    for module in modules:
        for function in vars(module).values():
            for one in getattr(function, "scenarios", ()):
                if one.name in found and found[one.name] is not one:
                    raise ValueError(f"there are two scenarios {one.name!r}")
                found[one.name] = one
    return found
