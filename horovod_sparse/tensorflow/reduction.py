"""What Horovod's tapes and optimizers are told about how gradients are reduced. Tested by tests/parallel/tf/tape.py."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from horovod.common import process_sets
from horovod.tensorflow import mpi_ops

from horovod_sparse.core.agreement import op_name
from horovod_sparse.core.stock import complete_global_set
from horovod_sparse.tensorflow.names import Names


@dataclass(frozen=True)
class Reduction:
    """The arguments, under Horovod's names, that say how gradients are reduced."""

    op: Any
    """hvd.Average or hvd.Sum."""
    gradient_predivide_factor: float
    groups: Any
    """None, a number of groups, or lists of variables."""
    sparse_as_dense: bool
    """Whether `tf.IndexedSlices` are compressed like other gradients."""
    process_set: Any
    """The workers that exchange."""

    def __post_init__(self) -> None:
        complete_global_set(process_sets, mpi_ops)

    @classmethod
    def among(cls, arguments: Mapping[str, Any]) -> Reduction:
        """Make one from all arguments of a function of Horovod."""
        return cls(**{field.name: arguments[field.name] for field in dataclasses.fields(cls)})

    @property
    def averages(self) -> bool:
        return bool(self.op == mpi_ops.Average)

    @property
    def op_name(self) -> str:
        return op_name(self.op, mpi_ops.Average, mpi_ops.Sum)

    def check_same(self, later: Reduction) -> None:
        """Raise ValueError if the arguments of a later tape differ from these, which are the first one's."""
        before = self._values()
        for name, value in later._values().items():
            if value != before[name]:
                raise ValueError(
                    f"{name} must be the same for all tapes with one compression, got {value} after {before[name]}; give "
                    "the other tape a compression of its own, for instance copy.deepcopy(compression)"
                )

    def _values(self) -> dict[str, object]:
        """Return the arguments as values that can be compared and shown."""
        groups = self.groups
        if isinstance(groups, list):
            groups = [[id(member) for member in group] for group in groups]
        return {**vars(self), "op": self.op_name, "groups": groups, "process_set": self.process_set.process_set_id}

    def group_numbers(self, variables: Sequence[Any], names: Names) -> dict[str, int]:
        """Return the number of each variable's group by the variable's name; without groups, nothing."""
        if self.groups is None:
            return {}
        all_names = names.of(variables)
        if isinstance(self.groups, int):
            groups = [part.tolist() for part in np.array_split(all_names, min(self.groups, len(all_names)))]
        else:
            groups = [names.of(group) for group in self.groups]
            # A variable that is in no group forms a group of its own.
            groups += [[name] for name in all_names if not any(name in group for group in groups)]
        return {name: number for number, group in enumerate(groups) for name in group}
