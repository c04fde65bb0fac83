"""All scenarios."""

from __future__ import annotations

from . import exchange, gradients, state, training, usage
from .scenario import scenarios_of

SCENARIOS = scenarios_of([training, exchange, gradients, usage, state])
