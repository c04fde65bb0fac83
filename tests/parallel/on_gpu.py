"""Runs the scenarios of `torch.distributed` on a GPU that all ranks share, over NCCL.

    python -m tests.parallel.on_gpu [--ranks 2] [--only WORDS...] (in tests, with PyTorch for CUDA)

What tests make is made on the GPU, and what they read is brought from there. What the package makes is left as it is: if that
is on the wrong device, the scenario fails. NCCL takes each rank for a host of its own.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch.overrides import TorchFunctionMode

from tests.harness.launch import Launch
from tests.harness.process import ROOT

_LIBRARY = os.path.dirname(torch.__file__) + os.sep
_OPTIMIZERS = os.path.join(_LIBRARY, "optim") + os.sep
_EXAMPLES = str(ROOT / "examples") + os.sep
_LEFT_OUT = (
    # A GPU does not fit the stages before the last (docs/launching.md), so SIDCo sends other entries there than with NumPy.
    "the_hook_does_as_numpy_does[SIDCo",
)
_MAKERS = {
    torch.tensor, torch.zeros, torch.ones, torch.empty, torch.full, torch.rand, torch.randn, torch.randint, torch.arange,
    torch.linspace, torch.eye, torch.randperm, torch.sparse_coo_tensor, torch.as_tensor,
}  # fmt: skip


def _from_tests() -> bool:
    """Whether a test, rather than the package or an optimizer of PyTorch, calls."""
    frame: Any = sys._getframe(2)
    while frame is not None:
        name = frame.f_code.co_filename
        if name == __file__ or (name.startswith(_LIBRARY) and not name.startswith(_OPTIMIZERS)):
            frame = frame.f_back
            continue
        return name.startswith((str(ROOT / "tests"), _EXAMPLES))
    return False


class _Making(TorchFunctionMode):
    """Makes the tensors of tests on the GPU."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function in _MAKERS and kwargs.get("device") is None and _from_tests():
            # The same numbers as on the CPU.
            made = function(*args, **{**kwargs, "requires_grad": False}).cuda()
            return made.requires_grad_(kwargs.get("requires_grad", False))
        return function(*args, **kwargs)


def install() -> None:
    """From now on, in this process."""
    torch.zeros(1, device="cuda:0")
    to_numpy, from_numpy = torch.Tensor.numpy, torch.from_numpy

    def numpy(self: Any, **arguments: Any) -> Any:
        return to_numpy(self.cpu() if self.is_cuda and _from_tests() else self, **arguments)

    def made(array: Any) -> Any:
        tensor = from_numpy(array)
        return tensor.cuda() if _from_tests() else tensor

    patch.object(torch.Tensor, "numpy", numpy).start()
    patch.object(torch, "from_numpy", made).start()
    _Making().__enter__()


def main() -> int:
    # Scenarios are read here as `torchrun` reads them: Horovod is not needed.
    os.environ["TORCHELASTIC_RUN_ID"] = ""
    from .scenario import scenarios
    from .session import run_scenarios

    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--only", nargs="*", default=[])
    options = parser.parse_args()
    launch, known = Launch("torchrun", options.ranks, "ddp"), scenarios("ddp")
    del os.environ["TORCHELASTIC_RUN_ID"]
    chosen = [name for name, one in known.items() if launch in one.launches and not name.startswith(_LEFT_OUT)]
    chosen = [name for name in chosen if not options.only or any(word in name for word in options.only)]
    os.environ.update({"SPARSE_TEST_DEVICE": "cuda", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"})
    with tempfile.TemporaryDirectory() as folder:
        outcomes = run_scenarios(launch, chosen, Path(folder))
    failed = {name: str(one) for name, one in outcomes.items() if not one.passed}
    for name, text in failed.items():
        print(f"=== {name}\n{text}\n")
    print(f"{len(outcomes) - len(failed)} passed, {len(failed)} failed")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
