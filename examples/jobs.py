"""What the examples for real work share: options for data and checkpoints, where training begins and pauses, the closing table.

Imports no framework: each example hands over its adapter, such as `horovod_sparse.torch`, as `hvd`. It also says how a rank's
file is written and read.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from closing import Row, closing_table
from common import RunLog, make_parser

from horovod_sparse.exchange.cost import allreduce_bytes


def make_job_parser(
    description: str, *, data: str, epochs: int, batch_size: int, lr: float, ratio: float
) -> argparse.ArgumentParser:
    """The options of every example, and those of the examples for real work. `data` says what --data names."""
    parser = make_parser(description, epochs=epochs, batch_size=batch_size, lr=lr, ratio=ratio)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--data", type=Path, help=data)
    source.add_argument("--synthetic", action="store_true", help="a small model and random data, to try it out")
    parser.add_argument(
        "--checkpoint-dir", type=Path, metavar="FOLDER", help="save checkpoints here, and resume from the last"
    )
    parser.add_argument(
        "--checkpoint-every",
        type=int,
        default=500,
        metavar="STEPS",
        help="besides the end of every epoch; not with fit",
    )
    parser.add_argument(
        "--pause-after", type=int, metavar="STEPS", help="end here, as a job at its time limit, to be resumed later"
    )
    return parser


@dataclass(frozen=True)
class Course:
    """Which steps a run makes, counted from the start of the first run."""

    epoch_steps: int
    total: int
    """Steps of the whole training, on which the learning rate depends."""
    last: int
    """After this step the run ends, or pauses."""
    checkpoint_every: int

    def saves(self, step: int) -> bool:
        """Whether a checkpoint is saved after so many steps."""
        return step % self.checkpoint_every == 0 or step % self.epoch_steps == 0 or step == self.last


def make_course(args: argparse.Namespace, epoch_steps: int) -> Course:
    """The steps that the options ask for."""
    if epoch_steps < 1:
        raise SystemExit("there must be a whole batch for every worker, got less; lower --batch-size")
    total = args.epochs * epoch_steps
    last = total if args.pause_after is None else min(total, args.pause_after)
    return Course(epoch_steps, total, last, args.checkpoint_every)


def save(args: argparse.Namespace, hvd: ModuleType, step: int, write: Callable[[Path], object]) -> None:
    """Let every rank write its file, and remember the step when all of them are complete."""
    # The one before is there until this one is complete.
    write(_file(args, hvd, step))
    hvd.allgather_object(None)
    if hvd.rank() == 0:
        new = args.checkpoint_dir / "new"
        new.write_text(str(step))
        new.rename(args.checkpoint_dir / "last")


def resume(args: argparse.Namespace, hvd: ModuleType, read: Callable[[Path], object]) -> int:
    """Let every rank read its file of the last checkpoint. Return the number of steps that are done: 0 if there is none."""
    if args.checkpoint_dir is None:
        return 0
    last = args.checkpoint_dir / "last"
    if not last.exists():
        return 0
    step = int(last.read_text())
    read(_file(args, hvd, step))
    if hvd.rank() == 0:
        print(f"resumed after step {step} from {args.checkpoint_dir}", flush=True)
    return step


def _file(args: argparse.Namespace, hvd: ModuleType, step: int) -> Path:
    args.checkpoint_dir.mkdir(parents=True, exist_ok=True)
    return args.checkpoint_dir / f"step-{step}-rank-{hvd.rank()}-of-{hvd.size()}"


def start_log(args: argparse.Namespace, hvd: ModuleType, parameters: int) -> RunLog:
    """The log. With checkpoints it goes on where an earlier run has ended."""
    log = RunLog(args.log_file, hvd, append=args.checkpoint_dir is not None)
    log.write("settings", **vars(args), workers=hvd.size(), parameters=parameters)
    return log


def print_closing_table(
    args: argparse.Namespace, log: RunLog, hvd: ModuleType, parameters: int, held_out: str = "accuracy"
) -> None:
    """Print what the last epoch found on held-out data, and what this run has sent, as the demonstration does."""
    if hvd.rank() != 0:
        return
    if not log.last:
        print("nothing was left to do: the last checkpoint is that of the last step")
        return
    found = log.last[held_out]
    row = Row(
        args.compression if args.compression in ("none", "fp16") else f"{args.compression} {args.ratio:g}",
        log.last["ratio"],
        f"{found:.2%}" if held_out == "accuracy" else f"{found:.2f}",
        log.last["bytes_per_step"],
        log.last["step_seconds"],
    )
    print(f"\n{closing_table([row], allreduce_bytes(4 * parameters, hvd.size()), held_out)}")
