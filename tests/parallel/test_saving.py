"""The scripts of docs/running.md, with a short warm-up.

What they have saved goes on bit for bit, and on other numbers of workers nothing is lost.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from tests.harness.launch import Launch
from tests.harness.process import ROOT

sys.path.insert(0, str(ROOT / "docs"))

import pages

pytestmark = pytest.mark.parallel

LIMIT = 120.0
"""Seconds; an idle machine needs about a tenth."""
FEW, ALL = 9, 12
"""Numbers of steps, or of epochs. All scripts save in every third step or epoch."""
_RATIO = "SIDCo(ratio=0.01)"
_SOON_SPARSE = "SIDCo(ratio=0.01, warmup=1.0)"
"""Everything is sent in the first steps of a warm-up: here by two workers in two steps, by four in five."""

_LOOP = "\nfor step in range(begin, steps):"
_ENDING = "\ndel model, optimizer"
_PROBE = """
import numpy as _np
_state = {state}
_arrays = {{f"parameters/{{i}}": _np.asarray(one) for i, one in enumerate({parameters})}}
_arrays |= {{f"own/{{i}}": _np.asarray(one) for i, one in enumerate({own})}}
for _part in ("residuals", "velocities"):
    _arrays |= {{f"{{_part}}/{{name}}": _np.asarray(one) for name, one in _state[_part].items()}}
_np.savez(f"{{sys.argv[3]}}-{moment}-{{{rank}}}.npz", **_arrays)
"""
_TORCH = {
    "parameters": "[one.detach() for one in model.parameters()]",
    "own": "()",
    "state": "compression.state_dict()",
    "rank": "rank",
}
_KERAS = {"parameters": "model.trainable_variables", "own": "adamw.variables", "rank": "hvd.rank()"}
_PROBES = {
    "torch.save": _TORCH,
    "dcp.save": {**_TORCH, "parameters": "[one.detach().to_local() for one in model.parameters()]"},
    "LocalUpdates": {**_KERAS, "state": 'local.state_dict()["compression"]'},
    "np.savez": {
        "parameters": "weights.values()",
        "own": "()",
        "state": "reduce.state_dict()",
        "rank": "comm.Get_rank()",
    },
}
"""Of each script, by what it shows, in the order of the page: which of its names hold what is compared."""
_PAGE = ROOT / "docs" / "running.md"
SCRIPTS = dict(zip(_PROBES, (block for block in pages.blocks(_PAGE, "python") if block.launched), strict=True))
_DISTRIBUTED = {
    "adamw = keras.optimizers.AdamW(0.001)\n": f"local = hvd.{_RATIO}\nadamw = hvd.DistributedOptimizer("
    "keras.optimizers.SGD(0.01, momentum=0.9), compression=local)\n",
    f"local = hvd.LocalUpdates(hvd.{_RATIO})\n": "",
    "callbacks=[local, Save()]": "callbacks=[Save()]",
}
"""What the page says of the script with LocalUpdates: the compression takes the place of `local`, but is no callback."""
OTHER = "DistributedOptimizer"
_PROBES[OTHER] = {**_KERAS, "state": "local.state_dict()"}


def _other(script: pages.Block) -> pages.Block:
    text = script.text
    for line, instead in _DISTRIBUTED.items():
        assert text.count(line) == 1
        text = text.replace(line, instead)
    return script._replace(text=text)


SCRIPTS[OTHER] = _other(SCRIPTS["LocalUpdates"])

Arrays = dict[str, np.ndarray]


def run(
    what: str, folder: Path, steps: int, ranks: int | None = None, *, moments: Sequence[str] = ("end",)
) -> list[list[Arrays]]:
    """Run a script with a short warm-up, and return what each rank has in the end: parameters, residuals and velocities.

    The moments are "begin", when it has loaded what was saved, and "end".
    """
    script = SCRIPTS[what]
    assert what in script.text and script.launched is not None
    launcher, workers = script.launched
    ranks = ranks or workers
    assert script.text.count(_RATIO) == 1
    text = script.text.replace(_RATIO, _SOON_SPARSE)
    probes = {moment: _PROBE.format(**_PROBES[what], moment=moment) for moment in moments}
    if "begin" in probes:
        assert text.count(_LOOP) == 1
        text = text.replace(_LOOP, probes["begin"] + _LOOP)
    # What is compared is written after the script, or before it cleans up.
    text, ending, after = text.partition(_ENDING)
    file = folder.with_suffix(".py")
    file.write_text(text + probes["end"] + ending + after, encoding="utf-8")
    ended = Launch(launcher, ranks).run(
        str(file), str(folder), str(steps), str(folder), limit=LIMIT, environment={"HOROVOD_SPARSE_FORCE": "1"}
    )
    assert ended.code == 0, str(ended)
    return [[_arrays_in(f"{folder}-{moment}-{rank}.npz") for rank in range(ranks)] for moment in moments]


def _arrays_in(path: str) -> Arrays:
    with np.load(path) as arrays:
        return dict(arrays)


def needs(what: str) -> list[pytest.MarkDecorator]:
    """Only the first script is for `make test`; Keras' is skipped without TensorFlow."""
    module = "tensorflow" if what in ("LocalUpdates", OTHER) else "numpy"
    missing = pytest.mark.skipif(find_spec(module) is None, reason=f"{module} is not installed")
    return [missing, *([] if what == "torch.save" else [pytest.mark.full])]


@pytest.mark.parametrize("what", [pytest.param(what, marks=needs(what)) for what in _PROBES])
def test_what_a_script_has_saved_goes_on_bit_for_bit(what: str, tmp_path: Path) -> None:
    (whole,) = run(what, tmp_path / "whole", ALL)
    (few,) = run(what, tmp_path / "parts", FEW)
    (resumed,) = run(what, tmp_path / "parts", ALL)
    residuals = [name for name in whole[0] if name.startswith("residuals/")]
    # Where everything is sent, nothing is left.
    assert all(any(one[name].any() for name in residuals) for one in (*few, *whole))
    for before, expected, got in zip(few, whole, resumed, strict=True):
        np.testing.assert_equal(got, expected)
        assert any((before[name] != one).any() for name, one in got.items()), "the second run has not trained"
    # Where a model is sharded, the second half of the ranks has the other replica.
    first, second = whole[0], whole[len(whole) // 2]
    own = [(first[name] != second[name]).any() == first[name].any() for name in residuals]
    assert all(own), "residuals are each worker's own, where anything waits"
    assert all((first[name] == second[name]).all() for name in first if name.startswith("parameters/"))


@pytest.mark.full
def test_another_number_of_workers_loses_nothing(tmp_path: Path) -> None:
    """From 2 to 4, to 2, to 1: each of the new workers has the mean of what the old ones had."""
    folder, steps = tmp_path / "saved", FEW
    (before,) = run("torch.save", folder, steps)
    assert all(any(array.any() for name, array in one.items() if name.startswith("residuals/")) for one in before)
    for ranks in (4, 2, 1):
        steps += 3
        after, trained = run("torch.save", folder, steps, ranks, moments=("begin", "end"))
        for name, got in after[0].items():
            of_all = [one[name] for one in before]
            mean = np.mean(of_all, axis=0, dtype=np.float64).astype(np.float32)
            expected = mean if name.startswith("residuals/") else of_all[0]
            for other in after:
                np.testing.assert_array_equal(other[name], got)
            np.testing.assert_allclose(got, expected, rtol=1e-6, atol=1e-7 * np.abs(expected).max())
        before = trained
        assert any((one != before[0][name]).any() for name, one in after[0].items()), "it has not trained"
