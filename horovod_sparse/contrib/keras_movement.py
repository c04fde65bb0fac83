"""How far the batches of one worker move the variables of a Keras model, and by how much that grows. Imports no framework.

Tested by tests/parallel/tf/local.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from horovod_sparse.contrib.lengths import ENTRIES, Lengths, sampled

Array = NDArray[Any]
Variable = Any


class Movement:
    """Where variables began, and how far they have moved from there, in memory that is kept: new memory takes longer."""

    def __init__(self, lengths: Lengths) -> None:
        self._lengths = lengths
        self.variables: dict[str, Variable] = {}
        self.start: dict[str, Array] = {}
        """The values with which the variables began, by name."""
        self.moved: dict[str, Array] = {}
        """How far they have moved since, once that is measured."""
        self._ahead: dict[str, Array] = {}
        """Where the variables were moved to when they began, as if something of what waits had arrived."""
        self._waits = False
        """Whether a batch has begun, and none has ended since."""
        self._begun = (0, 0.0)
        """The number of steps and the rate of the optimizer then."""
        self._decays: dict[str, float] = {}
        """Which part of its start weight decay has moved a variable by."""

    def begin(
        self, variables: Mapping[str, Variable], optimizer: Any, waiting: Mapping[str, Array], part: float
    ) -> None:
        """Note where the variables are, and move them by this part of what waits."""
        self.variables = {**variables}
        shapes = {name: tuple(one.shape) for name, one in variables.items()}
        if shapes != {name: one.shape for name, one in self.start.items()}:
            self.start, self.moved = _memory(variables), _memory(variables)
        kept, self._ahead = self._ahead, {}
        for name, variable in variables.items():
            start = self.start[name]
            # A copy: otherwise TensorFlow would write the variable to memory that is new in every step, which is slow.
            np.copyto(start, read(variable), casting="unsafe")
            if part and name in waiting:
                memory = kept.get(name)
                same = memory is not None and memory.shape == start.shape
                self._ahead[name] = ahead = np.multiply(waiting[name], part, out=memory if same else None)
                ahead += start
                variable.assign(ahead)
        self._begun, self._waits = (int(optimizer.iterations), float(optimizer.learning_rate)), True

    def end(self) -> None:
        """Note that a batch has ended."""
        self._waits = False

    def step_back(self) -> None:
        """Give variables the values of the start if they were moved for a batch that has not come."""
        for name, ahead in self._ahead.items() if self._waits else ():
            value = read(self.variables[name])
            # What the program has written since stays.
            if np.array_equal(value, ahead.astype(value.dtype, copy=False)):
                self.variables[name].assign(self.start[name])
        self._waits = False

    def restore(self) -> None:
        """Give the variables the values of the start."""
        for name, variable in self.variables.items():
            variable.assign(self.start[name])

    def measure(self, optimizer: Any) -> int:
        """Note how far the variables have moved. Return how many steps the optimizer has made."""
        for name, variable in self.variables.items():
            value = read(variable)
            begun = self._ahead.get(name, self.start[name])
            np.subtract(value, begun.astype(value.dtype, copy=False), out=self.moved[name], casting="unsafe")
        iterations, rate = self._begun
        steps = int(optimizer.iterations) - iterations
        self._decays = {}
        if optimizer.weight_decay and self._lengths.grow:
            # Keras has no public way to ask which variables decay.
            decaying = [name for name, one in self.variables.items() if optimizer._use_weight_decay(one)]
            self._decays = dict.fromkeys(decaying, steps * rate * optimizer.weight_decay)
        return steps

    def sample(self) -> Array:
        """Return 256 entries of how far the optimizer has moved variables without decay, and their sum of squares."""
        if not self._lengths.grow:
            return nothing()
        places = zip(self.moved.items(), sampled([one.size for one in self.moved.values()]), strict=True)
        entries = np.concatenate([
            one.reshape(-1)[at] + self._decays.get(name, 0.0) * self.start[name].reshape(-1)[at].astype(np.float64)
            for (name, one), at in places
        ])  # fmt: skip
        return np.append(entries, entries @ entries)

    def grow(self, world: int) -> None:
        """Multiply how far the optimizer has moved the variables by s (`Lengths`), but for their decay."""
        growth = self._lengths.factor(world)
        for name, moved in self.moved.items() if growth != 1.0 else ():
            moved *= growth
            if name in self._decays:
                moved += (growth - 1.0) * self._decays[name] * self.start[name]

    def arrive(self) -> None:
        """Give the variables the values of the start, moved as all workers' means say, within their constraints."""
        for name, variable in self.variables.items():
            start = self.start[name]
            start += self.moved[name]
            variable.assign(start)
            if variable.constraint is not None:
                variable.assign(variable.constraint(variable))


def nothing() -> Array:
    """Return the sample of a worker that has not moved."""
    return np.zeros(ENTRIES + 1)


def read(variable: Variable) -> Array:
    """Return a variable's memory, to be read at once."""
    # The value of a `tf.Variable` itself would be a copy.
    return np.asarray(variable.value.read_value())


def _memory(variables: Mapping[str, Variable]) -> dict[str, Array]:
    """Return arrays that are as large as variables, and at least of float32."""
    types = {name: np.float64 if one.dtype == "float64" else np.float32 for name, one in variables.items()}
    return {name: np.empty(tuple(one.shape), types[name]) for name, one in variables.items()}
