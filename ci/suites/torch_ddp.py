"""PyTorch's own tests of `DistributedDataParallel`, as a file of tests for pytest, for 2 ranks over Gloo on CPUs.

Each test starts its ranks. `no_gpu` lets tests run that ask for GPUs.
"""

from __future__ import annotations

import inspect
import os
import re

# The module of the tests reads these when it is imported.
os.environ.update(BACKEND="gloo", WORLD_SIZE="2")

import torch
from torch.testing._internal.distributed.distributed_test import DistributedTest, TestDistBackend

from suites import ddp_models, outcomes

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

if outcomes.ours():
    ddp_models.put_in()
