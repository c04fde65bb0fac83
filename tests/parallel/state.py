"""Scenarios: states that are replaced while gradients are under way. Resuming is in `checkpoints`."""

from __future__ import annotations

import copy

from .common import (
    BUCKET_BYTES,
    COMPRESSORS,
    MakeCompression,
    assert_identical,
    digest,
    kept,
    loss_of,
    small_model,
    train,
    wrap,
)
from .scenario import MPI, scenario


@scenario(
    *MPI,
    cases={
        f"{name}-{how}-{steps}": (COMPRESSORS[name], how, steps)
        for name in ("SIDCo", "MiCRO")
        for how in ("reset", "load", "optimizer")
        for steps in (0, 3)
    },
)
def a_state_can_be_replaced_in_the_middle_of_a_step(make: MakeCompression, how: str, steps: int) -> None:
    """Gradients that were handed over are gone, unless the step was held back; everything else goes on."""
    (model, compression), (other_model, other) = ((small_model(), make(granularity=BUCKET_BYTES)) for _ in range(2))
    optimizer = wrap(model, compression)
    train(other_model, wrap(other_model, other), range(3))
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    state = other.state_dict()

    def replace() -> None:
        if how == "reset":
            compression.reset()
        else:
            compression.load_state_dict(state)

    results = []
    for interrupted in (False, True):
        train(model, optimizer, range(steps))
        if interrupted:
            optimizer.zero_grad()
            loss_of(model, 40).backward()
        replace()
        if interrupted and how == "optimizer":
            # It reduces what is under way, which moves the compression's state on.
            optimizer.load_state_dict(saved[1])
            replace()
        if interrupted:
            optimizer.step()
        model.load_state_dict(saved[0])
        # The optimizer goes on with the very tensors that it loads.
        optimizer.load_state_dict(copy.deepcopy(saved[1]))
        replace()
        train(model, optimizer, range(5, 9))
        results.append((digest(model.parameters()), kept(compression)))
    assert results[0] == results[1]
    assert_identical(model)
