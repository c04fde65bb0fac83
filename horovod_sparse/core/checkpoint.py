"""Checkpoints on disk: every rank's own file and the shared one, complete or not there at all. Imports no framework.

A checkpoint is a folder `step-000000500`. The ranks write their files to a folder with a temporary name. When all files are on
the disk, rank 0 adds a manifest with their sizes and digests, and renames the folder. So a folder with the final name is
complete, whatever the moment at which a process was killed. All ranks must see the same folder.

Errors are agreed on: a problem of one rank raises on all of them.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import uuid
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

VERSION = 1
MANIFEST = "manifest.json"
SHARED = "shared"
"""The name of the file that is the same for all ranks; rank 0 writes it."""

_STEP = re.compile(r"step-(\d{9,})")
_UNFINISHED = ".unfinished-"

Damaged = Literal["skip", "raise"]


class Workers(NamedTuple):
    """The ranks that save or load together."""

    rank: int
    size: int
    gather: Callable[[Any], list[Any]]
    """Returns every rank's value, in rank order. Values are what JSON can express. It blocks."""

    def agree(self, problem: str) -> None:
        """Raise RuntimeError on every rank if any rank has a problem. An empty text is none."""
        found = [(rank, text) for rank, text in enumerate(self.gather(problem)) if text]
        if found:
            everything = "; ".join(f"rank {rank}: {text}" for rank, text in found)
            raise RuntimeError(f"the checkpoint failed: {everything}")


class Checkpoint(NamedTuple):
    """What `load_checkpoint` found."""

    step: int
    """Number of steps that were done; 0 if there is no checkpoint."""
    values: dict[str, Any]
    """What was saved under names that were not given to `load_checkpoint`."""


class Loaded(NamedTuple):
    """A complete checkpoint, as one rank reads it."""

    step: int
    world: int
    """Number of ranks that saved it."""
    shared: bytes
    own: list[bytes]
    """The files of the ranks that this rank continues; see `continued_by`."""


def rank_file(rank: int) -> str:
    """Return the name of a rank's file."""
    return f"rank-{rank:05d}"


def continued_by(rank: int, size: int, saved: int) -> list[int]:
    """Return the ranks, of the `saved` ones, that rank `rank` of `size` continues: each is continued by exactly one.

    The list is empty for a rank that is new.
    """
    return list(range(rank, saved, size))


def save(folder: Path, step: int, own: bytes, shared: bytes | None, workers: Workers, keep: int) -> None:
    """Write a checkpoint, and then remove all earlier ones but the newest `keep` - 1. Blocks until it is complete.

    Args:
        folder: the folder of all checkpoints.
        step: number of steps that are done.
        own: content of this rank's file.
        shared: content of the shared file on rank 0, else None.
        workers: the ranks.
        keep: how many checkpoints are kept, this one included.

    Raises:
        ValueError: `keep` is below 1, or `step` differs between ranks.
        RuntimeError: on every rank, if one could not write. Older checkpoints are not touched.
    """
    if keep < 1:
        raise ValueError(f"keep must be >= 1, got {keep}; every call saves a checkpoint that is kept")
    begun = workers.gather([step, uuid.uuid4().hex])
    if any(theirs != step for theirs, _ in begun):
        raise ValueError(f"step must be the same on every rank, got {[theirs for theirs, _ in begun]}")
    unfinished = folder / f"{_UNFINISHED}{begun[0][1]}"
    files = {rank_file(workers.rank): own} | ({} if shared is None else {SHARED: shared})
    written, problem = {}, ""
    try:
        unfinished.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            _write(unfinished / name, content)
            written[name] = [len(content), _digest(content)]
    except OSError as error:
        problem = f"cannot write the checkpoint: {error}"
    everyone = workers.gather([problem, written])
    # The next collective tells all ranks whether the checkpoint is complete.
    if workers.rank == 0 and not any(text for text, _ in everyone):
        parts = {name: entry for _, entries in everyone for name, entry in entries.items()}
        try:
            _check_visible(unfinished, parts)
            _complete(unfinished, folder / f"step-{step:09d}", {"step": step, "world": workers.size, "files": parts})
            _remove_old(folder, step, keep)
        except OSError as error:
            problem = f"cannot complete the checkpoint: {error}"
    try:
        workers.agree(problem)
    finally:
        if workers.rank == 0:
            shutil.rmtree(unfinished, ignore_errors=True)


def restore(folder: Path, workers: Workers, damaged: Damaged, use: Callable[[Loaded], dict[str, Any]]) -> Checkpoint:
    """Read the newest complete checkpoint, as `load` does, and let `use` load it. `use` returns the values that are left.

    Raises:
        ValueError: `damaged` is neither "skip" nor "raise".
        RuntimeError: on every rank, if `use` raises on one, or with damaged="raise" as `load` does.
    """
    if damaged not in ("skip", "raise"):
        raise ValueError(f"damaged must be 'skip' or 'raise', got {damaged!r}")
    found = load(folder, workers, damaged)
    if found is None:
        return Checkpoint(0, {})
    if found.world != workers.size and workers.rank == 0:
        warnings.warn(
            f"horovod_sparse: {found.world} workers saved the checkpoint of step {found.step}, {workers.size} continue; the "
            "sum of their residuals is kept",
            stacklevel=3,
        )
    values, problem = {}, ""
    try:
        values = use(found)
    except Exception as error:
        problem = f"the checkpoint of step {found.step} does not fit: {error}"
    workers.agree(problem)
    return Checkpoint(found.step, values)


def load(folder: Path, workers: Workers, damaged: Damaged) -> Loaded | None:
    """Read the newest complete checkpoint of which every rank can read its part. Return None if there is none.

    Args:
        folder: the folder of all checkpoints.
        workers: the ranks. Their number may differ from when the checkpoint was saved.
        damaged: what happens if a file is missing or changed: "skip" warns and takes an older checkpoint, "raise" raises.

    Raises:
        RuntimeError: on every rank, with damaged="raise".
    """
    for step in workers.gather(_steps(folder) if workers.rank == 0 else [])[0]:
        path = folder / f"step-{step:09d}"
        loaded, problem = None, ""
        try:
            loaded = _read(path, step, workers)
        except (OSError, ValueError, KeyError, TypeError) as error:
            problem = f"{path} is damaged: {error}"
        try:
            workers.agree(problem)
        except RuntimeError as error:
            if damaged == "raise":
                raise
            if workers.rank == 0:
                warnings.warn(f"horovod_sparse: {error}; an older one is used", stacklevel=1)
            continue
        assert loaded is not None
        return loaded
    return None


def _steps(folder: Path) -> list[int]:
    """Return the steps of the checkpoints in a folder, newest first."""
    return sorted((step for step, _ in _checkpoints(folder)), reverse=True)


def _checkpoints(folder: Path) -> Iterator[tuple[int, Path]]:
    for path in folder.iterdir() if folder.is_dir() else ():
        name = _STEP.fullmatch(path.name)
        if name:
            yield int(name[1]), path


def _read(path: Path, step: int, workers: Workers) -> Loaded:
    manifest = json.loads((path / MANIFEST).read_bytes())
    if manifest["version"] != VERSION:
        raise ValueError(f"its version must be {VERSION}, got {manifest['version']!r}; another release saved it")
    world = int(manifest["world"])
    if manifest["step"] != step or manifest["files"].keys() != {SHARED, *map(rank_file, range(world))}:
        raise ValueError(f"manifest.json is not that of {world} ranks in step {step}")
    # A new rank has no residual, but needs to know what else the ranks keep.
    ranks = continued_by(workers.rank, workers.size, world) or [workers.rank % world]
    shared, *own = (_verified(path / name, manifest["files"][name]) for name in (SHARED, *map(rank_file, ranks)))
    return Loaded(step, world, shared, own)


def _verified(path: Path, entry: Sequence[Any]) -> bytes:
    content = path.read_bytes()
    if [len(content), _digest(content)] != [*entry]:
        raise ValueError(f"{path.name} has {len(content)} bytes that are not the {entry[0]} bytes that were written")
    return content


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _complete(unfinished: Path, final: Path, manifest: Mapping[str, Any]) -> None:
    """Give the folder of a checkpoint its final name. An older one of the same step is replaced."""
    _write(unfinished / MANIFEST, json.dumps({"version": VERSION, **manifest}, indent=1).encode())
    _flush(unfinished)
    if final.exists():
        final.rename(final.with_name(f"{_UNFINISHED}{uuid.uuid4().hex}"))
    unfinished.rename(final)
    _flush(final.parent)


def _check_visible(unfinished: Path, parts: Mapping[str, Any]) -> None:
    hidden = sorted(name for name in parts if not (unfinished / name).exists())
    if hidden:
        raise OSError(
            f"rank 0 cannot see {hidden} in {unfinished}, which other ranks wrote; folder must be on a file system that all "
            "hosts share"
        )


def _remove_old(folder: Path, step: int, keep: int) -> None:
    """Remove what other saves have left unfinished, and all checkpoints before `step` but the newest.

    Later ones stay, although they must be of another run: only the user knows whether they are needed.
    """
    unfinished = [path for path in folder.iterdir() if path.name.startswith(_UNFINISHED)]
    older = sorted((one for one in _checkpoints(folder) if one[0] <= step), reverse=True)[keep:]
    for path in [*unfinished, *(path for _, path in older)]:
        shutil.rmtree(path, ignore_errors=True)


def _write(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _flush(folder: Path) -> None:
    """Wait until the names in a folder are on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
