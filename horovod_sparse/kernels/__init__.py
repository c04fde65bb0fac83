"""The compiled kernels, if they are there, and which variant of them is used. Imports no framework.

There is a variant for every kind of processor; all give the same bits. HOROVOD_SPARSE_KERNELS names the variant to use, or is
`auto` or 1 for the fastest one that this processor runs. If there was no compiler at installation, or with `off` or 0, there
are no kernels, and the adapters use their framework's operations. HOROVOD_SPARSE_PREFETCH says whether kernels ask the memory
a page ahead for what they will need: `on`, `off`, or `auto`, where that saves time.
"""

from __future__ import annotations

import os
from functools import cache
from importlib import import_module
from itertools import count, takewhile
from typing import Any

from horovod_sparse.kernels.pool import BufferPool

ffi: Any
lib: Any
try:
    _native = import_module("horovod_sparse.kernels._native")
    ffi, lib = _native.ffi, _native.lib
except ImportError:
    ffi = lib = None

pool = BufferPool()
"""Lends the memory for messages, and for entries that are noted while gradients are taken in."""
VARIABLE, PREFETCH = "HOROVOD_SPARSE_KERNELS", "HOROVOD_SPARSE_PREFETCH"
NAMES = ("avx512", "avx2", "baseline", "neon")
"""The names of all variants: three for x86-64, one for AArch64."""


def asked() -> str:
    """Return "auto", "off" or the name of a variant, as HOROVOD_SPARSE_KERNELS says. Raise ValueError for anything else."""
    said = os.environ.get(VARIABLE, "auto")
    name = {"": "auto", "1": "auto", "0": "off"}.get(said, said)
    if name not in ("auto", "off", *variants()):
        raise ValueError(
            f"{VARIABLE} must be auto, off or one of {', '.join(NAMES)}, and this processor runs "
            f"{', '.join(variants()) or 'none, since the kernels were not compiled'}; got {said!r}"
        )
    return name


def available() -> bool:
    """Return whether the kernels were compiled and are not turned off. If so, let them work as the variables say."""
    name = variant()
    if name == "off":
        return False
    asks_ahead()
    return bool(lib.hs_choose(name.encode()))


def asks_ahead() -> bool:
    """Let the kernels ask the memory ahead, or not, as HOROVOD_SPARSE_PREFETCH says. Return what was decided."""
    said = os.environ.get(PREFETCH, "auto")
    wanted = {"on": 1, "off": 0, "auto": -1, "": -1}.get(said)
    if wanted is None:
        raise ValueError(f"{PREFETCH} must be on, off or auto, got {said!r}")
    return bool(lib.hs_ask_ahead(wanted))


def variant() -> str:
    """Return the name of the variant in use, or "off"."""
    name = asked()
    return next(iter(variants()), "off") if name == "auto" else name


@cache
def variants() -> tuple[str, ...]:
    """Return the names of the variants that this processor runs, the fastest first; none without compiled kernels."""
    if lib is None:
        return ()
    names = iter(lib.hs_variant(number) for number in count())
    return tuple(ffi.string(name).decode() for name in takewhile(bool, names))
