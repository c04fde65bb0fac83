"""What trains nothing with Horovod runs without it, and what does says what to do."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.harness.process import ROOT, python


def without_horovod(folder: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Run the interpreter of the tests where no module of Horovod can be imported."""
    # Python runs this file first, in every process.
    (folder / "sitecustomize.py").write_text("import sys\nsys.modules['horovod'] = None\n")
    return python(*arguments, limit=300, PYTHONPATH=f"{folder}:{ROOT}")


@pytest.mark.parametrize(
    ("script", "remedy"),
    [
        ("examples/demo.py", "add --transport ddp"),
        ("examples/torch_digits.py", "add --transport ddp"),
        ("benchmarks/step_time.py", "horovod-sparse try"),
    ],
)
def test_a_script_of_horovod_names_the_way_without_it(tmp_path: Path, script: str, remedy: str) -> None:
    done = without_horovod(tmp_path, ROOT / script)
    assert done.returncode and "Traceback" not in done.stderr
    assert remedy in done.stderr.splitlines()[-1]


@pytest.mark.full
def test_selections_are_timed_without_horovod(tmp_path: Path) -> None:
    done = without_horovod(tmp_path, ROOT / "benchmarks" / "selection.py", "--sizes", "2k", "--rows", "TopK")
    assert done.returncode == 0 and "| fp16: cast and back | " in done.stdout, done.stderr


@pytest.mark.full
def test_the_list_of_compressors_is_tested_without_horovod(tmp_path: Path) -> None:
    tests = ROOT / "tests" / "compressors" / "test_registry.py"
    done = without_horovod(tmp_path, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "not mypy", tests)
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout
