"""All scenarios."""

from __future__ import annotations

from . import exchange, gradients, policies, state, training, usage
from .scenario import scenarios_of

SCENARIOS = scenarios_of([training, exchange, gradients, usage, state, policies])
