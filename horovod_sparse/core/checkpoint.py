"""Checkpoints: a file of every rank and a shared one, complete or not there, loaded or not at all. Imports no framework.

A checkpoint is a folder `step-000000500`. It has another name until all files are on the disk, and a manifest with their sizes
and digests. Whatever a rank raises, all of them raise. What objects hold, and how it is set, adapters know.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import random
import re
import shutil
import uuid
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar, cast

import numpy as np

from horovod_sparse.compressors.checks import check_choice, check_integer
from horovod_sparse.core.binding import BoundCompressor
from horovod_sparse.core.state import joined

VERSION = 1
MANIFEST = "manifest.json"
SHARED = "shared"
"""The name of the file that rank 0 writes for all ranks."""
LOCK = ".lock"

_NAME = re.compile(r"(\.replaced-)?step-([0-9]{9}|[1-9][0-9]{9,})")
_REPLACED = ".replaced-"
"""Begins the name of a checkpoint whose step is being saved again. It counts until the new one has its name."""
_UNFINISHED = ".unfinished-"

Damaged = Literal["skip", "raise"]
Folder = str | os.PathLike[str]
Objects = Mapping[str, Any]
State = dict[str, Any]
T = TypeVar("T")


class Workers(NamedTuple):
    """The ranks that save or load together."""

    rank: int
    size: int
    gather: Callable[[Any], list[Any]]
    """Returns every rank's value, in rank order. Values are what JSON can express. It blocks."""

    def agreed(self, what: str, action: Callable[[], T], own: tuple[type[Exception], ...] = ()) -> T:
        """Return what `action` returns on this rank. If it raises on any, every rank raises RuntimeError: `what` begins it.

        Errors of the classes `own` stay what they are on the rank that has them.
        """
        problem, error = "", None
        try:
            value = action()
        except Exception as caught:
            error = caught
            is_clear = isinstance(error, (OSError, RuntimeError, TypeError, ValueError))
            problem = f"{what}: {error if is_clear else repr(error)}"
        problems = self.gather(problem)
        if isinstance(error, own):
            raise error
        found = "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(problems) if text)
        if found:
            raise RuntimeError(f"the checkpoint failed: {found}") from error
        return value


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
    """The files of the ranks that this rank continues; for a new rank, the file of another."""
    is_new: bool
    """Whether this rank continues none: it has no residual, but needs to know what else the ranks keep."""


def random_state() -> dict[str, Any]:
    """Return the states of the global random generators of NumPy and Python, as values that JSON can express."""
    name, keys, *rest = cast(tuple[Any, ...], np.random.get_state(legacy=True))
    return {"numpy": [name, keys.tolist(), *rest], "python": list(random.getstate())}


def set_random_state(state: Mapping[str, Any]) -> None:
    """Continue from what `random_state` returned."""
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, np.array(keys, np.uint32), *rest))
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))


def rank_file(rank: int) -> str:
    """Return the name of a rank's file."""
    return f"rank-{rank:05d}"


@dataclass
class Checkpoints:
    """The checkpoints of one framework, whose adapter says what its objects hold."""

    workers: Callable[[], Workers]
    compressors: Callable[[Objects], Mapping[str, BoundCompressor]]
    own: Callable[[Objects], bytes]
    """Returns the content of this rank's file: among others "compression", the states of the compressors, and "random"."""
    shared: Callable[[Objects], bytes]
    """Returns the content of the file that is the same for all ranks."""
    decode: Callable[[bytes], State]
    """Reads the content of a file. It raises ValueError if it cannot."""
    check: Callable[[Objects, State, State], tuple[Collection[str], State]]
    """Takes both contents before they are loaded, and gives up steps that go on. Returns the names that were saved, and the
    values that can be returned. It raises ValueError if an object can take no state."""
    set: Callable[[Objects, State, State], None]
    """Loads both into the objects. It raises if they do not fit; some may be loaded then."""
    passes: Callable[[Any], int] = lambda one: 0
    """Returns the number of passes whose gradients an object has summed and not yet applied."""

    def save_checkpoint(self, /, folder: Folder, step: int, *, keep: int = 3, **objects: Any) -> None:
        """Save a checkpoint from which training continues bit for bit. Call it on every rank, between two steps.

        It holds `objects`, the state of the optimizers' compressors, and the states of the random generators of PyTorch, NumPy
        and Python. Models and optimizers of rank 0 are saved for all ranks. Everything else is saved for every rank, also
        buffers of PyTorch's models, variables of TensorFlow that are not trainable, and optimizers whose updates are exchanged.
        Blocks until the checkpoint is on the disk.

        Args:
            folder: the folder of all checkpoints of this job, on a file system that all hosts share.
            step: number of steps that are done, >= 0.
            keep: how many checkpoints are kept, >= 1. Older ones are removed when this one is complete.
            **objects: what to save, by name. PyTorch: whatever has `state_dict` and `load_state_dict` (model, optimizer,
                scheduler, sampler, scaler), `torch.Generator`s, tensors, and plain values. TensorFlow: models, optimizers and
                whatever else has `variables`, variables, `tf.random.Generator`s, compressors, and values that JSON can
                express. The compressor of an optimizer is saved with it; those of tapes, and of TensorFlow's optimizers other
                than Keras 3's, must be among the objects.

        Raises:
            TypeError, ValueError: `step` or `keep` is wrong, `step` differs between ranks, gradients of several passes are
                being summed (TensorFlow), or something cannot be saved: `torch.load(weights_only=True)` refuses its type, or
                JSON cannot express it. Ranks on which that is not so raise RuntimeError.
            RuntimeError: on every rank, if one cannot write, or another job saves in the folder. Older checkpoints stay.
        """
        folder, workers = Path(folder), self.workers()
        files: dict[str, bytes] = {}
        with ExitStack() as at_the_end:

            def prepare() -> tuple[int, str]:
                check_integer("step", step, 0)
                check_integer("keep", keep, 1)
                for name, one in objects.items():
                    if passes := self.passes(one):
                        raise ValueError(
                            f"{name} must be between two steps, but sums the gradients of {passes} passes that it has not "
                            "applied; save after the last of them"
                        )
                files[rank_file(workers.rank)] = self.own(objects)
                if workers.rank == 0:
                    files[SHARED] = self.shared(objects)
                    at_the_end.enter_context(_locked(folder))
                for content in files.values():
                    self.decode(content)
                return int(step), uuid.uuid4().hex

            def write() -> dict[str, tuple[int, str]]:
                unfinished.mkdir(parents=True, exist_ok=True)
                for name, content in files.items():
                    _write(unfinished / name, content)
                return {name: (len(content), sha256(content).hexdigest()) for name, content in files.items()}

            def complete() -> None:
                if workers.rank == 0:
                    manifest = {"step": step, "world": workers.size, "files": parts}
                    _complete(unfinished, folder / f"step-{step:09d}", manifest)
                    _remove_old(folder, step, keep)

            begun = workers.gather(workers.agreed("cannot save", prepare, own=(TypeError, ValueError)))
            steps = [theirs for theirs, _ in begun]
            if len(set(steps)) > 1:
                raise ValueError(f"step must be the same on every rank, got {steps}")
            step = steps[0]
            unfinished = folder / f"{_UNFINISHED}{begun[0][1]}"
            if workers.rank == 0:
                at_the_end.callback(shutil.rmtree, unfinished, ignore_errors=True)
            written = workers.gather(workers.agreed("cannot write the checkpoint", write))
            parts = {name: entry for entries in written for name, entry in entries.items()}
            workers.agreed("cannot complete the checkpoint", complete)

    def load_checkpoint(self, /, folder: Folder, *, damaged: Damaged = "skip", **objects: Any) -> Checkpoint:
        """Load the newest complete checkpoint into `objects`. Call it on every rank, when optimizers and variables are made.

        If there is no checkpoint, nothing changes and `step` is 0. With another number of workers than when it was saved, the
        sum of all residuals is kept (`joined`), and a warning says so.

        Args:
            folder: the folder of all checkpoints.
            damaged: what happens if a file is missing or was changed: "skip" takes an older checkpoint and warns, "raise"
                raises.
            **objects: what to load, by the names that `save_checkpoint` was given. What is left out is returned in `values`;
                of TensorFlow, plain values only.

        Raises:
            ValueError: `damaged` is neither.
            RuntimeError: on every rank, if none of the checkpoints can be read, if the newest is damaged and damaged="raise",
                or if it does not fit the objects. These are then as before.
        """
        workers = self.workers()
        found = _newest(Path(folder), workers, damaged)
        if found is None:
            return Checkpoint(0, {})
        if found.world != workers.size and workers.rank == 0:
            warnings.warn(
                f"horovod_sparse: {found.world} workers saved the checkpoint of step {found.step}, {workers.size} continue; "
                "the sum of their residuals is kept",
                stacklevel=2,
            )
        with ExitStack() as undo:
            # It may not fit on another rank.
            values = workers.agreed(
                f"the checkpoint of step {found.step} does not fit", lambda: self._load(objects, found, undo)
            )
            undo.pop_all()
        return Checkpoint(found.step, values)

    def _load(self, objects: Objects, found: Loaded, undo: ExitStack) -> State:
        """Load a checkpoint, and return what is left. Whatever is changed, `undo` brings back: an object may raise half-way."""
        shared, (own, *others) = self.decode(found.shared), [self.decode(one) for one in found.own]
        names, values = self.check(objects, shared, own)
        unknown = sorted(objects.keys() - names)
        if unknown:
            raise ValueError(f"{unknown} were not saved; it holds {sorted(names)}")
        for name, compressor in self.compressors(objects).items():
            if name not in own["compression"]:
                raise ValueError(f"{name} was saved without a compressor, but has {compressor!r} now")
            own["compression"][name] = joined([one["compression"][name] for one in (own, *others)], zero=found.is_new)
        before = self.shared(objects), self.own(objects)
        if found.is_new:
            # A new worker would draw the same random numbers as the one whose file it reads.
            own["random"] = self.decode(before[1])["random"]
        undo.callback(lambda: self.set(objects, *map(self.decode, before)))
        self.set(objects, shared, own)
        return {name: value for name, value in values.items() if name not in objects}


def _newest(folder: Path, workers: Workers, damaged: Damaged) -> Loaded | None:
    def look() -> list[tuple[int, str]]:
        check_choice("damaged", damaged, ("skip", "raise"))
        return [(step, path.name) for step, path in _checkpoints(folder)] if workers.rank == 0 else []

    names = workers.gather(workers.agreed("cannot look for checkpoints", look, own=(ValueError,)))[0]
    for number, (step, name) in enumerate(names, 1):
        try:
            return workers.agreed(f"{folder / name} is damaged", partial(_read, folder / name, step, workers))
        except RuntimeError as error:
            # A subclass is an error of the collective.
            if damaged == "raise" or type(error) is not RuntimeError:
                raise
            if number == len(names):
                raise RuntimeError(
                    f"{error}; none of the {number} checkpoints in {folder} can be read; move them away to begin anew"
                ) from error
            if workers.rank == 0:
                warnings.warn(f"horovod_sparse: {error}; an older one is used", stacklevel=3)
    return None


def _checkpoints(folder: Path) -> list[tuple[int, Path]]:
    """Return the steps and the paths of the checkpoints in a folder, newest first, and one that is being replaced last."""
    found = [
        (int(name[2]), not name[1], path)
        for path in (folder.iterdir() if folder.is_dir() else ())
        if (name := _NAME.fullmatch(path.name))
    ]
    return [(step, path) for step, _, path in sorted(found, reverse=True)]


def _read(path: Path, step: int, workers: Workers) -> Loaded:
    """Return what this rank needs of a checkpoint."""
    # To read a pipe would block.
    odd = sorted(file.name for file in path.iterdir() if not file.is_file())
    if odd:
        raise ValueError(f"it must have regular files only, but {odd} are none")
    manifest = json.loads((path / MANIFEST).read_bytes())
    if manifest["version"] != VERSION:
        raise ValueError(f"its version must be {VERSION}, got {manifest['version']!r}; another release saved it")
    world, files = manifest["world"], manifest["files"]
    # A damaged number may be large.
    is_whole = len(files) == world + 1 and files.keys() == {SHARED, *map(rank_file, range(world))}
    if manifest["step"] != step or not is_whole:
        raise ValueError(f"manifest.json is not that of {world} ranks in step {step}")
    # Each of the saved ranks is continued by exactly one.
    mine = range(workers.rank, world, workers.size)
    ranks = mine or [workers.rank % world]
    contents = []
    for name in (SHARED, *map(rank_file, ranks)):
        size, digest = files[name]
        contents.append((path / name).read_bytes())
        if len(contents[-1]) != size or sha256(contents[-1]).hexdigest() != digest:
            raise ValueError(f"{name} has {len(contents[-1])} bytes that are not the {size} bytes that were written")
    return Loaded(step, world, contents[0], contents[1:], is_new=not mine)


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Make the folder, and refuse it to other jobs meanwhile. The system ends the lock of a process that is killed."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / LOCK).open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RuntimeError(
                f"another job saves in {folder} at this moment; give every job a folder of its own. If a host has "
                f"crashed that had a lock on a network file system: remove {folder / LOCK}"
            ) from None
        except OSError as error:
            # Nothing is locked on a file system without locks.
            if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
                raise
        try:
            yield
        finally:
            # Processes that were forked meanwhile have the file open, too.
            with contextlib.suppress(OSError):
                fcntl.flock(file, fcntl.LOCK_UN)


def _complete(unfinished: Path, final: Path, manifest: Mapping[str, Any]) -> None:
    """Give the folder of a checkpoint its final name. An older one of the same step is replaced."""
    hidden = sorted(name for name in manifest["files"] if not (unfinished / name).exists())
    if hidden:
        raise OSError(
            f"rank 0 cannot see {hidden} in {unfinished}, which other ranks wrote; folder must be on a file system that all "
            "hosts share"
        )
    _write(unfinished / MANIFEST, json.dumps({"version": VERSION, **manifest}, indent=1).encode())
    _flush(unfinished)
    if final.exists():
        replaced = final.with_name(f"{_REPLACED}{final.name}")
        shutil.rmtree(replaced, ignore_errors=True)
        final.rename(replaced)
    unfinished.rename(final)
    _flush(final.parent)


def _remove_old(folder: Path, step: int, keep: int) -> None:
    """Remove what other saves have left unfinished, and all checkpoints before `step` but the newest. Later ones stay."""
    unfinished = [path for path in folder.iterdir() if path.name.startswith(_UNFINISHED)]
    older = [(number, path) for number, path in _checkpoints(folder) if number <= step]
    # Of a step that was replaced, the first is the new one.
    kept = [*dict(reversed(older)).values()][-keep:]
    for path in [*unfinished, *(path for _, path in older if path not in kept)]:
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
