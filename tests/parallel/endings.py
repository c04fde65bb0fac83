"""What a rank does in launches that must end by themselves, with an error that says why.

python -m parallel.endings CASE
"""

from __future__ import annotations

import sys

import horovod.torch as hvd

from horovod_sparse.torch import SIDCo, TopK

from .common import loss_of, small_model, train, wrap


def not_finite() -> None:
    model = small_model()
    optimizer = wrap(model, SIDCo(0.01, warmup=None))
    train(model, optimizer, range(2))
    optimizer.zero_grad()
    loss = loss_of(model, 2)
    if hvd.rank() == 1:
        model[4].weight.register_hook(lambda gradient: gradient * float("nan"))
    loss.backward()
    optimizer.step()


def other_ratio() -> None:
    model = small_model()
    train(model, wrap(model, TopK(0.01 if hvd.rank() == 0 else 0.02, warmup=None)), range(2))


def stock_join() -> None:
    """Rank 1 has data for two steps, and calls Horovod's own function."""
    model = small_model()
    optimizer = wrap(model, TopK(0.01, warmup=None))
    train(model, optimizer, range(2 if hvd.rank() == 1 else 100_000))
    hvd.join()


CASES = {case.__name__: case for case in (not_finite, other_ratio, stock_join)}

if __name__ == "__main__":
    hvd.init()
    CASES[sys.argv[1]]()
    print("trained to the end")
