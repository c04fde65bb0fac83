"""The command `horovod-sparse plan`: quantities with units, what it prints."""

from __future__ import annotations

import re
from argparse import ArgumentTypeError
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

import horovod_sparse.numpy
from horovod_sparse.compressors import MiCRO, SIDCo
from horovod_sparse.compressors.base import BUCKET_BYTES, Compressor
from horovod_sparse.core.plan import first_sparse_step, rounds_of
from horovod_sparse.exchange.pairs import Pairs
from horovod_sparse.exchange.shared import Dense
from horovod_sparse.tools import cli
from horovod_sparse.tools.plan import (
    BETWEEN,
    DENSE16,
    DENSE32,
    METHODS,
    PAIRS,
    Job,
    Method,
    Network,
    Round,
    warm_up,
)
from horovod_sparse.tools.quantities import parse_bandwidth, parse_count, parse_latency
from tests.harness.process import ROOT
from tests.harness.table import ORACLE
from tests.harness.workers import collective, make_workers

PLAN = ["plan", "--parameters", "25.6M", "--workers", "64", "--bandwidth", "10gbit", "--step-ms", "110"]
Parse = Callable[[str, str], float]


@pytest.mark.parametrize(
    ("parse", "text", "number"),
    [
        (parse_count, "25.6M", 25_600_000),
        (parse_count, "1.5B", 1_500_000_000),
        (parse_count, "350k", 350_000),
        (parse_count, " 2.0 ", 2),
        # Floats would make 1001 of this.
        (parse_count, "1.001k", 1001),
        (parse_bandwidth, "100mbit", 12.5e6),
        (parse_bandwidth, "1gbit", 125e6),
        (parse_bandwidth, "400gbit", 50e9),
        (parse_bandwidth, "800bit", 100.0),
        (parse_bandwidth, "1.2GB", 1.2e9),
        (parse_bandwidth, "125 MB", 125e6),
        (parse_latency, "50us", 50e-6),
        (parse_latency, "50 µs", 50e-6),
        (parse_latency, "0.1ms", 1e-4),
        (parse_latency, "0us", 0.0),
    ],
)
def test_quantities_are_read(parse: Parse, text: str, number: float) -> None:
    assert parse("what", text) == number


@pytest.mark.parametrize(
    ("parse", "example", "texts"),
    [
        (parse_count, "25.6M", ["", "M", "0", "0.5", "-3", "1.2345k", "25.6m", "1e6", "1,000", "many", "1..5", "nan"]),
        (parse_bandwidth, "10gbit", ["", "0gbit", "10", "10gbps", "10gb", "10Gb", "-1gbit", "gbit", "1e9bit", "infGB"]),
        (parse_latency, "50us", ["", "50", "50ns", "-1ms", "ms", "1 m s", "1min", "nans"]),
    ],
)
def test_what_is_no_quantity_is_refused(parse: Parse, example: str, texts: list[str]) -> None:
    for text in texts:
        with pytest.raises(ArgumentTypeError, match=r"^what must be ") as raised:
            parse("what", text)
        assert f"such as {example}" in str(raised.value) or f"or {example}" in str(raised.value)
        assert str(raised.value).endswith(f"got {text!r}")


def test_the_page_shows_what_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    page = (ROOT / "docs" / "decide.md").read_text(encoding="utf-8")
    (command,) = re.findall(r"^horovod-sparse (plan --parameters .*)$", page, re.MULTILINE)
    assert cli.main(command.split()) == 0
    table, _, explained = capsys.readouterr().out.partition("\n\nThe table is for")
    assert explained and f"```\n{table}\n```\n" in page


@pytest.mark.parametrize(
    ("options", "advice"),
    [
        # Here random blocks are exchanged faster than anything else.
        (["--latency", "0us", "--ratio", "0.001"], "union, MiCRO(0.001)"),
        (["--workers", "8", "--ratio", "0.001"], 'packed pairs, SIDCo(0.001, exchange=Pairs("packed"))'),
        (
            ["--bandwidth", "100000gbit", "--latency", "1s"],
            "dense float16, hvd.Compression.fp16, DDP's bf16_compress_hook",
        ),
        (["--workers", "2", "--ratio", "1"], "PowerSGD rank 4, DDP's powerSGD_hook"),
    ],
)
def test_advice_is_the_fastest_that_trains(options: list[str], advice: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*PLAN, *options]) == 0
    assert f"Fastest exchange of those that train: {advice}" in capsys.readouterr().out.splitlines()


NODES = Job(parameters=4_000_000, ratio=0.01, workers=32, per_node=8, computing=0.1, optimizer="sgd")
NETWORK = Network(latency=1e-4, bandwidth=1e9, wait=1e-3)


@pytest.mark.parametrize(
    ("method", "sent", "messages"),
    [
        # A ring of 32 workers crosses each card once: what a worker sends, whatever the number of workers on a node.
        (DENSE32, 2 * 31 / 32 * 16e6, 2 * 31),
        (PAIRS, 31 * 8 * 50_000, 31),
        # 8 rings of 4 nodes share a card. Each has an eighth of the parameters. The room is 1.25 times the ratio.
        (BETWEEN, 8 * 3 * 8 * 6_250, 3),
    ],
    ids=lambda value: getattr(value, "title", None),
)
def test_nodes_worked_by_hand(method: Method, sent: float, messages: int) -> None:
    assert NODES.cost(method, NETWORK) == pytest.approx((sent, 1e-3 + 1e-4 * messages + sent / 1e9))


def test_adamw_is_local_updates_which_meet_before_each_exchange(capsys: pytest.CaptureFixture[str]) -> None:
    adamw = NODES._replace(optimizer="adamw")
    assert adamw.cost(DENSE16, NETWORK) == NODES.cost(DENSE16, NETWORK)
    for method, meeting in ((PAIRS, 31 * 8 * 260), (BETWEEN, 8 * 3 * 8 * 260)):
        assert adamw.cost(method, NETWORK)[0] - NODES.cost(method, NETWORK)[0] == meeting
    assert cli.main([*PLAN, "--optimizer", "adamw", "--per-node", "8"]) == 0
    lines = capsys.readouterr().out.splitlines()
    written = {line[:21].strip(): line.partition(re.findall(r" \d\.\d\d  ", line)[-1])[2] for line in lines[4:12]}
    assert written["dense float16"] == "hvd.Compression.fp16, DDP's bf16_compress_hook"
    assert written["pairs"] == "LocalUpdates(adamw, model, SIDCo(0.01))"
    assert written["pairs between nodes"].startswith("FSDP2: LocalUpdates(adamw, model, SIDCo(0.01), group=")


def test_nodes_have_a_row_and_must_be_whole(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*PLAN, "--per-node", "8"]) == 0
    report = capsys.readouterr().out
    assert "64 workers, 8 on each node" in report and report.endswith("\nLinks within a node are taken to be free.\n")
    assert "\npairs between nodes" in report and "DDP: register(model, SIDCo(0.01), mesh=mesh)" in report
    assert "up to ratio 0.00781, between nodes up to 0.0703." in report
    for per_node in ("7", "64"):
        with pytest.raises(
            SystemExit, match=rf"at least 2 nodes with {per_node} on each, got 64; give those of all nodes"
        ):
            cli.main([*PLAN, "--per-node", per_node])


@pytest.mark.parametrize("world", [2, 5])
@pytest.mark.parametrize("method", METHODS[3:], ids=lambda method: method.title)
def test_the_library_sends_what_the_model_says(method: Method, world: int) -> None:
    """A step of the compressor that the table names: the same collectives, in the same rounds, with messages as long."""
    compressor = eval(method.argument.format(ratio="0.01, warmup=None"), vars(horovod_sparse.numpy))
    workers = make_workers(ORACLE, compressor, {"p": (100_000,)}, world)
    for worker in workers:
        worker.arrive("p", np.random.default_rng(0).laplace(size=100_000).astype(np.float32))
    following: list[Any] = [worker.sending(worker.buckets[0]).begin() for worker in workers]
    sent = []
    while following[0] is not None:
        message = following[0].message
        sent.append([Round(following[0].kind, message.size, str(message.dtype))])
        answers = collective(ORACLE, following)
        following = [worker.advance(worker.buckets[0], answer) for worker, answer in zip(workers, answers, strict=True)]
    assert sent == [list(together) for together in method.rounds(100_000, 0.01, world)]
    bytes_sent = workers[0].buckets[0].stage.bytes_sent
    assert bytes_sent == pytest.approx(method.bytes_sent(100_000, 0.01, world))


@pytest.mark.parametrize("make", [SIDCo, MiCRO, partial(SIDCo, exchange=Pairs("packed")), partial(SIDCo, warmup=3.7)])
@pytest.mark.parametrize(("ratio", "world"), [(0.05, 2), (0.004, 5), (0.0007, 64), (0.0007, 1000), (0.3, 4), (1.0, 4)])
def test_the_warm_up_is_the_sum_over_its_steps(make: Callable[[float], Compressor], ratio: float, world: int) -> None:
    compressor, parameters = make(ratio), 8_000_001
    most = BUCKET_BYTES // 4
    buckets = [most, parameters - most]
    step = dense_steps = 0
    sent, first = 0.0, first_sparse_step(compressor, world)
    while (now := compressor.schedule.ratio(step)) > ratio:
        is_dense = step < first
        for numel in buckets:
            rounds = Dense().rounds(numel, 0, 0, world) if is_dense else rounds_of(compressor, numel, now, world)
            sent += sum(one.bytes_sent(world) for one in rounds)
        dense_steps += is_dense
        step += 1
    assert compressor.schedule.ratio(step + 10) == ratio
    found = warm_up(compressor, parameters, world)
    assert found[:2] == (step, dense_steps) and found[2] == pytest.approx(sent)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--bandwidth", "10gbps"], "argument --bandwidth: bandwidth must be bits per second"),
        (["--workers", "9" * 400], "argument --workers: workers must be a whole number >= 2, with k, M or B behind it"),
        (["--workers", "1"], "argument --workers: workers must be a whole number >= 2, with k, M or B behind it"),
        (["--step-ms", "-1"], "argument --step-ms: step-ms must be a number > 0 and <= 1e+09, such as 110, got '-1'"),
        (["--ratio", "1.1"], "argument --ratio: ratio must be a number > 0 and <= 1, such as 0.001, got '1.1'"),
    ],
)
def test_wrong_options_are_refused(options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main([*PLAN, *options])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err
