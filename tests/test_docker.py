"""One version everywhere, and an environment in which no test skips for want of something."""

from __future__ import annotations

import re
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

import horovod_sparse
from horovod_sparse import kernels

yaml = pytest.importorskip("yaml")

ROOT = Path(__file__).parent.parent


def test_one_version_everywhere() -> None:
    version = horovod_sparse.__version__
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == version
    newest = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest is not None
    assert newest.group(1) == version


@pytest.mark.skipif(not Path(sys.prefix, ".setup").exists(), reason="the environment is not one of `make setup`")
def test_make_setup_has_installed_what_tests_skip_without() -> None:
    for name in ("triton", "xdist", "mpi4py", "matplotlib", "sklearn"):
        assert find_spec(name) is not None, f"{name} is missing: run 'make clean setup'"
    assert kernels.compiled(), "the kernels are missing: see .venv/setup.log"
