"""Variables of TensorFlow and Keras 3: their names, under which residuals are kept and saved, and their broadcast.

Every rank that builds the same model has the same names.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import horovod.tensorflow as stock
import tensorflow as tf
from horovod.tensorflow import global_process_set

from horovod_sparse.core.state import PARTS, names_in

Variable = Any


class Names:
    """Gives every variable a unique name: a Keras variable's path, or a `tf.Variable`'s name.

    If two variables have the same name, the one that is seen second becomes "name_1".
    """

    def __init__(self) -> None:
        self._names: dict[Any, str] = {}
        self._variables: dict[str, Variable] = {}
        """By name; Keras' own if it was seen. It may be frozen later, which a `tf.Variable` cannot be."""

    def of(self, variables: Sequence[Variable]) -> list[str]:
        """Return the names of some variables, whether they were seen before or not."""
        return [self._name(variable) for variable in variables]

    def know(self, variables: Iterable[Variable]) -> bool:
        """Return whether one of the variables was seen."""
        return any(plain(variable).ref() in self._names for variable in variables)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(int(extent) for extent in self._variables[name].shape)

    def frozen(self, names: Iterable[str]) -> frozenset[str]:
        """Return the names, among those of variables without a gradient, whose variables are not trained any more."""
        seen = ((name, self._variables[name]) for name in names)
        return frozenset(name for name, one in seen if plain(one) is not one and not one.trainable)

    def _name(self, variable: Variable) -> str:
        if not isinstance(plain(variable), tf.Variable):
            raise TypeError(f"sources must be variables where compression is a sparsifier, got {variable!r}")
        key = plain(variable).ref()
        if key not in self._names:
            wanted = name_of(variable)
            name, number = wanted, 0
            while name in self._variables:
                number += 1
                name = f"{wanted}_{number}"
            self._names[key] = name
        name = self._names[key]
        if name not in self._variables or plain(variable) is not variable:
            self._variables[name] = variable
        return name


def plain(variable: Variable) -> Variable:
    """Return the `tf.Variable` in a Keras 3 variable; return anything else unchanged."""
    return variable.value if hasattr(variable, "path") and hasattr(variable, "value") else variable


def name_of(variable: Variable) -> str:
    """Return a Keras variable's path, or a `tf.Variable`'s name."""
    return getattr(variable, "path", None) or str(variable.name).split(":")[0]


def same_name(saved: str, name: str) -> bool:
    """Return whether two names are those of one variable, of which the first was saved.

    Keras counts what has no name of its own ("dense_3"), and calls a variable of a sequential model "sequential/dense/kernel".
    When the same model is loaded, it is called "dense/kernel".
    """
    return _fit(*(re.sub(r"_\d+(?=/|$)", "", one) for one in (saved, name)))


def _fit(one: str, other: str) -> bool:
    return one == other or one.endswith(f"/{other}") or other.endswith(f"/{one}")


def renamed(state: Mapping[str, Any], names: Iterable[str]) -> Mapping[str, Any]:
    """Return a compressor's state with the names that its variables have now, or unchanged if they cannot be told apart."""
    names = list(names)
    olds = names_in(state)
    new: dict[str, str] = {}
    for name in names:
        found = [name] if name in olds else [old for old in olds if _fit(old, name)]
        if len(found) == 1:
            new[found[0]] = name
    if len(new) < len(names):
        return state
    return {**state, **{part: {new.get(old, old): value for old, value in state[part].items()} for part in PARTS}}


def broadcast_variables(
    variables: Iterable[Any], root_rank: int, process_set: Any = global_process_set, inplace: bool = False
) -> Any:
    """Give all workers the variables' values of `root_rank`, as in stock Horovod, but also for Keras 3 variables.

    For a Keras 3 model pass `model.weights`: `model.variables` also has the states of random generators.
    """
    return stock.broadcast_variables([plain(variable) for variable in variables], root_rank, process_set, inplace)
