"""What the character models share: options, text, held-out loss, and training with Horovod. PyTorch only."""

from __future__ import annotations

import argparse
import math
import statistics
import sysconfig
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from common import (
    RunLog,
    ahead,
    check_replicas,
    local_ahead,
    make_compression,
    make_parser,
    measure_traffic,
    optimizer_momentum,
)
from torch import Tensor, nn
from tqdm import tqdm

import horovod_sparse.torch as hvd

CHARACTERS = 128  # ASCII; the few others in the sources become "?"
EVALUATION_CHARACTERS = 16384
# Tests are repetitive, encodings and pydoc_data are tables, and installed packages are not the standard library.
SKIPPED_FOLDERS = {"test", "tests", "idle_test", "encodings", "pydoc_data", "site-packages"}


def make_text_parser(description: str, *, batch_size: int, lr: float, ratio: float) -> argparse.ArgumentParser:
    """The options of every example, and those about text and training that the character models have in common."""
    parser = make_parser(description, epochs=8, batch_size=batch_size, lr=lr, ratio=ratio)
    parser.add_argument("--epoch-steps", type=int, default=500, help="steps between two evaluations")
    parser.add_argument(
        "--warmup-steps", type=int, default=60, help="steps over which the learning rate rises, to fall after"
    )
    parser.add_argument("--bytes", type=int, default=200_000, help="characters of source text, 5 %% are held out")
    parser.add_argument("--context", type=int, default=32, help="characters that the model sees")
    parser.add_argument("--optimizer", choices=["sgd", "adamw"], default="sgd")
    parser.add_argument(
        "--every",
        type=int,
        default=0,
        metavar="STEPS",
        help="exchange movements by LocalUpdates after so many steps, which is the line for adamw with 1; 0: gradients",
    )
    return parser


def make_optimizer(model: nn.Module, args: argparse.Namespace, compression: Any) -> tuple[Any, Any]:
    """What is stepped, and the compressor that counts bytes."""
    if args.optimizer == "adamw":
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.1)
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=optimizer_momentum(compression, args))
    if not args.every:
        names = model.named_parameters()
        return hvd.DistributedOptimizer(optimizer, named_parameters=names, compression=compression), compression
    if args.compression == "fp16":
        raise SystemExit(
            "--every needs --compression none or a sparsifier, got fp16: what is exchanged has no Horovod compression"
        )
    if args.epoch_steps % args.every:
        raise SystemExit(f"--epoch-steps must be a multiple of --every, got {args.epoch_steps} and {args.every}")
    sparse = compression if hasattr(compression, "stats") else None
    local = hvd.LocalUpdates(optimizer, model, sparse, every=args.every)
    return local, local.compression


def gradients_of(model: nn.Module, args: argparse.Namespace, compression: Any, optimizer: Any) -> Any:
    """The block for forward and backward."""
    return local_ahead(optimizer, args) if args.every else ahead(compression, model, args)


def read_corpus(limit: int) -> Tensor:
    """The first `limit` characters of the standard library's sources in the order of their names, as uint8."""
    root = Path(sysconfig.get_path("stdlib"))
    text = bytearray()
    for path in sorted(root.rglob("*.py")):
        if SKIPPED_FOLDERS.isdisjoint(path.relative_to(root).parts):
            text += path.read_text(encoding="utf-8", errors="replace").encode("ascii", errors="replace")
        if len(text) >= limit:
            break
    return torch.frombuffer(text[:limit], dtype=torch.uint8)


def sample(text: Tensor, batch: int, context: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Random windows of `text` and, for each position, the character that follows."""
    starts = torch.randint(len(text) - context, (batch, 1), generator=generator)
    windows = text[starts + torch.arange(context + 1)].long()
    return windows[:, :-1], windows[:, 1:]


@torch.no_grad()
def bits_per_character(model: nn.Module, text: Tensor, context: int) -> float:
    """Mean over the beginning of `text`, cut into windows that do not overlap."""
    windows = text[:EVALUATION_CHARACTERS].unfold(0, context + 1, context + 1).long()
    model.eval()
    nats = [
        F.cross_entropy(model(part[:, :-1]).flatten(0, 1), part[:, 1:].flatten(), reduction="sum").item()
        for part in windows.split(32)
    ]
    model.train()
    return sum(nats) / windows[:, 1:].numel() / math.log(2)


def train(model: nn.Module, args: argparse.Namespace) -> None:
    """Train a model that gives scores of the next character at every position. Horovod is initialised."""
    # Rank 0 reads for all: another machine may have another version of Python.
    text = hvd.broadcast_object(read_corpus(args.bytes) if hvd.rank() == 0 else None, root_rank=0, name="text")
    boundary = int(0.95 * len(text))
    # Every worker trains on its own part of the text.
    shard = text[:boundary].tensor_split(hvd.size())[hvd.rank()]
    generator = torch.Generator().manual_seed(args.seed)

    # In your own script: compression = hvd.SIDCo(ratio=0.001).
    compression = make_compression(args, hvd)
    # No clipping after the reduction, because it would cut off just what had waited.
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer, compression = make_optimizer(model, args, compression)
    if not args.every:
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)

    numel = sum(parameter.numel() for parameter in model.parameters())
    log = RunLog(args.log_file, hvd)
    log.write("settings", **vars(args), workers=hvd.size(), parameters=numel)
    steps = args.epochs * args.epoch_steps
    step = 0
    started = time.perf_counter()
    for epoch in range(1, args.epochs + 1):
        losses, seconds = [], []
        for _ in tqdm(
            range(args.epoch_steps), desc=f"epoch {epoch}/{args.epochs}", disable=hvd.rank() != 0, leave=False
        ):
            step_started = time.perf_counter()
            step += 1
            for group in optimizer.param_groups:
                group["lr"] = args.lr * min(step / args.warmup_steps, max(1 - step / steps, 0.02))
            x, y = sample(shard, args.batch_size, args.context, generator)
            optimizer.zero_grad()
            with gradients_of(model, args, compression, optimizer):
                loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
                loss.backward()
            optimizer.step()
            losses.append(loss.item())
            seconds.append(time.perf_counter() - step_started)

        mean_loss = hvd.allreduce(torch.tensor(statistics.fmean(losses)), name="mean_loss").item()
        # All workers hold the same parameters. All evaluate, since one alone cannot where each has a shard of the model.
        bits = bits_per_character(model, text[boundary:], args.context)
        if hvd.rank() == 0:
            log.write_epoch(
                epoch,
                step=step,
                loss=mean_loss,
                traffic=measure_traffic(compression, numel, hvd).spread_over(max(args.every, 1)),
                seconds=seconds,
                text=f"held out {bits:.3f} bits per character",
                bits_per_character=bits,
            )

    whole = {name: getattr(one, "full_tensor", one.detach)() for name, one in model.named_parameters()}
    parameters = {name: one.detach().numpy() for name, one in whole.items()}
    agreed = check_replicas(parameters, hvd.allgather_object)
    log.write("end", seconds=time.perf_counter() - started, parameter_hash=agreed)
