"""Names of variables, by which residuals are kept and saved. The same on every rank that builds the same model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Variable = Any


class Names:
    """Gives every variable a name that no other has: a Keras variable's path, a `tf.Variable`'s name.

    Of variables with the same name the second becomes "name_1", in the order in which they are first seen.
    """

    def __init__(self) -> None:
        self._names: dict[Any, str] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}

    def of(self, variables: Sequence[Variable]) -> list[str]:
        """The names of some variables, seen before or not."""
        return [self._name(variable) for variable in variables]

    def shape(self, name: str) -> tuple[int, ...]:
        """Of the variable with this name."""
        return self._shapes[name]

    def _name(self, variable: Variable) -> str:
        key = plain(variable).ref()
        if key not in self._names:
            wanted = getattr(variable, "path", None) or variable.name.split(":")[0]
            name, number = wanted, 0
            while name in self._shapes:
                number += 1
                name = f"{wanted}_{number}"
            self._names[key] = name
            self._shapes[name] = tuple(int(extent) for extent in variable.shape)
        return self._names[key]


def plain(variable: Variable) -> Variable:
    """The `tf.Variable` in a Keras 3 variable; anything else as it is."""
    return variable.value if hasattr(variable, "path") and hasattr(variable, "value") else variable
