"""Scenarios: ranks that differ in what only the messages tell. All of them raise, or all are told."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import partial
from typing import Any
from unittest.mock import patch

import horovod.torch as hvd
import torch

import horovod_sparse
from horovod_sparse.exchange.protocols import Collective
from horovod_sparse.torch import TopK, horovod
from horovod_sparse.torch.exchange import Collectives
from tests.harness.stairs import Halving

from .common import BUCKET_BYTES, COMPRESSORS, MakeCompression, assert_identical, raised, small_model, train, wrap
from .scenario import EVERYWHERE, PAIR, scenario, warned


@scenario(*PAIR)
def another_release_raises_on_all() -> None:
    describe, release = horovod.description, "0.0.9" if hvd.rank() == 1 else horovod_sparse.__version__
    with patch.object(horovod, "description", lambda *arguments: {**describe(*arguments), "release": release}):
        model = small_model()
        optimizer = wrap(model, TopK(0.01, warmup=None))
        message = raised(ValueError, lambda: train(model, optimizer, range(1)))
    assert "'release'" in message and "'0.0.9'" in message and repr(horovod_sparse.__version__) in message, message
    train(model, optimizer, range(2))
    assert_identical(model)


@scenario(
    *EVERYWHERE,
    cases={
        # Values would be summed at different entries, without a word.
        "RandomK": (COMPRESSORS["RandomK"],),
        "MiCRO": (COMPRESSORS["MiCRO"],),
        # The third step and the fourth have messages of different lengths.
        "schedule": (partial(TopK, Halving(0.5, 0.01)),),
    },
)
def a_state_of_another_step_on_one_rank_raises_on_all(make: MakeCompression, behind: Sequence[int] = (1,)) -> None:
    """Or on the ranks `behind`. The right state everywhere helps: the same steps give the same model."""
    model = small_model()
    compression = make(granularity=BUCKET_BYTES)
    optimizer = wrap(model, compression)
    train(model, optimizer, range(2))
    state = compression.state_dict()
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    train(model, optimizer, range(2, 3))
    if hvd.rank() in behind:
        compression.load_state_dict(state)
    message = raised(RuntimeError, lambda: train(model, optimizer, range(3, 4)))
    assert message.startswith(f"rank {hvd.rank()}: ") and "of bucket '" in message, message
    ends: list[list[torch.Tensor]] = []
    for _ in range(2):
        compression.load_state_dict(state)
        model.load_state_dict(saved[0])
        # The optimizer goes on with the very tensors that it loads.
        optimizer.load_state_dict(copy.deepcopy(saved[1]))
        train(model, optimizer, range(2, 7))
        ends.append([parameter.detach().clone() for parameter in model.parameters()])
    # Of more than two ranks, an allreduce adds in an order that depends on what Horovod fuses.
    for one, other in zip(*ends, strict=True):
        torch.testing.assert_close(one, other, rtol=0.0, atol=0.0 if hvd.size() == 2 else 1e-3)
    assert_identical(model)
    assert compression.stats().last.total.ratio < 1.0


@scenario(*PAIR)
def a_state_of_another_model_raises_on_all_in_the_first_step() -> None:
    """Also if one rank alone has loaded it. Without the state all train."""
    saved = TopK(0.01, warmup=None)
    other = small_model()
    train(other, wrap(other, saved), range(2))
    model, compression = torch.nn.Linear(32, 10), TopK(0.01, warmup=None)
    optimizer = wrap(model, compression)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    if hvd.rank() == 1:
        compression.load_state_dict(saved.state_dict())
    message = raised(ValueError, lambda: train(model, optimizer, range(1)))
    assert "'problem'" in message and "'0.weight'" in message, message
    compression.reset()
    train(model, optimizer, range(2))
    assert_identical(model)


@scenario(*EVERYWHERE)
def a_damaged_message_raises_on_all() -> None:
    """Wherever it comes from. Training goes on when all ranks begin anew."""
    model, compression = small_model(), TopK(0.02, granularity=BUCKET_BYTES, warmup=None)
    optimizer = wrap(model, compression)
    train(model, optimizer, range(2))
    start = Collectives.start

    def damaged(self: Collectives, collective: Collective, name: str = "", bucket: Any = None) -> Any:
        if hvd.rank() == 1:
            collective = collective._replace(message=torch.full_like(collective.message, 2**30))
        return start(self, collective, name, bucket)

    with patch.object(Collectives, "start", damaged):
        message = raised(RuntimeError, lambda: train(model, optimizer, [2]))
    assert message.startswith(f"rank {hvd.rank()}: ") and " worker 1 " in message and "weight'" in message, message
    compression.reset()
    train(model, optimizer, range(3, 5))
    assert_identical(model)


@scenario(*PAIR)
def weights_that_were_not_broadcast_cause_a_warning() -> None:
    """Once, on all ranks that differ, with the first parameter's name; none if they are equal, whatever their layout is."""
    for seeds, names in (((1, 2), ["0.weight"]), ((1, 1), [])):
        model = small_model(seed=seeds[hvd.rank() % 2])
        if hvd.rank() == 1:
            weight = model.get_parameter("4.weight")
            weight.data = weight.data.t().contiguous().t()
        texts = warned(lambda model=model: train(model, wrap(model, TopK(0.01, warmup=None)), range(2)))
        assert len(texts) == len(names), texts
        for text, name in zip(texts, names, strict=True):
            assert "8 of 8 parameters" in text and repr(name) in text, text
            assert "hvd.broadcast_parameters" in text, text
