"""Local updates of NumPy arrays on one worker; several workers, and PyTorch: parallel/local_laws.py."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from horovod_sparse.numpy import LocalUpdates, SIDCo, SparseAllreduce


def begin() -> tuple[dict[str, np.ndarray], SparseAllreduce, LocalUpdates]:
    parameters = {"weight": np.zeros((30, 40), np.float32), "bias": np.zeros(7, np.float32)}
    reduce = SparseAllreduce(None, SIDCo(0.05))
    return parameters, reduce, LocalUpdates(reduce, parameters, every=100, outer_momentum=0.5)


def move(parameters: dict[str, np.ndarray], step: int) -> None:
    for name, parameter in parameters.items():
        parameter += np.random.default_rng((step, len(name))).standard_normal(parameter.shape).astype(np.float32)


@pytest.mark.parametrize("place", ["start_step", "arrive", "begin", "advance", "finish_dense", "end_step"])
def test_an_exchange_that_is_interrupted_leaves_no_trace(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*arguments: Any, **named: Any) -> None:
        raise KeyboardInterrupt

    parameters, reduce, local = begin()
    calm, _, undisturbed = begin()
    for step in range(6):
        move(parameters, step)
        move(calm, step)
        if step == 3:
            with monkeypatch.context() as patch:
                patch.setattr(reduce.pipeline, place, interrupt)
                with pytest.raises(KeyboardInterrupt):
                    local.synchronize()
        local.synchronize()
        undisturbed.synchronize()
    for name, parameter in parameters.items():
        np.testing.assert_array_equal(parameter, calm[name])
    assert str(local.state_dict()) == str(undisturbed.state_dict())
