"""Checkpoints of PyTorch in one process: what a file can hold, and what loading undoes."""

from __future__ import annotations

import collections
import datetime
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from horovod_sparse.core.checkpoint import Workers
from horovod_sparse.torch import checkpoint, load_checkpoint, save_checkpoint


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank, without Horovod."""
    monkeypatch.setattr(checkpoint.checkpoints, "workers", lambda: Workers(0, 1, lambda value: [value]))


def training() -> dict[str, Any]:
    """What is saved and loaded, of a training that has done a step."""
    model = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.randn(8, 6)).square().sum().backward()
    optimizer.step()
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4])
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler, "data": torch.Generator()}


def states(objects: dict[str, Any]) -> str:
    """All that loading may change, as text."""
    torch.set_printoptions(precision=17, threshold=10**6)
    kept = {name: one.get_state() if name == "data" else one.state_dict() for name, one in objects.items()}
    return repr([kept, torch.get_rng_state(), random.getstate(), np.random.get_state()])


def test_numbers_of_numpys_come_back_as_pythons(tmp_path: Path) -> None:
    objects = training()
    rate = 0.05 * (1 + np.cos(0.3))
    objects["optimizer"].param_groups[0]["lr"] = rate
    objects["scheduler"].milestones = collections.Counter(np.array([3, 7]))
    step: Any = np.int64(5)
    values: Any = {"mean": np.float64(0.1), "count": np.int64(3), "is_good": np.bool_(True), "name": np.str_("a")}
    save_checkpoint(tmp_path, step, **objects, **values, nested={"losses": [np.float32(0.1), (np.uint8(3),)]})
    loaded = training()
    found = load_checkpoint(tmp_path, **loaded)
    expected = {"mean": 0.1, "count": 3, "is_good": True, "name": "a"}
    assert found == (5, {**expected, "nested": {"losses": [float(np.float32(0.1)), (3,)]}})
    assert all(type(found[1][name]) is type(value) for name, value in expected.items())
    assert loaded["optimizer"].param_groups[0]["lr"] == rate
    assert loaded["scheduler"].milestones == collections.Counter([3, 7])
    assert objects["optimizer"].param_groups[0]["lr"] is rate, "what was saved is as it was"
    saved = torch.load(tmp_path / "step-000000005" / "shared", weights_only=True)["model"]
    assert saved._metadata == objects["model"].state_dict()._metadata, "modules know the version of their state by it"


KINDS: dict[str, Any] = {
    "counter": collections.Counter("aab"),
    "ordered": collections.OrderedDict(b=1, a=2),
    "set": {1, 2},
    "complex": 1 + 2j,
    "bytes": b"1",
    "type": torch.bfloat16,
    "device": torch.device("cpu"),
    "size": torch.Size([2, 3]),
    "nothing": None,
    "nested": {"a": [1, (2.5, "b"), {}], 3: True},
}


@pytest.mark.parametrize("value", KINDS.values(), ids=KINDS)
def test_what_torch_reads_without_code_comes_back(tmp_path: Path, value: object) -> None:
    save_checkpoint(tmp_path, 1, value=value)
    (got,) = load_checkpoint(tmp_path).values.values()
    assert got == value and type(got) is type(value)


REFUSED: dict[str, Any] = {
    "PosixPath": Path("a"),
    "datetime": datetime.datetime(2020, 1, 1),
    "defaultdict": collections.defaultdict(list),
    "ndarray": np.ones(3),
    "frozenset": frozenset([1]),
    "range": range(3),
    "builtin_function_or_method": len,
}


@pytest.mark.parametrize(("kind", "value"), REFUSED.items(), ids=REFUSED)
def test_what_could_not_be_read_again_is_not_saved(tmp_path: Path, kind: str, value: object) -> None:
    objects = training()
    save_checkpoint(tmp_path, 1, **objects)
    objects["optimizer"].param_groups[0]["kind"] = value
    text = r"^optimizer\['param_groups'\]\[0\]\['kind'\] must be what torch.load\(weights_only=True\) reads, got "
    with pytest.raises(ValueError, match=text + f"{kind}; convert it"):
        save_checkpoint(tmp_path, 2, keep=1, **objects)
    with pytest.raises(ValueError, match=r"own\['extra'\]\[1\] must be what"):
        save_checkpoint(tmp_path, 2, keep=1, extra=[1, value])
    assert load_checkpoint(tmp_path, **training()).step == 1


class Stubborn:
    """Has a state and does not take it back."""

    def __init__(self) -> None:
        self.state: dict[str, Any] = {"a": 1}

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["a"] != 2:
            raise KeyError("a")


def _wider(objects: dict[str, Any]) -> None:
    objects["model"] = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(7))


def _other_groups(objects: dict[str, Any]) -> None:
    objects["optimizer"].add_param_group({"params": [torch.zeros(1, requires_grad=True)]})


def _stubborn(objects: dict[str, Any]) -> None:
    objects["last"] = Stubborn()
    objects["last"].state = {"a": 2}


def _unknown(objects: dict[str, Any]) -> None:
    objects["other"] = Stubborn()


@pytest.mark.parametrize("change", [_wider, _other_groups, _stubborn, _unknown])
def test_a_checkpoint_that_does_not_fit_changes_nothing(tmp_path: Path, change: Any) -> None:
    torch.manual_seed(0)
    save_checkpoint(tmp_path, 5, **training(), last=Stubborn())
    objects = training()
    change(objects)
    torch.manual_seed(3)
    # The rest would fit.
    objects = dict(sorted(objects.items(), reverse=change is _stubborn))
    before = states(objects)
    with pytest.raises(RuntimeError, match="the checkpoint of step 5 does not fit"):
        load_checkpoint(tmp_path, **objects)
    assert states(objects) == before
