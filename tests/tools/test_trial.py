"""The command `horovod-sparse try`: what it advises, and real runs under each launcher."""

from __future__ import annotations

import pytest

from horovod_sparse.tools import trial
from horovod_sparse.tools.trial import Result
from tests.harness.launch import Launch

SMALL = ["-m", "horovod_sparse.tools.cli", "try", "--parameters", "100k", "--step-ms", "5", "--rounds", "2"]


TITLES = {
    "fp32": "dense fp32",
    "fp16": "dense fp16",
    "power": "PowerSGD rank 4",
    "some": "SIDCo 0.01",
    "few": "SIDCo 0.001",
}
NO_OTHER = "no other exchange makes a step more than 5 % faster."


@pytest.mark.parametrize(
    ("medians", "advice"),
    [
        ({"fp32": 300, "fp16": 200, "some": 120, "few": 110}, "few: a step takes 0.55 times as long as with fp16."),
        # Within 5 % the one that sends more is chosen.
        ({"fp32": 300, "fp16": 200, "some": 122, "few": 120}, "some: a step takes 0.61 times as long as with fp16."),
        (
            {"fp32": 300, "fp16": 210, "power": 200, "some": 150, "few": 150},
            "some: a step takes 0.75 times as long as with power.",
        ),
        ({"fp32": 300, "fp16": 200, "power": 130, "some": 135, "few": 131}, f"power: {NO_OTHER}"),
        ({"fp32": 120, "fp16": 121, "some": 119, "few": 160}, f"fp32: {NO_OTHER}"),
        # Where an exchange costs nothing, the plainest one is right.
        (
            {"fp32": 102, "fp16": 101, "some": 101, "few": 100},
            "fp32: a step takes 1.02 times as long as computation alone.",
        ),
    ],
)
def test_advice_is_the_first_that_is_as_fast_as_the_fastest(medians: dict[str, float], advice: str) -> None:
    others = [Result(TITLES[name], name, None, [median]) for name, median in medians.items()]
    assert trial.advice([Result(trial.ALONE, "", 0.0, [100]), *others]) == f"Use {advice}"


@pytest.mark.parallel
@pytest.mark.parametrize(
    ("launch", "optimizer", "line"),
    [
        (Launch("mpirun", 2), "sgd", "compression=SIDCo(ratio=0.001)"),
        (
            Launch("torchrun", 2, "ddp"),
            "adamw",
            'LocalUpdates(adamw, model, SIDCo(ratio=0.001, exchange=Pairs("packed")))',
        ),
        pytest.param(
            Launch("mpirun", 2),
            "adamw",
            'LocalUpdates(adamw, model, SIDCo(ratio=0.001, exchange=Pairs("packed")))',
            marks=pytest.mark.full,
        ),
        pytest.param(
            Launch("torchrun", 2, "ddp"), "sgd", "register(model, SIDCo(ratio=0.001))", marks=pytest.mark.full
        ),
    ],
    ids=str,
)
def test_every_exchange_is_timed(launch: Launch, optimizer: str, line: str) -> None:
    ended = launch.run(*SMALL, "--optimizer", optimizer, limit=120)
    assert ended.code == 0, str(ended)
    # horovodrun writes the rank before each line.
    lines = [row.partition("<stdout>:")[2] or row for row in ended.output.splitlines()]
    rows = [row.strip("| ").split(" | ") for row in lines if row.startswith("| ")][1:]
    hooks = ["PowerSGD rank 4"] if launch.launcher == "torchrun" else []
    assert [row[0] for row in rows] == [trial.ALONE, "dense fp32", "dense fp16", *hooks, "SIDCo 0.01", "SIDCo 0.001"]
    assert rows[-1][-1] == f"`{line}`"
    sent = {row[0]: row[1].replace(",", "") for row in rows}
    assert int(sent["dense fp32"]) == 2 * int(sent["dense fp16"]) > 10 * int(sent["SIDCo 0.01"]) > 0
    # Rank 0 alone prints.
    assert sum(row.startswith("Use ") for row in lines) == 1, str(ended)
    assert sum(row.startswith("All workers are on one host, ") for row in lines) == 1, str(ended)


@pytest.mark.full
@pytest.mark.parallel
def test_a_mesh_is_timed_where_nodes_have_several_workers() -> None:
    code = "import os, socket, sys; os.environ['LOCAL_WORLD_SIZE'] = '2'\n"
    code += "socket.gethostname = lambda: f'host{int(os.environ[\"RANK\"]) // 2}'\n"
    code += "from horovod_sparse.tools import cli; cli.main(sys.argv[1:])"
    ended = Launch("torchrun", 4, "ddp").run("-c", code, *SMALL[2:], limit=120)
    assert ended.code == 0, str(ended)
    rows = [row.strip("| ").split(" | ") for row in ended.output.splitlines() if row.startswith("| ")]
    sent = {title: int(count.replace(",", "")) for title, count, *_ in rows if title.startswith("SIDCo")}
    assert len(sent) == 4
    for ratio in trial.RATIOS:
        # Each of two workers sends its half of what is selected to the other node, and not to three workers all of it.
        assert sent[f"SIDCo {ratio} between nodes"] < 0.5 * sent[f"SIDCo {ratio}"]
    assert rows[-1][-1] == "`register(model, SIDCo(ratio=0.001), mesh=mesh)`"
    assert "one host" not in ended.output
