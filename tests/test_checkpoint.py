"""Checkpoints on disk: complete or not there, for one rank and for several, whatever fails and whenever it does."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from virtual_mpi import run

from horovod_sparse.core import checkpoint
from horovod_sparse.core.checkpoint import Checkpoints, Loaded, Workers
from horovod_sparse.core.state import joined


def together(size: int, action: Callable[[Workers], Any]) -> list[Any]:
    """What `action` returns or raises on each of `size` ranks, which are threads."""
    return run(size, lambda comm: action(Workers(comm.Get_rank(), size, comm.allgather)))


def content(step: int, rank: int) -> bytes:
    return f"rank {rank} in step {step}".encode()


def made(workers: Workers, **functions: Callable[..., Any]) -> Checkpoints:
    """Checkpoints of no objects, but for what `functions` replace."""
    nothing: dict[str, Any] = {"compressors": dict, "own": bytes, "shared": bytes, "decode": lambda _: {}}
    nothing |= {"check": lambda objects, *_: (objects, {}), "set": lambda *_: None}
    return Checkpoints(lambda: workers, **{**nothing, **functions})


def save(folder: Path, step: Any, size: int = 2, keep: Any = 3) -> list[Any]:
    def action(workers: Workers) -> None:
        functions = {"own": lambda _: content(step, workers.rank), "shared": lambda _: content(step, -1)}
        made(workers, **functions).save_checkpoint(folder, step, keep=keep)

    return together(size, action)


def load(folder: Path, size: int = 2, damaged: Any = "skip") -> list[Any]:
    """What each rank is given, or raises; None where there is no checkpoint."""

    def action(workers: Workers) -> Any:
        found = made(workers)
        found._load = lambda objects, found, undo: {"": found}  # type: ignore[method-assign]
        return found.load_checkpoint(folder, damaged=damaged).values.get("")

    return together(size, action)


def expected(step: int, size: int, saved: int) -> list[Loaded]:
    mine = [range(saved)[rank::size] for rank in range(size)]
    return [
        Loaded(
            step, saved, content(step, -1), [content(step, one) for one in ranks or [rank % saved]], is_new=not ranks
        )
        for rank, ranks in enumerate(mine)
    ]


def names(folder: Path) -> list[str]:
    """The names of what is in a folder, but for the lock."""
    return sorted(path.name for path in folder.iterdir() if path.name != checkpoint.LOCK)


@pytest.mark.parametrize(("size", "saved"), [(1, 1), (2, 2), (4, 4), (1, 4), (2, 5), (3, 2), (4, 1)])
@pytest.mark.filterwarnings("ignore:.*workers saved the checkpoint")
def test_what_was_saved_is_loaded_and_every_rank_is_continued_by_one(tmp_path: Path, size: int, saved: int) -> None:
    folder = tmp_path / "new" / "folder"
    assert load(folder, size) == [None] * size
    for step in (0, 5, 10):
        assert save(folder, step, saved) == [None] * saved
        found = load(folder, size)
        assert found == expected(step, size, saved)
    continued = [own for one in found if not one.is_new for own in one.own]
    assert sorted(continued) == sorted(content(10, rank) for rank in range(saved))


def test_the_newest_are_kept(tmp_path: Path) -> None:
    for step in range(1, 7):
        save(tmp_path, step, keep=2)
        assert names(tmp_path) == [f"step-{kept:09d}" for kept in range(max(1, step - 1), step + 1)]
    save(tmp_path, 3, keep=1)
    assert names(tmp_path) == [f"step-{step:09d}" for step in (3, 5, 6)], "later ones stay"


class Killed(BaseException):
    """Ends a rank where it stands; nothing catches it."""


@pytest.mark.parametrize("step", [1, 2])
@pytest.mark.parametrize("at", range(20))
def test_a_rank_that_is_killed_leaves_the_old_or_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int, step: int
) -> None:
    """Rank 0, which does the most, ends before its operation number `at` on the file system. It saves step 1 again, or 2."""
    save(tmp_path, 1, size=1)
    done = 0

    def dying(operation: Callable[..., Any]) -> Callable[..., Any]:
        def count(*args: Any, **kwargs: Any) -> Any:
            nonlocal done
            done += 1
            if done > at:
                raise Killed
            return operation(*args, **kwargs)

        return count

    with monkeypatch.context() as patch:
        for owner, name in ((Path, "mkdir"), (Path, "open"), (Path, "rename"), (os, "fsync"), (shutil, "rmtree")):
            patch.setattr(owner, name, dying(getattr(owner, name)))
        # A killed process does not run `finally` either: `rmtree` ends at once.
        (end,) = save(tmp_path, step, size=1, keep=1)
    assert end is None or type(end) is Killed
    assert load(tmp_path, size=1, damaged="raise") in (expected(1, 1, 1), expected(step, 1, 1))
    save(tmp_path, 3, size=1, keep=1)
    assert names(tmp_path) == ["step-000000003"], "the remains are removed"


def test_a_step_that_was_being_replaced_counts_until_the_new_one_is_there(tmp_path: Path) -> None:
    """A rank was killed between the two renames."""
    save(tmp_path, 3)
    save(tmp_path, 5)
    (tmp_path / "step-000000005").rename(tmp_path / ".replaced-step-000000005")
    assert load(tmp_path) == expected(5, 2, 2)
    save(tmp_path, 7, keep=2)
    assert names(tmp_path) == [".replaced-step-000000005", "step-000000007"]
    save(tmp_path, 5, keep=2)
    assert names(tmp_path) == ["step-000000005", "step-000000007"]


def _change(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def _other(path: Path, make: Callable[[Path], object]) -> None:
    path.unlink()
    make(path)


def _manifest(path: Path, **changes: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def _entry(path: Path, value: object) -> None:
    _manifest(path, files=dict.fromkeys(("shared", "rank-00000", "rank-00001"), value))


DAMAGES: dict[str, Callable[[Path], object]] = {
    "removed": Path.unlink,
    "truncated": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "changed": _change,
    "grown": lambda path: path.write_bytes(path.read_bytes() * 2),
    "folder": lambda path: _other(path, Path.mkdir),
    "pipe": lambda path: _other(path, os.mkfifo),
}
MANIFESTS: dict[str, Callable[[Path], object]] = {
    "empty entry": lambda path: _entry(path, []),
    "entry of numbers": lambda path: _entry(path, [1, 2]),
    "entry of text": lambda path: _entry(path, ["1", "2"]),
    "no entry": lambda path: _entry(path, None),
    "many ranks": lambda path: _manifest(path, world=10**15),
    "no ranks": lambda path: _manifest(path, world=0),
    "a rank less than none": lambda path: _manifest(path, world=-1),
    "ranks in text": lambda path: _manifest(path, world="2"),
    "list": lambda path: path.write_text("[]"),
    "deep": lambda path: path.write_text("[" * 100_000),
}
CASES = [
    (name, damage) for name in ("shared", "rank-00000", "rank-00001", "manifest.json") for damage in DAMAGES.values()
]
CASES += [("manifest.json", damage) for damage in MANIFESTS.values()]


@pytest.mark.parametrize(("name", "damage"), CASES)
def test_damage_is_seen_on_every_rank(tmp_path: Path, name: str, damage: Callable[[Path], object]) -> None:
    save(tmp_path, 1)
    save(tmp_path, 2)
    damage(tmp_path / "step-000000002" / name)
    errors = load(tmp_path, damaged="raise")
    assert all(type(error) is RuntimeError and "step-000000002 is damaged" in str(error) for error in errors), errors
    assert len(set(map(str, errors))) == 1
    with pytest.warns(UserWarning, match="step-000000002 is damaged.*an older one is used"):
        assert load(tmp_path) == expected(1, 2, 2)


def test_training_does_not_begin_anew_beside_checkpoints_that_cannot_be_read(tmp_path: Path) -> None:
    for step in (1, 2):
        save(tmp_path, step)
        (tmp_path / f"step-{step:09d}" / "rank-00001").write_bytes(b"")
    with pytest.warns(UserWarning, match="step-000000002 is damaged"):
        errors = load(tmp_path)
    assert all(isinstance(error, RuntimeError) for error in errors)
    assert all("none of the 2 checkpoints in" in str(error) and "move them away" in str(error) for error in errors)


@pytest.mark.parametrize(
    "name", ["step-\u0663" + "0" * 8, "step-0000000005", "step-12", "step-000000005 ", "old-step-000000005"]
)
def test_other_folders_are_no_checkpoints(tmp_path: Path, name: str) -> None:
    save(tmp_path, 5)
    (tmp_path / "step-000000005").rename(tmp_path / name)
    assert load(tmp_path, damaged="raise") == [None, None]


WRONG: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "a fraction": ({"step": 5.0}, TypeError, "step must be an int >= 0, got 5.0"),
    "a step below 0": ({"step": -1}, ValueError, "step must be >= 0, got -1"),
    "a text": ({"step": "5"}, TypeError, "step must be an int >= 0, got '5'"),
    "half": ({"keep": 2.5}, TypeError, "keep must be an int >= 1, got 2.5"),
    "none": ({"keep": 0}, ValueError, "keep must be >= 1, got 0"),
}


@pytest.mark.parametrize(("wrong", "error", "text"), WRONG.values(), ids=WRONG)
def test_a_wrong_argument_raises_on_every_rank(
    tmp_path: Path, wrong: dict[str, Any], error: type[Exception], text: str
) -> None:
    """Also if it is wrong on one rank only: the others then raise, and do not wait."""

    arguments = [{"step": 5, "keep": 1}, {"step": 5, "keep": 1, **wrong}]
    errors = together(2, lambda workers: made(workers).save_checkpoint(tmp_path, **arguments[workers.rank]))
    assert type(errors[1]) is error and str(errors[1]) == text
    assert type(errors[0]) is RuntimeError and str(errors[0]) == f"the checkpoint failed: rank 1: cannot save: {text}"
    assert names(tmp_path) == []


class OddError(Exception):
    """Nothing that anybody expects."""


@pytest.mark.parametrize(
    "error", [MemoryError(), IndexError("odd"), OddError("odd"), OSError("odd"), KeyError("odd")], ids=repr
)
@pytest.mark.parametrize("moment", ["own", "decode", "write", "look", "check", "set"])
def test_whatever_one_rank_raises_all_raise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str, error: Exception
) -> None:
    save(tmp_path, 1)
    failing = 0 if moment == "look" else 1
    kept: list[list[bytes]] = [[b"before"], [b"before"]]

    def fail(rank: int, now: str) -> Any:
        if now == moment and rank == failing:
            raise error

    def action(workers: Workers) -> None:
        rank = workers.rank

        def change(_: Any, __: Any, own: dict[str, Any]) -> None:
            kept[rank].append(own["kept"])
            if own["kept"] != b"before":
                fail(rank, "set")

        monkeypatch.setattr(checkpoint, "_write", lambda path, _: "1" in path.name and fail(1, "write"))
        if moment == "look":
            monkeypatch.setattr(checkpoint, "_checkpoints", lambda _: fail(0, "look"))
        checkpoints = made(
            workers,
            own=lambda _: fail(rank, "own") or kept[rank][-1],
            decode=lambda content: fail(rank, "decode") or {"kept": content},
            check=lambda *_: fail(rank, "check") or ((), {}),
            set=change,
        )
        loads = moment in ("look", "check", "set")
        checkpoints.load_checkpoint(tmp_path) if loads else checkpoints.save_checkpoint(tmp_path, 2, keep=1)

    errors = together(2, action)
    assert all(type(one) is RuntimeError and f"rank {failing}:" in str(one) for one in errors), errors
    assert all((str(error) or "MemoryError()") in str(one) for one in errors)
    monkeypatch.undo()
    assert load(tmp_path) == expected(1, 2, 2) and names(tmp_path) == ["step-000000001"]
    assert {kept[0][-1], kept[1][-1]} == {b"before"} and (len(kept[0]) == 3) == (moment in ("check", "set"))


HOLD = """
import sys, time, pathlib
from horovod_sparse.core import checkpoint
with checkpoint._locked(pathlib.Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(600)
"""


def test_a_folder_in_which_another_job_saves_is_refused_until_that_job_is_killed(tmp_path: Path) -> None:
    save(tmp_path, 1)
    with subprocess.Popen([sys.executable, "-c", HOLD, tmp_path], stdout=subprocess.PIPE) as other:
        assert other.stdout is not None and other.stdout.readline() == b"held\n"
        errors, loaded = save(tmp_path, 2), load(tmp_path)
        other.kill()
    assert all("rank 0: cannot save: another job saves in" in str(error) for error in errors), errors
    assert loaded == expected(1, 2, 2), "loading needs no lock"
    assert save(tmp_path, 2) == [None, None]
    assert names(tmp_path) == ["step-000000001", "step-000000002"]


def test_a_file_system_without_locks_is_used_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(checkpoint.fcntl, "flock", refuse)
    assert save(tmp_path, 1) == [None, None]


def test_a_folder_that_is_not_shared_is_refused(tmp_path: Path) -> None:
    errors = together(2, lambda workers: made(workers).save_checkpoint(tmp_path / str(workers.rank), 1))
    assert all("folder must be on a file system that all hosts share" in str(error) for error in errors)


def test_ranks_in_different_steps_are_refused(tmp_path: Path) -> None:
    errors = together(2, lambda workers: made(workers).save_checkpoint(tmp_path, workers.rank))
    assert [str(error) for error in errors] == ["step must be the same on every rank, got [0, 1]"] * 2


def test_another_version_is_not_read(tmp_path: Path) -> None:
    save(tmp_path, 1)
    _manifest(tmp_path / "step-000000001" / "manifest.json", version=2)
    errors = load(tmp_path, damaged="raise")
    assert all("its version must be 1, got 2; another release saved it" in str(error) for error in errors)


def test_joined_states_keep_the_sum() -> None:
    def state(seed: int) -> dict[str, Any]:
        generator = np.random.default_rng(seed)
        return {
            "version": 3,
            "residuals": {name: generator.standard_normal(4) for name in "ab"},
            "velocities": {"a": generator.standard_normal(4), "dense": np.ones(4)},
            "learning_rates": {},
            "adaptive": {name: {"step": 7, "threshold": float(seed)} for name in "ab"},
            "sparse": [],
        }

    for seeds in ((1, 2, 3), ()):
        made = joined([state(seed) for seed in seeds or (1,)], zero=not seeds)
        for part, name in (("residuals", "a"), ("residuals", "b"), ("velocities", "a")):
            expected = sum((state(seed)[part][name] for seed in seeds), np.zeros(4))
            np.testing.assert_array_equal(made[part][name], expected)
        np.testing.assert_array_equal(made["velocities"]["dense"], np.ones(4), "it is the same on every rank")
        assert made["adaptive"] == state(1)["adaptive"]
