"""Scenarios: local updates over Horovod, and of NumPy arrays over MPI."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import horovod.torch as hvd
import numpy as np

import horovod_sparse.torch as sparse

from . import local_laws
from .common import everyone
from .scenario import EVERYWHERE, MPI, scenario


@scenario(*EVERYWHERE, cases=local_laws.LAWS)
def local_updates(law: Any, *arguments: Any) -> None:
    make = local_laws.torch_maker(sparse)
    law(local_laws.Workers(hvd.rank(), hvd.size(), everyone, make), *arguments)


@scenario(*MPI, cases=local_laws.LAWS)
def local_updates_of_arrays(law: Any, *arguments: Any) -> None:
    import mpi4py.MPI

    import horovod_sparse.numpy as library

    def make(name: str, arguments: dict[str, Any], **settings: Any) -> Any:
        parameters = {name: np.zeros(tuple(shape), np.float32) for name, shape in local_laws.SHAPES.items()}
        reduce = library.SparseAllreduce(mpi4py.MPI.COMM_WORLD, getattr(library, name)(**arguments))
        local = library.LocalUpdates(reduce, parameters, **settings)

        def move(by: Mapping[str, np.ndarray]) -> None:
            for name, one in by.items():
                parameters[name] += one
            local.step()

        return parameters, move, local

    law(local_laws.Workers(hvd.rank(), hvd.size(), everyone, make), *arguments)
