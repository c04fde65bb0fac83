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
from horovod_sparse.core.store import Store

Variable = Any


class Names:
    """Gives every variable a unique name: a Keras variable's path, or a `tf.Variable`'s name.

    If two variables have the same name, the one that is seen second becomes "name_1".
    """

    def __init__(self) -> None:
        self._names: dict[Any, str] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}

    def of(self, variables: Sequence[Variable]) -> list[str]:
        """Return the names of some variables, whether they were seen before or not."""
        return [self._name(variable) for variable in variables]

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def _name(self, variable: Variable) -> str:
        if not isinstance(plain(variable), tf.Variable):
            raise TypeError(f"sources must be variables where compression is a sparsifier, got {variable!r}")
        key = plain(variable).ref()
        if key not in self._names:
            wanted, shape = name_of(variable), plain(variable).shape
            if not shape.is_fully_defined():
                raise ValueError(
                    f"variable {wanted!r} must have a known shape where compression is a sparsifier, got {shape}: its residual "
                    "has the same; make it with shape=value.shape, or leave it out of the distributed tape or optimizer"
                )
            name, number = wanted, 0
            while name in self._shapes:
                number += 1
                name = f"{wanted}_{number}"
            self._names[key], self._shapes[name] = name, tuple(shape)
        return self._names[key]


def plain(variable: Variable) -> Variable:
    """Return the `tf.Variable` in a Keras 3 variable; return anything else unchanged."""
    return variable.value if hasattr(variable, "path") and hasattr(variable, "value") else variable


def name_of(variable: Variable) -> str:
    """Return a Keras variable's path, or a `tf.Variable`'s name."""
    return getattr(variable, "path", None) or str(variable.name).split(":")[0]


def _uncounted(name: str) -> str:
    """Return a name without the counts that Keras gives to what has no name of its own ("dense_3")."""
    return re.sub(r"_\d+(?=/|$)", "", name)


def _counts(name: str) -> list[int]:
    """Return the counts in a name. They tell in which order layers were made."""
    return [int(found[1]) if (found := re.search(r"_(\d+)$", part)) else 0 for part in name.split("/")]


def _fit(one: str, other: str) -> bool:
    """Return whether two names without counts are those of one variable.

    Keras calls a variable of a sequential model "sequential/dense/kernel". When the same model is loaded, it is "dense/kernel".
    """
    return one == other or one.endswith(f"/{other}") or other.endswith(f"/{one}")


def renamed(state: Mapping[str, Any], names: Iterable[str]) -> Mapping[str, Any]:
    """Return a compressor's state with the names that its variables have now, or unchanged if they cannot be told apart.

    Keras goes on counting: the layers of a model that is built again have other numbers, in the same order.
    """
    olds, news = names_in(state), set(names)
    new: dict[str, str] = {}
    for kind in set() if news <= olds else {_uncounted(name) for name in news}:
        mine = [name for name in news if _uncounted(name) == kind]
        same = [old for old in olds if _uncounted(old) == kind]
        saved = same or [old for old in olds if _fit(_uncounted(old), kind)]
        if len(saved) != len(mine):
            return state
        new.update(zip(sorted(saved, key=_counts), sorted(mine, key=_counts), strict=True))
    return {**state, **{part: {new.get(old, old): value for old, value in state[part].items()} for part in PARTS}}


def broadcast_variables(
    variables: Iterable[Any], root_rank: int, process_set: Any = global_process_set, inplace: bool = False
) -> Any:
    """Give all workers the variables' values of `root_rank`, as in stock Horovod, but also for Keras 3 variables.

    For a Keras 3 model pass `model.weights`: `model.variables` also has the states of random generators.
    """
    return stock.broadcast_variables([plain(variable) for variable in variables], root_rank, process_set, inplace)


def load_renamed(store: Store, state: Mapping[str, Any]) -> None:
    """Load the state of the variables that have buckets by their names now, and defer the rest until its variables have."""
    store.drop()
    feedback = store.feedback
    if feedback is None:
        store.load_part(state, ())
    else:
        store.load_part(renamed(state, feedback.bucket_of), feedback.bucket_of)
