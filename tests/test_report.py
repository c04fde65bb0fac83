"""The command `horovod-sparse report`, on logs of real runs with NumPy."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from stairs import Halving
from test_stats_log import reduction, train

from horovod_sparse.core.stats_log import NUMBERS
from horovod_sparse.numpy import SparseAllreduce, StatsLog, TopK
from horovod_sparse.tools import cli
from horovod_sparse.tools.report import log as logs
from horovod_sparse.tools.report import picture, table


def write_log(path: Path, compression: Any = None, steps: int = 12, **arguments: Any) -> Path:
    reduce = reduction() if compression is None else SparseAllreduce(None, compression)
    train(reduce, StatsLog(reduce, path, every=2, **arguments), steps)
    return path


def report(capsys: pytest.CaptureFixture[str], *arguments: object) -> list[list[str]]:
    """The cells of the table that the command prints."""
    assert cli.main(["report", *map(str, arguments)]) == 0
    return [re.split(r"  +", line.strip()) for line in capsys.readouterr().out.splitlines()]


def test_the_table_says_what_was_sent(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_log(tmp_path / "stats.jsonl", TopK(0.1, warmup=None))
    titles, row = report(capsys, path)
    assert tuple(titles) == table.TITLES
    assert row[:4] == [str(path), "TopK 0.1", "12", "0.10000"]
    assert float(row[5]) > 0.0


@pytest.fixture
def made(tmp_path: Path) -> Callable[..., Path]:
    """Writes a log of given numbers. A tuple is a step; a number alone begins a run after that step."""

    def make(*lines: Any, name: str = "made.jsonl", compressor: str = "SIDCo(a=1, ratio=0.1, z=2)") -> Path:
        written = []
        for line in lines:
            if isinstance(line, int):
                written.append({"format": 1, "package": "0", "compressor": compressor, "step": line})
            else:
                step, seconds, count, sent, dense = line
                numbers = dict.fromkeys(("target", "stages", "truncated", "residual_norm"), 1.0)
                numbers |= {"seconds": seconds, "numel": 1e3, "count": count, "ratio": count / 1e3, "threshold": None}
                written.append({"step": step, **numbers, "bytes_sent": sent, "dense_bytes_sent": dense, "exchange": ""})
        path = tmp_path / name
        path.write_text("".join(json.dumps(line) + "\n" for line in written))
        return path

    return make


def test_a_line_stands_for_the_steps_since_the_line_before(made: Callable[..., Path]) -> None:
    log = logs.read(made(4, (5, None, 100.0, 800.0, 40.0), (10, 0.25, 300.0, 2400.0, 40.0), (11, 0.75, 0.0, 0.0, 40.0)))
    assert log.weights == [1, 5, 1]
    assert log.ratio == pytest.approx((100 + 5 * 300) / 7000)
    assert log.bytes_sent == 800 + 5 * 2400 + 7 * 40
    assert log.seconds == 0.5
    assert log.steps == 11
    unknown = logs.read(made(0, (1, None, 1.0, 1.0, 1.0)))
    assert math.isnan(unknown.seconds) and table.rows([unknown])[0][-1] == "unknown"


def test_steps_that_are_made_again_replace_those_of_before(made: Callable[..., Path]) -> None:
    steps = [(step, 0.1, 100.0, 8.0, 0.0) for step in (10, 20, 30)]
    log = logs.read(made(0, *steps, 20, (30, 0.1, 500.0, 0.0, 0.0), 5, (15, 0.1, 700.0, 0.0, 0.0)))
    assert log.column("step") == [15.0] and log.weights == [10]
    log = logs.read(made(0, *steps, 20, (25, 0.1, 500.0, 0.0, 0.0)))
    assert log.column("count") == [100.0, 100.0, 500.0] and log.weights == [10, 10, 5]


@pytest.mark.parametrize(
    ("compressor", "short"),
    [
        (TopK(0.25), "TopK 0.25"),
        (SparseAllreduce(None, TopK(0.25)), "TopK 0.25"),
        (TopK(Halving(0.25, 0.01, 20)), "TopK Halving(highest=0.25, final=0.01, every=20)"),
        ("Own(sample_ratio=0.1)", "Own"),
    ],
    ids=str,
)
def test_a_compressor_is_told_by_name_and_ratio(compressor: Any, short: str) -> None:
    assert table.short(compressor if isinstance(compressor, str) else repr(compressor)) == short


def test_every_log_has_a_line_in_every_panel(made: Callable[..., Path]) -> None:
    pytest.importorskip("matplotlib")
    steps = [(step, 0.002 * step, 100.0 / step, 800.0, 40.0) for step in (1, 10, 100)]
    drawn = picture.figure([logs.read(made(0, *steps, name=f"{name}.jsonl")) for name in "ab"])
    curves = [[line.get_ydata().tolist() for line in ax.get_lines()] for ax in drawn.axes]
    assert [len(lines) for lines in curves] == [4, 2, 2, 2, 2]
    assert curves[0][2] == [0.001] * 3, "the target's ratio"
    assert all(math.isnan(value) for value in curves[1][0])
    assert curves[2] == [[840.0] * 3] * 2
    assert curves[4][0] == pytest.approx([2.0, 20.0, 200.0])
    assert [ax.get_yscale() for ax in drawn.axes] == ["log", "linear", "linear", "linear", "log"]
    (legend,) = drawn.legends
    assert [Path(text.get_text()).name for text in legend.get_texts()] == ["a.jsonl", "b.jsonl"]


def test_the_picture_is_a_png(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "report.png"
    report(capsys, write_log(tmp_path / "stats.jsonl"), "--picture", path)
    content = path.read_bytes()
    assert content.startswith(b"\x89PNG\r\n\x1a\n") and len(content) > 20_000
    assert (int.from_bytes(content[16:20], "big"), int.from_bytes(content[20:24], "big")) == (600, 1200)


def test_an_incomplete_last_line_is_left_out_and_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_log(tmp_path / "stats.jsonl")
    content = path.read_bytes()
    path.write_bytes(content[:-30])
    assert cli.main(["report", str(path)]) == 0
    out, err = capsys.readouterr()
    assert re.search(r"  10  ", out)
    assert err == f"{path}: the last line is incomplete, as a killed run leaves it, and is left out\n"
    assert path.read_bytes() == content[:-30]


ODD = "e\x1b[31m]0;title\x07\u202e\ud800 \u00e9"


def test_nothing_that_a_log_holds_reaches_the_terminal_but_text(
    tmp_path: Path, made: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    path = made(0, (1, 0.1, 100.0, 8.0, 0.0), name="\x1b[2J.jsonl", compressor=f"{ODD}(ratio=\x1b[0m)")
    assert cli.main(["report", str(path)]) == 0
    printed, wanted = capsys.readouterr().out, "e\ufffd[31m]0;title\ufffd\ufffd\ufffd \u00e9 \ufffd[0m"
    assert wanted in printed and "\ufffd[2J.jsonl" in printed
    assert all(character.isprintable() or character == "\n" for character in printed)

    for content in ("\x1b[2J\n", '{"format": "\x1b[2J", "step": 0}\n', '{"format": 1, "compressor": "", "step": 0}\n'):
        path.write_text(content)
        with pytest.raises(SystemExit) as ended:
            cli.main(["report", str(path)])
        assert str(ended.value).isprintable()


def line_of(step: str, numbers: dict[str, str]) -> str:
    found = {"step": step, **dict.fromkeys(NUMBERS, "1.0"), **numbers}
    return "{" + ", ".join(f'"{name}": {value}' for name, value in found.items()) + "}\n"


FIRST = '{"format": 1, "compressor": "TopK()", "step": 0}\n'


@pytest.mark.parametrize(
    "number", ["NaN", "Infinity", "-Infinity", "1e400", "1e201", "-1" + "0" * 400, "1" + "0" * 5000, '"1"', "[]"]
)
def test_a_number_that_a_float_does_not_hold_is_refused(number: str, tmp_path: Path) -> None:
    path = tmp_path / "stats.jsonl"
    for name in ("step", *NUMBERS):
        path.write_text(FIRST + line_of("1", {name: number}))
        with pytest.raises(SystemExit, match="is no log of StatsLog: line 2 must be one of a StatsLog"):
            cli.main(["report", str(path)])


@pytest.mark.parametrize("number", ["1e200", "-1e200", "1" + "0" * 199, "5e-324", "0", "null", "true"])
def test_every_other_number_is_shown(number: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "stats.jsonl"
    steps = [("1", "1e200"), ("2", "5e-324"), (str(2**53 - 1), number), (str(2**53), "-1e200")]
    path.write_text(FIRST + "".join(line_of(step, dict.fromkeys(NUMBERS, value)) for step, value in steps))
    assert report(capsys, path, "--picture", tmp_path / "report.png")[1][2] == f"{2**53:,}"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"[" * 100_000 + b"\n", "is no log of StatsLog: line 1 must be one of a StatsLog, got '[[["),
        (b"", "is no log of StatsLog: line 1 must be one of a StatsLog, got ''"),
        (b"\x89PNG\r\n\x1a\n\x00", "is no log of StatsLog: line 1 must be one of a StatsLog, got '\ufffdPNG'"),
        (b'{"format": 1, "compressor": "", "step": 0}\n', "has no steps yet: StatsLog writes after every 10th step"),
        (b'{"format": 1, "compressor": "", "step": 0}\n{"step"', "has no steps yet"),
        (b'{"format": 1, "compressor": "", "step": 0}\n{"step"\n', "is no log of StatsLog: line 2 must be one"),
        (None, "cannot be read: No such file or directory"),
    ],
)
def test_what_is_no_log_is_refused(content: bytes | None, message: str, tmp_path: Path) -> None:
    path, written = tmp_path / "stats.jsonl", tmp_path / "report.png"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(SystemExit, match=re.escape(f"{path} {message}")):
        cli.main(["report", str(path), "--picture", str(written)])
    assert not written.exists()


def test_without_matplotlib_only_the_table_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_log(tmp_path / "stats.jsonl")
    monkeypatch.setattr("horovod_sparse.tools.report.find_spec", lambda name: None)
    with pytest.raises(SystemExit, match="--picture needs matplotlib, which is not installed: pip install m"):
        cli.main(["report", str(path), "--picture", str(tmp_path / "a")])
    assert capsys.readouterr().out == "" and [*tmp_path.iterdir()] == [path]
    report(capsys, path)
