"""All scenarios, by the framework that they need. Imports that framework when it is asked for."""

from __future__ import annotations

from importlib import import_module

from .scenario import Scenario, scenarios_of

MODULES = {
    "torch": (
        "training exchange gradients usage wrappers state checkpoints numpy_state scaling policies momentum disagreement "
        "parameters hierarchical local updates detached compiled telemetry"
    ),
    "tensorflow": "tf.tape tf.keras3 tf.momentum tf.updates tf.checkpoints tf.scaling tf.disagreement tf.parameters",
    "ddp": "ddp.hook momentum local updates ddp.updates ddp.sharded detached scaling compiled",
}


def scenarios(framework: str) -> dict[str, Scenario]:
    """Those of a framework, by name."""
    known = scenarios_of(import_module(f".{name}", __package__) for name in MODULES[framework].split())
    return {name: one for name, one in known.items() if any(launch.framework == framework for launch in one.launches)}
