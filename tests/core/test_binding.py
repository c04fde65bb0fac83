"""Whether something can be a `compression=` of an adapter."""

from __future__ import annotations

from typing import Any

import pytest

from horovod_sparse.compressors import topk
from horovod_sparse.compressors.base import Compressor
from horovod_sparse.core.binding import check_kind
from horovod_sparse.tensorflow.compressors import TensorflowCompressor
from horovod_sparse.tensorflow.compressors import TopK as TensorflowTopK
from horovod_sparse.torch.compressors import TopK, TorchCompressor


class Stock:
    """What stock Horovod takes: a class or an instance with these."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, None]:
        return tensor, None

    @staticmethod
    def decompress(tensor: Any, ctx: None) -> Any:
        return tensor


@pytest.mark.parametrize("compression", [TopK(0.1, warmup=None), Stock, Stock()])
def test_ours_and_stock_ones_are_taken(compression: Any) -> None:
    check_kind(compression, TorchCompressor, "horovod_sparse.torch")


ANOTHER = "must be a compressor of horovod_sparse.torch, got one of horovod_sparse.*ratio=0.1"
NONE = r"such as TopK\(ratio=0.01\), or one of hvd.Compression, got"


@pytest.mark.parametrize(
    ("compression", "text"),
    [
        *((one, ANOTHER) for one in (TensorflowTopK(0.1), topk.TopK(0.1, warmup=None))),
        *((one, NONE) for one in ("TopK", None, 0.1, Compressor, object())),
        (TopK, "compression must be an instance, such as TopK"),
    ],
)
def test_what_is_none_of_the_adapter_is_refused(compression: Any, text: str) -> None:
    with pytest.raises(TypeError, match=text):
        check_kind(compression, TorchCompressor, "horovod_sparse.torch")
    with pytest.raises(
        TypeError, match=r"import the class from horovod_sparse.tensorflow, .* derive from TensorflowCompressor"
    ):
        check_kind(TopK(0.1, warmup=None), TensorflowCompressor, "horovod_sparse.tensorflow")
