"""The API reference is made without a warning."""

from __future__ import annotations

from pathlib import Path

import pytest
from process import python

from horovod_sparse.compressors import COMPRESSORS


@pytest.mark.full
def test_the_reference_is_made_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("pdoc")
    done = python("docs/api.py", tmp_path, limit=300)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    for adapter in ("torch", "tensorflow", "tensorflow/keras", "numpy"):
        page = (tmp_path / "horovod_sparse" / f"{adapter}.html").read_text(encoding="utf-8")
        for cls in COMPRESSORS:
            assert f'id="{cls.__name__}"' in page
        assert 'id="allreduce"' not in page, "Horovod's names are not ours to describe"
    assert not [*tmp_path.glob("horovod_sparse/kernels*"), *tmp_path.glob("horovod_sparse/tools*")]
