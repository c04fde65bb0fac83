"""Checkpoints on disk: complete or not there, for one rank and for several, whatever fails and whenever it does."""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from horovod_sparse.core import checkpoint
from horovod_sparse.core.checkpoint import Loaded, Workers, continued_by
from horovod_sparse.core.state import joined

LIMIT = 20.0
"""Seconds that a rank waits for the others before the test fails."""


def together(size: int, action: Callable[[Workers], Any]) -> list[Any]:
    """What `action` returns or raises on each of `size` ranks, which are threads."""
    barrier = threading.Barrier(size, timeout=LIMIT)
    values: list[Any] = [None] * size

    def run(rank: int) -> Any:
        def gather(value: Any) -> list[Any]:
            values[rank] = value
            barrier.wait()
            everyone = list(values)
            barrier.wait()
            return everyone

        try:
            return action(Workers(rank, size, gather))
        except threading.BrokenBarrierError:
            raise
        except Exception as error:
            return error

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(run, range(size)))


def content(step: int, rank: int) -> bytes:
    return f"rank {rank} in step {step}".encode()


def save(folder: Path, step: int, size: int = 2, keep: int = 3) -> list[Any]:
    def action(workers: Workers) -> None:
        shared = content(step, -1) if workers.rank == 0 else None
        checkpoint.save(folder, step, content(step, workers.rank), shared, workers, keep)

    return together(size, action)


def load(folder: Path, size: int = 2, damaged: checkpoint.Damaged = "skip") -> list[Any]:
    return together(size, lambda workers: checkpoint.load(folder, workers, damaged))


def expected(step: int, size: int, saved: int) -> list[Loaded]:
    ranks = [continued_by(rank, size, saved) or [rank % saved] for rank in range(size)]
    return [Loaded(step, saved, content(step, -1), [content(step, one) for one in mine]) for mine in ranks]


@pytest.mark.parametrize("size", [1, 2, 4])
def test_what_was_saved_is_loaded(tmp_path: Path, size: int) -> None:
    folder = tmp_path / "new" / "folder"
    assert load(folder, size) == [None] * size
    for step in (0, 5, 10):
        assert save(folder, step, size) == [None] * size
        assert load(folder, size) == expected(step, size, size)


@pytest.mark.parametrize(("size", "saved"), [(1, 4), (2, 5), (3, 2), (4, 1)])
def test_every_rank_that_saved_is_continued_by_exactly_one(tmp_path: Path, size: int, saved: int) -> None:
    save(tmp_path, 7, saved)
    assert load(tmp_path, size) == expected(7, size, saved)
    assert sorted(rank for mine in range(size) for rank in continued_by(mine, size, saved)) == list(range(saved))


def test_the_newest_are_kept(tmp_path: Path) -> None:
    for step in range(1, 7):
        save(tmp_path, step, keep=2)
        assert sorted(path.name for path in tmp_path.iterdir()) == [
            f"step-{kept:09d}" for kept in range(max(1, step - 1), step + 1)
        ]
    save(tmp_path, 3, keep=1)
    assert {path.name for path in tmp_path.iterdir()} == {f"step-{step:09d}" for step in (3, 5, 6)}, "later ones stay"


def test_a_step_is_saved_again(tmp_path: Path) -> None:
    save(tmp_path, 3)
    (tmp_path / "step-000000003" / "rank-00001").write_bytes(b"old")
    save(tmp_path, 3)
    assert load(tmp_path) == expected(3, 2, 2)


class Killed(BaseException):
    """Ends a rank where it stands; nothing catches it."""


@pytest.mark.parametrize("at", range(12))
def test_a_rank_that_is_killed_leaves_the_old_or_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    """Rank 0, which does the most, ends before its operation number `at` on the file system."""
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
        with contextlib.suppress(Killed):
            save(tmp_path, 2, size=1, keep=1)
    assert load(tmp_path, size=1, damaged="raise") in (expected(1, 1, 1), expected(2, 1, 1))
    save(tmp_path, 3, size=1, keep=1)
    assert [path.name for path in tmp_path.iterdir()] == ["step-000000003"], "the remains are removed"


def _remove(path: Path) -> None:
    path.unlink()


def _change(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize("name", ["shared", "rank-00000", "rank-00001", "manifest.json"])
@pytest.mark.parametrize("damage", [_remove, _truncate, _change])
def test_damage_is_seen_on_every_rank(tmp_path: Path, name: str, damage: Callable[[Path], None]) -> None:
    save(tmp_path, 1)
    save(tmp_path, 2)
    damage(tmp_path / "step-000000002" / name)
    errors = load(tmp_path, damaged="raise")
    assert all(isinstance(error, RuntimeError) and "step-000000002 is damaged" in str(error) for error in errors)
    assert len(set(map(str, errors))) == 1
    with pytest.warns(UserWarning, match="step-000000002 is damaged.*an older one is used"):
        assert load(tmp_path) == expected(1, 2, 2)


def test_a_rank_that_cannot_write_raises_on_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, 1)
    write = checkpoint._write

    def full(path: Path, data: bytes) -> None:
        if path.name == "rank-00001":
            raise OSError(28, "No space left on device")
        write(path, data)

    monkeypatch.setattr(checkpoint, "_write", full)
    errors = save(tmp_path, 2)
    assert all(isinstance(error, RuntimeError) and "rank 1: cannot write" in str(error) for error in errors)
    assert load(tmp_path) == expected(1, 2, 2)
    assert len(list(tmp_path.iterdir())) == 1, "what was written is removed"


def test_a_folder_that_is_not_shared_is_refused(tmp_path: Path) -> None:
    def action(workers: Workers) -> None:
        checkpoint.save(tmp_path / str(workers.rank), 1, b"own", b"" if workers.rank == 0 else None, workers, 3)

    errors = together(2, action)
    assert all("folder must be on a file system that all hosts share" in str(error) for error in errors)


def test_ranks_in_different_steps_are_refused(tmp_path: Path) -> None:
    errors = together(2, lambda workers: checkpoint.save(tmp_path, workers.rank, b"", b"", workers, 3))
    assert [str(error) for error in errors] == ["step must be the same on every rank, got [0, 1]"] * 2


def test_another_version_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "VERSION", 2)
    save(tmp_path, 1)
    monkeypatch.undo()
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

    made = joined([state(1), state(2), state(3)], zero=False)
    for part, names in (("residuals", "ab"), ("velocities", "a")):
        for name in names:
            np.testing.assert_array_equal(made[part][name], sum(state(seed)[part][name] for seed in (1, 2, 3)))
    np.testing.assert_array_equal(made["velocities"]["dense"], np.ones(4), "it is the same on every rank")
    assert made["adaptive"] == state(1)["adaptive"]
    new = joined([state(1)], zero=True)
    assert not any(array.any() for array in [*new["residuals"].values(), new["velocities"]["a"]])
    np.testing.assert_array_equal(new["velocities"]["dense"], np.ones(4))
    assert new["adaptive"] == state(1)["adaptive"]
