"""The examples run as their users run them, and say what they promise to say."""

from __future__ import annotations

import json
from argparse import ArgumentTypeError
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import horovod_sparse.torch as hvd
from horovod_sparse.compressors import COMPRESSORS
from tests.harness.launch import Launch
from tests.harness.process import ROOT, python

EXAMPLES = ROOT / "examples"
TWO_WORKERS = Launch("mpirun", 2)
LIMIT = 120.0
"""Seconds; an idle machine needs about a tenth."""
EPOCH_FIELDS = {"event", "epoch", "step", "loss", "bytes_per_step", "step_seconds", "seconds", "ratio"}

TINY = ["--epochs", "2", "--epoch-steps", "3", "--batch-size", "2", "--context", "16"]
TINY += ["--width", "32", "--layers", "1", "--bytes", "200000"]
TINY_GPT2 = ["--batch-size", "4", "--context", "32", "--ratio", "0.01", "--lr", "0.01", "--local-steps"]


def run(launch: Launch, script: str, log: Path, *options: str) -> list[dict[str, Any]]:
    """The lines of the log of a run that must succeed."""
    ended = launch.run(str(EXAMPLES / script), *options, "--log-file", str(log), limit=LIMIT)
    assert ended.code == 0, ended
    return [json.loads(line) for line in log.read_text().splitlines()]


def test_every_row_of_the_demonstration_is_another_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """The warm-up outlasts its runs, so another ratio would not make another run."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    demo = import_module("demo")
    runs = []
    for run in (*demo.RUNS, *demo.ADAMW):
        ratio = run.options.index("--ratio") if "--ratio" in run.options else len(run.options)
        runs.append((*run.options[:ratio], *run.options[ratio + 2 :]))
    assert len(set(runs)) == len(runs)


def needs(module: str) -> pytest.MarkDecorator:
    """Skip where a framework is not installed; without importing it, since a process loads only one."""
    return pytest.mark.skipif(find_spec(module) is None, reason=f"{module} is not installed")


@pytest.mark.parallel
@pytest.mark.parametrize(
    ("script", "compression", "ratio", "most_bytes"),
    [
        ("torch_digits.py", "sidco", 0.01, 20_000),
        pytest.param("torch_digits.py", "none", 1.0, 700_000, marks=pytest.mark.full),
        pytest.param("tensorflow_digits.py", "sidco", 0.01, 20_000, marks=[needs("tensorflow"), pytest.mark.full]),
        pytest.param("keras_digits.py", "dgc", 0.01, 20_000, marks=[needs("tensorflow"), pytest.mark.full]),
        pytest.param(
            "keras_digits.py --local-updates", "sidco", 0.01, 20_000, marks=[needs("tensorflow"), pytest.mark.full]
        ),
    ],
)
def test_digits_on_two_workers(script: str, compression: str, ratio: float, most_bytes: int, tmp_path: Path) -> None:
    script, *more = script.split()
    options = ["--compression", compression, "--ratio", "0.01", "--warmup", "none", "--epochs", "1", *more]
    settings, epoch, end = run(TWO_WORKERS, script, tmp_path / "log", *options)
    assert (settings["event"], epoch["event"], end["event"]) == ("settings", "epoch", "end")
    assert (settings["compression"], settings["workers"], settings["parameters"]) == (compression, 2, 151_306)
    assert epoch.keys() >= EPOCH_FIELDS
    assert (epoch["epoch"], epoch["step"]) == (1, 44), "718 images per worker, 16 in a step"
    assert 0.0 < epoch["accuracy"] <= 1.0
    assert ratio / 2 <= epoch["ratio"] <= ratio * 1.5
    assert 1_000 < epoch["bytes_per_step"] < most_bytes
    assert len(end["parameter_hash"]) == 64


@pytest.mark.parallel
@pytest.mark.full
@pytest.mark.parametrize(
    ("launch", "script", "options", "parameters"),
    [
        (TWO_WORKERS, "torch_charlm.py", [*TINY, "--heads", "2"], 21_600),
        (Launch("horovodrun", 2), "torch_lstm.py", TINY, 12_672),
    ],
    ids=str,
)
def test_character_models_on_two_workers(
    script: str, options: list[str], parameters: int, launch: Launch, tmp_path: Path
) -> None:
    settings, *epochs, end = run(launch, script, tmp_path / "log", *options)
    assert settings["compression"] == "sidco"
    assert settings["parameters"] == parameters
    assert [epoch["step"] for epoch in epochs] == [3, 6]
    assert all(epoch.keys() == EPOCH_FIELDS | {"bits_per_character"} for epoch in epochs)
    assert all(0.0 < epoch["bits_per_character"] < 9.0 for epoch in epochs)
    assert all(epoch["seconds"] >= epoch["step_seconds"] > 0.0 for epoch in epochs)
    assert end["event"] == "end"


def test_every_compression_can_be_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    common: Any = import_module("common")
    parser, made = common.make_parser("", epochs=1, batch_size=1, lr=0.1, ratio=0.01), {}
    for name in common.COMPRESSIONS:
        options = parser.parse_args(["--compression", name, "--granularity", "layer"])
        made[name] = common.make_compression(options, hvd)
    sparse = {name: compression for name, compression in made.items() if name not in ("none", "fp16")}
    assert len({type(compression) for compression in sparse.values()}) == len(COMPRESSORS)
    assert all(compression.granularity == "layer" and compression.residual for compression in sparse.values())
    default, corrected = parser.parse_args([]), parser.parse_args(["--momentum-correction"])
    assert {common.optimizer_momentum(one, default) for one in made.values()} == {0.9}
    assert common.optimizer_momentum(common.make_compression(corrected, hvd), corrected) == 0.0


OWN = """
from horovod_sparse.compressors import TopK

class Mine(TopK):
    pass

class Other:
    pass
"""


def test_a_class_of_ones_own_can_be_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It is found where the command is typed, and stays one of those whose selections are checked."""
    (tmp_path / "of_ones_own.py").write_text(OWN)
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.chdir(tmp_path)
    common: Any = import_module("common")
    parser = common.make_parser("", epochs=1, batch_size=1, lr=0.1, ratio=0.01)
    made = common.make_compression(parser.parse_args(["--compression", "of_ones_own:Mine", "--ratio", "0.25"]), hvd)
    assert isinstance(made, hvd.TopK.__bases__[0]) and (made.ratio, type(made).__name__) == (0.25, "Mine")
    assert type(made).__module__ == "of_ones_own"
    for text, why in (
        ("of_ones_own:Nothing", "has no attribute 'Nothing'"),
        ("of_ones_own:Other", "no subclass of horovod_sparse.compressors.base.Compressor"),
        ("not_there:Mine", "No module named 'not_there'; run this where the module is"),
        ("topkk", "must be one of none, fp16, .*topk.* or module:Class, got 'topkk'"),
    ):
        with pytest.raises(ArgumentTypeError, match=why):
            common.compression_name(text)


@pytest.mark.full
@pytest.mark.parallel
@pytest.mark.parametrize(
    ("script", "options", "pause", "end", "held_out"),
    [
        # Epochs have 4 steps. `fit` pauses at the end of one, the scripts after it within one.
        pytest.param("keras_images.py", [], 4, 8, "accuracy", marks=needs("tensorflow"), id="keras"),
        pytest.param(
            *("tensorflow_images.py", ["--warmup", "none"], 2, 6, "accuracy"),
            marks=needs("tensorflow"),
            id="tensorflow",
        ),
        # `make integrations` installs what these need.
        pytest.param("torch_resnet.py", ["--loaders", "1"], 2, 6, "accuracy", marks=needs("torchvision"), id="resnet"),
        pytest.param(
            *("torch_resnet.py", ["--compression", "none"], 2, 6, "accuracy"),
            marks=needs("torchvision"),
            id="resnet-dense",
        ),
        # With local updates both ends are between two exchanges.
        *(
            pytest.param("torch_gpt2.py", [*TINY_GPT2, *own], 2, 6, "perplexity", marks=needs("transformers"), id=name)
            for name, own in (
                ("gpt2-local", ["4"]),
                ("gpt2-adamw", ["0", "--optimizer", "adamw"]),
                ("gpt2-sgd", ["0", "--optimizer", "sgd"]),
            )
        ),
    ],
)
def test_a_job_that_is_resumed_ends_with_the_same_parameters(
    script: str, options: list[str], pause: int, end: int, held_out: str, tmp_path: Path
) -> None:
    checkpoints = ["--checkpoint-dir", str(tmp_path / "checkpoints")]

    def job(name: str, steps: int, *more: str) -> list[dict[str, Any]]:
        tiny = ["--synthetic", "--epochs", "2", "--batch-size", "8", *options, "--pause-after", str(steps)]
        return run(TWO_WORKERS, script, tmp_path / name, *tiny, *more)

    whole = job("whole", end)
    first = job("parts", pause, *checkpoints)
    both = job("parts", end, *checkpoints)
    assert both[: len(first)] == first, "the log goes on"
    resumed = [line for line in both[len(first) :] if line["event"] == "epoch"]
    assert [line["step"] for line in first if line["event"] == "epoch"] == [pause]
    assert resumed[-1]["step"] == end
    assert all(line[held_out] >= 0.0 for line in resumed)
    assert both[-1]["parameter_hash"] == whole[-1]["parameter_hash"] != first[-1]["parameter_hash"]
    assert any(f"-{end}-" in file.name for file in (tmp_path / "checkpoints").iterdir())
    settings = both[len(first)]
    assert (settings["ratio"], settings["workers"]) == (0.01, 2)


@pytest.mark.full
@pytest.mark.parallel
def test_logistic_regression_needs_memory(tmp_path: Path) -> None:
    picture = tmp_path / "picture.png"
    script = ["-m", "mpi4py", str(EXAMPLES / "numpy_logistic.py"), "--epochs", "1", "--picture", str(picture)]
    ended = TWO_WORKERS.run(*script, limit=3 * LIMIT)
    assert ended.code == 0, ended
    assert "1797 samples, 65 features, 2 workers, 1797 steps" in ended.output
    lines = [line for line in ended.output.splitlines() if line.startswith("| ")]
    cells = [line.strip("| ").split(" | ") for line in lines][1:]
    above = {name: float(distance) for name, _, distance, _ in cells}
    assert {name: int(sent) for name, sent, _, _ in cells}["top-3, memory"] == 3
    for name in ("top-1, memory", "top-3, memory", "random-3, memory"):
        assert above[name] < 2 * above["dense SGD"]
    assert above["random-1, no memory"] > 2 * above["dense SGD"]
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.full
def test_the_cells_of_the_notebook_show_that_feedback_is_what_trains() -> None:
    notebook = json.loads((EXAMPLES / "tour.ipynb").read_text(encoding="utf-8"))
    cells = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    done = python("-c", "\n".join(cells), MPLBACKEND="Agg", OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr
    dense, sparse, forgetful = losses = [float(line[26:].split()[0]) for line in done.stdout.splitlines()]
    assert sparse < 1.1 * dense and forgetful > 2 * dense, done.stdout
    shown = [
        line for cell in notebook["cells"] for output in cell.get("outputs", ()) for line in output.get("text", ())
    ]
    assert [float(line[26:].split()[0]) for line in shown] == pytest.approx(losses, rel=0.05), "run the notebook again"
