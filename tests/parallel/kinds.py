"""Parameters of every kind: their shapes, and the names of their types. No framework."""

from __future__ import annotations

Kind = tuple[tuple[int, ...], str]
SINGLE, DOUBLE, HALF, BRAIN = "float32", "float64", "float16", "bfloat16"
KINDS: dict[str, dict[str, Kind]] = {
    "scalar": {"scalar": ((), SINGLE)},
    "scalars": {f"scalar{number}": ((), SINGLE) for number in range(5)},
    "empty": {"empty": ((0,), SINGLE), "weight": ((30, 40), SINGLE)},
    "empty_only": {"empty": ((3, 0), SINGLE)},
    "empty_in_between": {"first": ((500,), SINGLE), "empty": ((0, 4), SINGLE), "last": ((500,), SINGLE)},
    "one_element": {"one": ((1,), SINGLE), "cube": ((1, 1, 1), SINGLE)},
    "types": {
        "half": ((30, 40), HALF),
        "brain": ((500,), BRAIN),
        "single": ((300,), SINGLE),
        "double": ((600,), DOUBLE),
    },
    "types_of_scalars": {"half": ((), HALF), "brain": ((), BRAIN), "single": ((), SINGLE), "double": ((), DOUBLE)},
}
