"""Scenarios: what goes on from a checkpoint. Saving waits for nobody, and a state that was left out is noticed."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import horovod_sparse.torch as sparse

from .common import assert_identical, everyone, hvd, loss_of, small_model, train
from .common import distributed as in_gradients
from .scenario import PAIR, TORCHRUN_2, scenario, warned

Parts = tuple[Any, Any, Any]
"""The model to call, what steps it, and what has a state beside them."""


def of_gradients(model: nn.Module, optimizer: torch.optim.Optimizer) -> Parts:
    compression = sparse.SIDCo(0.05)
    return *in_gradients(model, optimizer, compression), compression


def of_movements(model: nn.Module, optimizer: torch.optim.Optimizer) -> Parts:
    local = sparse.LocalUpdates(optimizer, model, sparse.SIDCo(0.05))
    return model, local, local


WAYS = {"gradients": (of_gradients,), "movements": (of_movements,)}


@scenario(*PAIR, TORCHRUN_2, cases=WAYS)
def a_rank_that_saves_alone_waits_for_nobody(make: Callable[..., Parts]) -> None:
    """Before the first step, and between two steps: the other ranks know nothing of it."""
    model, stepper, kept = make(plain := small_model(), torch.optim.Adam(plain.parameters(), lr=1e-3))
    for step in range(4):
        if hvd.rank() == step % 2:
            saved = copy.deepcopy(kept.state_dict())
            assert bool(step) == bool(saved.get("compression", saved)["residuals"])
        # Whoever waited within state_dict would get this in its place.
        assert everyone(("step", step)) == [("step", step)] * hvd.size()
        train(model, stepper, [step])
    assert_identical(model)


@scenario(*PAIR, TORCHRUN_2, cases=WAYS)
def a_state_that_was_left_out_is_noticed(make: Callable[..., Parts]) -> None:
    """By the steps that the optimizer has counted. One step is what broadcasts and checkpoints make."""
    first, adam = small_model(), torch.optim.Adam
    optimizer = adam(first.parameters(), lr=1e-3)
    saved = {}
    for step in range(3):
        optimizer.zero_grad()
        loss_of(first, step).backward()
        optimizer.step()
        saved[step + 1] = copy.deepcopy(optimizer.state_dict())
    model, stepper, kept = make(plain := small_model(), adam(plain.parameters(), lr=1e-3))
    train(model, stepper, range(2))
    state = kept.state_dict()
    for steps, loads, rank in ((1, False, None), (3, False, 0), (3, True, None)):
        model, stepper, kept = make(plain := small_model(), adam(plain.parameters(), lr=1e-3))
        # Horovod's wrapper makes another optimizer, without the state of the one that it is given.
        getattr(stepper, "optimizer", stepper).load_state_dict(copy.deepcopy(saved[steps]))
        if loads:
            kept.load_state_dict(state)
        texts = warned(lambda model=model, stepper=stepper: train(model, stepper, range(2)))
        found = [text for text in texts if "no state of" in text]
        assert len(found) == (hvd.rank() == rank), (steps, loads, texts)
        assert all("the optimizer has made 3 steps" in text and ".load_state_dict(...)" in text for text in found)
