"""The tests of the kernels, and a million damaged messages, on a build that reports what memory and arithmetic must not do.

make sanitize, or: python ci/sanitize.py [ARGUMENTS OF PYTEST]
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections import Counter
from importlib import util
from pathlib import Path

ROOT = Path(__file__).parent.parent
BUILD = ROOT / "build" / "sanitize"
FLAGS = "-fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer -g"
MODULE = "horovod_sparse.kernels._native"


def build() -> None:
    # A build that fails leaves nothing behind, setuptools only warns of it.
    shutil.rmtree(BUILD, ignore_errors=True)
    flags = dict.fromkeys(("CFLAGS", "CXXFLAGS", "LDFLAGS"), FLAGS)
    places = ["--build-lib", str(BUILD), "--build-temp", str(BUILD / "temp")]
    command = [sys.executable, "setup.py", "-q", "build_ext", *places]
    subprocess.run(command, cwd=ROOT, env={**os.environ, **flags}, check=True)


def run(arguments: list[str]) -> int:
    """With the sanitizer's library in front of everything, as it must be."""
    compiler = os.environ.get("CXX", "g++")
    asked = subprocess.run([compiler, "-print-file-name=libasan.so"], capture_output=True, text=True, check=True)
    environment = {
        "LD_PRELOAD": asked.stdout.strip(),
        "ASAN_OPTIONS": "detect_leaks=0",
        "HOROVOD_SPARSE_KERNELS": "auto",
    }
    command = [sys.executable, __file__, *arguments]
    return subprocess.run(command, env={**os.environ, **environment}, check=False).returncode


def test(arguments: list[str]) -> int:
    import pytest

    (path,) = (BUILD / "horovod_sparse" / "kernels").glob("_native.*")
    assert b"__asan_report" in path.read_bytes() and b"__ubsan_handle" in path.read_bytes(), "the flags were not heeded"
    spec = util.spec_from_file_location(MODULE, path)
    assert spec is not None and spec.loader is not None
    # The package finds this module instead of the one beside it.
    sys.modules[MODULE] = util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[MODULE])
    # A report goes to standard error and ends the process: pytest must not keep it to itself.
    sys.path.insert(0, str(ROOT))
    tests = [str(ROOT / "tests" / "kernels" / f"test_{name}.py") for name in ("ops", "variants")]
    failed = pytest.main([*tests, "-q", "-s", *arguments])
    if not failed:
        fuzz_all(10**6, seed=0)
    return failed


def fuzz_all(messages: int, seed: int) -> None:
    """Give damaged messages of all kinds to every backend, and print what became of them."""
    from tests.harness.fuzz_messages import JUDGED, fuzz
    from tests.harness.receivers import CASES
    from tests.harness.table import WITH_OPERATIONS

    total: Counter[str] = Counter()
    begin = time.perf_counter()
    for name, case in CASES.items():
        # The others go through exchanges, which takes longer.
        counts = fuzz(name, WITH_OPERATIONS, messages // (8 if isinstance(case.exchange, JUDGED) else 100), seed)
        total += counts
        print(f"{name:20} {dict(sorted(counts.items()))}", flush=True)
    seconds = time.perf_counter() - begin
    print(
        f"{total['messages']} damaged messages in {seconds:.0f} s, {total['messages'] / seconds:.0f} per second. One by one, "
        f"{total['refused']} were refused, {total['decoded']} decoded and {total['not finite']} not finite. The other "
        f"{total['exchanged']} went through exchanges: {total['refused, exchanged']} of those were refused, "
        f"{total['decoded, exchanged']} decoded and {total['not finite, exchanged']} not finite. The outcome was the same with "
        f"{', '.join(backend.name for backend in WITH_OPERATIONS)}, and nothing was written beyond its memory."
    )


if __name__ == "__main__":
    if "libasan" in os.environ.get("LD_PRELOAD", ""):
        sys.exit(test(sys.argv[1:]))
    build()
    sys.exit(run(sys.argv[1:]))
