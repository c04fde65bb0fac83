"""What the examples share: options, choice of compression, traffic, log, check that the workers agree.

Imports no framework: each example hands over its adapter, such as `horovod_sparse.torch`, as `hvd`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray
from own import bound, own_class
from tqdm import tqdm

from horovod_sparse.compressors import COMPRESSORS
from horovod_sparse.compressors.momentum import MomentumCorrection
from horovod_sparse.exchange.cost import allreduce_bytes

CLASSES = {cls.__name__.lower(): cls.__name__ for cls in COMPRESSORS}
COMPRESSIONS = ["none", "fp16", *CLASSES]
EXCHANGES = {
    "pairs": ("Pairs",),
    "packed": ("Pairs", "packed"),
    "union": ("Union",),
    "shared": ("SharedIndices",),
}
"""What each exchange is made of: its class and the type of its values."""
RANDOM = ("randomk", "randomblock")
"""Choices that train only where gradients know of what waits."""


def compression_name(text: str) -> str:
    """What is given for `--compression`, if there is such a compression."""
    if text not in COMPRESSIONS and ":" not in text:
        raise argparse.ArgumentTypeError(
            f"--compression must be one of {', '.join(COMPRESSIONS)} or module:Class, got {text!r}"
        )
    if ":" in text:
        own_class(text)
    return text


def class_of(name: str, hvd: ModuleType) -> Any:
    """The class of a compressor by its name."""
    return bound(own_class(name), hvd) if ":" in name else getattr(hvd, CLASSES[name])


def make_parser(description: str, *, epochs: int, batch_size: int, lr: float, ratio: float) -> argparse.ArgumentParser:
    """The options that every example has, with the example's own defaults."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument(
        "--compression",
        type=compression_name,
        default="sidco",
        metavar="NAME",
        help=f"{', '.join(COMPRESSIONS)}, or module:Class for a compressor of one's own; none and fp16 are Horovod's, noop "
        "sends every gradient entry the sparse way",
    )
    parser.add_argument("--ratio", type=float, default=ratio, help="part of the gradient entries to send")
    parser.add_argument(
        "--granularity",
        choices=["layer", "model"],
        help="what entries are selected from at once; without it buckets of 25 MiB",
    )
    parser.add_argument("--no-residual", action="store_true", help="forget what was not sent: no error feedback")
    parser.add_argument(
        "--exchange", choices=EXCHANGES, help="how entries are exchanged; by default the compression's own"
    )
    parser.add_argument(
        "--distribution",
        choices=["exponential", "gamma", "gpareto"],
        default="exponential",
        help="what sidco fits to the gradient's magnitudes",
    )
    parser.add_argument("--momentum", type=float, default=0.9, help="of the optimizer, where it has one")
    parser.add_argument(
        "--momentum-correction",
        action="store_true",
        help="momentum before the selection with masking, as in DGC, and an optimizer without",
    )
    parser.add_argument(
        "--no-masking", action="store_true", help="with --momentum-correction: momentum goes on where entries were sent"
    )
    parser.add_argument(
        "--lr-in-residual",
        action="store_true",
        help="keep what was not sent in units of the update; topk with this and --momentum 0 is Sparsified SGD with Memory",
    )
    parser.add_argument(
        "--warmup",
        type=lambda text: {"none": None, "auto": "auto"}[text] if text in ("none", "auto") else float(text),
        default="auto",
        metavar="C",
        help="the ratio of step t is at least C/(t+1); none: the ratio from the first step on",
    )
    parser.add_argument(
        "--ahead",
        type=float,
        metavar="C",
        help="compute gradients where the part C of this worker's residual has moved the parameters already (PyTorch); without "
        "it, 1 with randomk and randomblock, 0.5 with local updates, and else 0",
    )
    parser.add_argument("--threshold", type=float, default=0.01, help="magnitude above which threshold sends entries")
    parser.add_argument("--epochs", type=int, default=epochs, help="number of evaluations")
    parser.add_argument("--batch-size", type=int, default=batch_size, help="samples per worker and step")
    parser.add_argument("--lr", type=float, default=lr, help="learning rate after the warm-up")
    parser.add_argument("--seed", type=int, default=0)
    # Not just --log: horovodrun takes that, even behind its command, for an abbreviation of its own options and refuses it.
    parser.add_argument("--log-file", type=Path, metavar="FILE", help="write a JSON-lines log")
    return parser


def make_compression(args: argparse.Namespace, hvd: ModuleType) -> Any:
    """The object that `hvd.DistributedOptimizer(compression=...)` takes."""
    common: dict[str, Any] = {
        "warmup": args.warmup,
        "residual": not args.no_residual,
        "lr_in_residual": args.lr_in_residual,
    }
    if args.granularity is not None:
        common["granularity"] = args.granularity
    if args.exchange is not None:
        name, *arguments = EXCHANGES[args.exchange]
        common["exchange"] = getattr(hvd, name)(*arguments)
    if args.momentum_correction:
        common["momentum"] = MomentumCorrection(args.momentum, masking=not args.no_masking)
    ratio = args.ratio
    match args.compression:
        case "none":
            return hvd.Compression.none
        case "fp16":
            return hvd.Compression.fp16
        case "noop":
            return hvd.NoOp(**common)
        case "sidco":
            return hvd.SIDCo(ratio, distribution=args.distribution, **common)
        case "dgc":
            return hvd.DGC(ratio, seed=args.seed, **common)
        case "randomk" | "randomblock":
            return class_of(args.compression, hvd)(ratio, seed=args.seed, **common)
        case "threshold":
            return hvd.Threshold(args.threshold, ratio=ratio, **common)
    return class_of(args.compression, hvd)(ratio, **common)


def optimizer_momentum(compression: Any, args: argparse.Namespace) -> float:
    """The optimizer's momentum; 0 where the compression has momentum of its own, which would come on top of it."""
    return 0.0 if getattr(compression, "momentum_correction", None) else args.momentum


def ahead(compression: Any, model: Any, args: argparse.Namespace) -> AbstractContextManager[None]:
    """The block for forward and backward (PyTorch). In your own script: `with compression.ahead(model, 0.5):`."""
    coefficient = (1.0 if args.compression in RANDOM else 0.0) if args.ahead is None else args.ahead
    if not coefficient:
        return nullcontext()
    if not hasattr(compression, "ahead"):
        raise SystemExit(f"--ahead needs a sparsifier, got --compression {args.compression}")
    block: AbstractContextManager[None] = compression.ahead(model, coefficient)
    return block


def local_ahead(local: Any, args: argparse.Namespace) -> AbstractContextManager[None]:
    """The same for `LocalUpdates`. In your own script: `with local.ahead():`."""
    coefficient = 0.5 if args.ahead is None else args.ahead
    block: AbstractContextManager[None] = local.ahead(coefficient) if coefficient else nullcontext()
    return block


@dataclass(frozen=True)
class Traffic:
    """What one worker sends in one step, mean of the steps so far."""

    bytes_per_step: float
    ratio: float

    def spread_over(self, steps: int) -> Traffic:
        """The same of one step, where there is an exchange only after so many."""
        return Traffic(self.bytes_per_step / steps, self.ratio)


def measure_traffic(compression: Any, parameters: int, hvd: ModuleType) -> Traffic:
    """Counted by the compressor if it is a sparse one, computed for a dense ring allreduce of so many parameters."""
    if hvd.size() == 1:
        return Traffic(bytes_per_step=0.0, ratio=1.0)
    if hasattr(compression, "stats"):
        mean = compression.stats().mean
        return Traffic(bytes_per_step=mean.bytes_sent, ratio=mean.total.ratio)
    itemsize = 2 if compression is hvd.Compression.fp16 else 4
    return Traffic(bytes_per_step=allreduce_bytes(parameters * itemsize, hvd.size()), ratio=1.0)


class RunLog:
    """JSON lines: one "settings", then one "epoch" per epoch, then one "end". Only rank 0 writes.

    Args:
        append: keep the lines of an earlier run, which this one continues.
    """

    def __init__(self, path: Path | None, hvd: ModuleType, *, append: bool = False) -> None:
        mode = "a" if append else "w"
        self._file = path.open(mode, encoding="utf-8") if path is not None and hvd.rank() == 0 else None
        self.last: dict[str, float] = {}
        """The last epoch that was written, without its number; empty before it and on other ranks."""

    def write(self, event: str, **fields: Any) -> None:
        """Append a line; it is on disk when this returns, so that a run that dies leaves what it had."""
        if self._file is not None:
            print(json.dumps({"event": event, **fields}, default=str), file=self._file, flush=True)

    def write_epoch(
        self,
        epoch: int,
        *,
        step: int,
        loss: float,
        traffic: Traffic,
        seconds: Sequence[float],
        text: str,
        **held_out: float,
    ) -> None:
        """Append the line of an epoch and print it, with what was measured on held-out data, which `text` says in words.

        Args:
            step: steps since the start.
            loss: mean of the epoch's steps and of all workers.
            seconds: of each of the epoch's steps.
        """
        self.last = {
            "step": step,
            "loss": loss,
            **held_out,
            "bytes_per_step": traffic.bytes_per_step,
            "step_seconds": statistics.median(seconds),
            "seconds": sum(seconds),
            "ratio": traffic.ratio,
        }
        self.write("epoch", epoch=epoch, **self.last)
        sent = f"{traffic.bytes_per_step:,.0f} bytes per step, ratio {traffic.ratio:.5f}"
        tqdm.write(f"epoch {epoch:2d}  loss {loss:.4f}  {text}  {sent}")


def check_replicas(parameters: Mapping[str, NDArray[Any]], allgather_object: Callable[..., list[str]]) -> str:
    """Hash of all parameters; raises if it is not the same on every worker, bit by bit. The gathering is Horovod's."""
    digest = hashlib.sha256()
    for name, values in parameters.items():
        digest.update(name.encode())
        digest.update(np.ascontiguousarray(values).tobytes())
    hashes = allgather_object(digest.hexdigest(), name="parameter_hash")
    if len(set(hashes)) != 1:
        listing = ", ".join(f"rank {rank}: {value[:12]}" for rank, value in enumerate(hashes))
        raise RuntimeError(f"the workers ended with different parameters ({listing})")
    return hashes[0]
