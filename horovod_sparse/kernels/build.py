"""The build of the compiled kernels: cffi wraps the plain C functions of kernels.h. Run by setup.py, not imported otherwise.

cffi suits functions that take addresses and sizes: it needs no class or array of any framework, releases Python's lock
while a function runs, and makes one extension module for all versions of Python.

Tested by tests/project/test_docker.py.
"""

from __future__ import annotations

import os
from pathlib import Path

from cffi import FFI

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
# No contraction, so that every processor gives the same bits. No warning on passing vectors: it happens inside one file only.
COMPILE = ["-std=c++17", "-O3", "-ffp-contract=off", "-Wno-psabi"]
LINK = ["-pthread", "-ldl"]

_header = (HERE / "kernels.h").read_text(encoding="utf-8")
ffibuilder = FFI()
ffibuilder.cdef(_header.split("/* begin */")[1].split("/* end */")[0])
ffibuilder.set_source(
    "horovod_sparse.kernels._native",
    '#include "kernels.h"',
    # Packaging wants relative paths.
    sources=[os.path.relpath(HERE / "kernels.cpp", ROOT)],
    depends=[
        os.path.relpath(HERE / name, ROOT) for name in ("kernels.h", "variants.h", "loops.h", "parallel.h", "search.h")
    ],
    include_dirs=[os.path.relpath(HERE, ROOT)],
    source_extension=".cpp",
    extra_compile_args=COMPILE,
    extra_link_args=LINK,
    optional=True,
)
