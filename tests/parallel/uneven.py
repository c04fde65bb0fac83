"""Scenarios: uneven data. A rank whose data has ended goes on with gradients of zero; no rank waits for ever."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from horovod_sparse.torch import joined

from .common import (
    COMPRESSORS,
    DEVICE,
    IN_DDP,
    assert_identical,
    digest,
    distributed,
    everyone,
    hvd,
    kept,
    loss_of,
    raised,
    small_model,
)
from .scenario import EVERYWHERE, PAIR, TORCHRUN, TORCHRUN_2, scenario

STEPS = {2: (5, 2), 4: (2, 5, 1, 3)}
"""How many batches each rank has, by the number of ranks."""
SGD: Mapping[str, Any] = {"momentum": 0.9, "weight_decay": 0.01}


def mine() -> int:
    return STEPS[hvd.size()][hvd.rank()]


def _train(batches: Iterable[tuple[int, float]], make: Callable[[], Any], adamw: bool) -> list[str]:
    """Train with weights, and then some steps more. Return what has become of the replicas, and of this rank."""
    model, compression = small_model(), make()
    if adamw:
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, **(SGD if compression.momentum == "auto" else {}))
    called, optimizer = distributed(model, optimizer, compression)
    scaler = torch.amp.GradScaler(DEVICE, init_scale=8.0, enabled=not adamw and not IN_DDP)
    for batch, weight in [*batches, (10, 1.0), (11, 1.0)]:
        optimizer.zero_grad()
        scaler.scale(weight * loss_of(called, batch)).backward()
        scaler.step(optimizer)
        scaler.update()
        assert_identical(model)
    assert compression.stats().steps == max(STEPS[hvd.size()]) + 2
    return [digest(model.parameters()), kept(compression)]


@scenario(
    *EVERYWHERE,
    TORCHRUN_2,
    cases={
        **{name: (make, False) for name, make in COMPRESSORS.items()},
        "AdamW": (COMPRESSORS["SIDCo"], True),
    },
)
def a_rank_without_data_adds_zeros(make: Callable[[], Any], adamw: bool) -> None:
    """It trains as if its gradients were zero, bit by bit, and so do the steps that follow."""
    expected = [(min(step, mine() - 1), float(step < mine())) for step in range(max(STEPS[hvd.size()]))]
    seen = list(joined(range(mine())))
    assert seen == expected
    assert _train(joined(range(mine())), make, adamw) == _train(expected, make, adamw)


@scenario(*PAIR)
def data_that_is_empty_is_refused_unless_all_is() -> None:
    assert list(joined([])) == []
    message = raised(ValueError, lambda: list(joined([] if hvd.rank() == 1 else [1, 2])))
    assert "got none on the ranks [1]" in message
    assert set(everyone(message.partition(":")[0])) == {"rank 0", "rank 1"}
    # Names go on being those of before.
    assert [weight for _, weight in joined(range(2 + hvd.rank()))] == ([1.0, 1.0, 0.0], [1.0] * 3)[hvd.rank()]


@scenario(*TORCHRUN)
def groups_of_ranks_end_apart() -> None:
    """The first rank trains alone, and the others together."""
    groups = [dist.new_group([0]), dist.new_group([*range(1, hvd.size())])]
    batches = 3 + hvd.rank()
    steps = [weight for _, weight in joined(range(batches), groups[min(hvd.rank(), 1)])]
    assert steps == [1.0] * batches + [0.0] * ((3 if hvd.rank() == 0 else 2 + hvd.size()) - batches)
