"""PyTorch's own tests of `DistributedDataParallel`, as a file of tests for pytest, for 2 ranks over Gloo on CPUs.

Each test starts its ranks. A model gets a compressor with its first forward pass if the test has registered no hook until
then. `no_gpu` lets tests run that ask for GPUs.
"""

from __future__ import annotations

import inspect
import os
import re
from typing import Any

# The module of the tests reads these when it is imported.
os.environ.update(BACKEND="gloo", WORLD_SIZE="2")

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.distributed_test import DistributedTest, TestDistBackend

from horovod_sparse.torch import TopK, register
from suites import outcomes

_CONCERNED = re.compile(r"DistributedDataParallel|_ddp_|DDP")
"""What is in the lines of a test that has to do with DDP. The others are about collectives."""
_TOO_LONG = ("test_ddp_uneven_inputs",)
"""Tests that do not end within the 400 s that PyTorch gives them on 2 cores, dense either."""


class TestDDP(TestDistBackend, DistributedTest._DistTestBase):
    def setUp(self) -> None:
        super().setUp()
        # Ranks that are forked need not import PyTorch again, as those would that are spawned.
        self._start_processes(torch.multiprocessing.get_context("fork").Process)


for _name, _test in inspect.getmembers(TestDDP, inspect.isfunction):
    _text = inspect.getsource(inspect.unwrap(_test))
    if _name.startswith("test_") and (_name in _TOO_LONG or not _CONCERNED.search(_text)):
        setattr(TestDDP, _name, None)
# The classes are tests themselves where their names are in this module.
del TestDistBackend, DistributedTest


def _put_in() -> None:
    forward, builtin = DistributedDataParallel.forward, DistributedDataParallel._register_builtin_comm_hook
    settled = "_has_a_hook"

    def with_hook(self: DistributedDataParallel, *inputs: Any, **named: Any) -> Any:
        if not self._comm_hooks and not getattr(self, settled, False):
            setattr(self, settled, True)
            register(self, TopK(1.0, min_numel=0, warmup=None))
            outcomes.note_use()
        return forward(self, *inputs, **named)

    def with_builtin(self: DistributedDataParallel, kind: Any) -> None:
        setattr(self, settled, True)
        builtin(self, kind)

    DistributedDataParallel.forward = with_hook  # type: ignore[method-assign]
    DistributedDataParallel._register_builtin_comm_hook = with_builtin  # type: ignore[method-assign]


if outcomes.ours():
    _put_in()
