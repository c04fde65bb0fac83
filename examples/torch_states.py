"""How the examples with PyTorch write and read a rank's file: its residuals belong to it alone."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch


def write_states(objects: Mapping[str, Any], path: Path) -> None:
    """Write the states of the objects, and of the random generator, from which dropout draws."""
    states = {name: one.state_dict() for name, one in objects.items()}
    torch.save({"objects": states, "random": torch.get_rng_state()}, path)


def read_states(objects: Mapping[str, Any], path: Path) -> None:
    """Read what `write_states` has written for objects of these names."""
    saved = torch.load(path, weights_only=True, map_location="cpu")
    for name, one in objects.items():
        one.load_state_dict(saved["objects"][name])
    torch.set_rng_state(saved["random"])
