"""The names of variables."""

from __future__ import annotations

import pytest

pytest.importorskip("tensorflow")
pytest.importorskip("horovod.tensorflow", reason="Horovod was built without TensorFlow", exc_type=ImportError)

from horovod_sparse.tensorflow.names import same_name


@pytest.mark.parametrize(
    ("saved", "name", "same"),
    [
        ("sequential/dense/kernel", "sequential/dense/kernel", True),
        ("sequential/dense/kernel", "sequential_3/dense_1/kernel", True),
        ("sequential/dense_1/kernel", "dense/kernel", True),
        ("dense/kernel", "sequential/dense/kernel", True),
        ("sequential/dense/kernel", "sequential/dense/bias", False),
        ("embedding/kernel", "bedding/kernel", False),
    ],
)
def test_names_of_the_same_model(saved: str, name: str, same: bool) -> None:
    assert same_name(saved, name) == same
