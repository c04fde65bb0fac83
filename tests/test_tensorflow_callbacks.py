"""Files that Keras callbacks write."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("tensorflow")
pytest.importorskip("horovod.tensorflow", reason="Horovod was built without TensorFlow", exc_type=ImportError)

from horovod_sparse.tensorflow.compressors import TopK
from horovod_sparse.tensorflow.keras import callbacks


@pytest.fixture
def checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> callbacks.CompressionCheckpoint:
    monkeypatch.setattr(callbacks.hvd, "rank", lambda: 3)
    return callbacks.CompressionCheckpoint(TopK(0.1), tmp_path / "states" / "rank{rank}.npz")


def test_a_saved_state_can_be_loaded_and_nothing_else_is_left(checkpoint: callbacks.CompressionCheckpoint) -> None:
    for _ in range(2):
        checkpoint.save()
        assert [path.name for path in checkpoint.path.parent.iterdir()] == ["rank3.npz"]
    checkpoint.load()


def test_file_and_folder_are_on_the_disk_before_save_returns(
    checkpoint: callbacks.CompressionCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[Path] = []
    real = os.fsync

    def fsync(number: int) -> None:
        synced.append(Path(os.readlink(f"/proc/self/fd/{number}")))
        real(number)

    monkeypatch.setattr(os, "fsync", fsync)
    checkpoint.save()
    first, second = synced
    assert first.parent == second == checkpoint.path.parent.resolve()
    assert first.name != checkpoint.path.name, "the file is replaced when the new one is complete"
    checkpoint.save()
    assert synced[2].name != first.name, "two processes that save at once do not share a file"


@pytest.mark.parametrize("failing", ["fsync", "replace"])
def test_a_save_that_fails_leaves_the_old_file(
    checkpoint: callbacks.CompressionCheckpoint, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    checkpoint.save()
    before = checkpoint.path.read_bytes()

    def fail(*args: Any) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(*((os, "fsync", fail) if failing == "fsync" else (Path, "replace", fail)))
    with pytest.raises(OSError, match="no space left"):
        checkpoint.save()
    monkeypatch.undo()
    folder = checkpoint._path.rsplit("/", 1)[0]
    assert [path.name for path in Path(folder).iterdir()] == ["rank3.npz"]
    assert (Path(folder) / "rank3.npz").read_bytes() == before
