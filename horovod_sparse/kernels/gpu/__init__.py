"""Selection on a GPU without waiting for it: Triton kernels and the class that launches them. Imports no Horovod.

Importing this module imports neither torch nor Triton; `available` says whether Triton is installed. PyTorch brings Triton
along where it is built for a GPU. With TRITON_INTERPRET=1 in the environment everything runs on the CPU, slowly. The tests
use this.
"""

from __future__ import annotations

from importlib.util import find_spec

from horovod_sparse.kernels import turned_off


def available() -> bool:
    """Return whether Triton is installed and kernels are not turned off with HOROVOD_SPARSE_KERNELS=off."""
    return find_spec("triton") is not None and not turned_off()
