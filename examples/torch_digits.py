"""Classify scikit-learn's bundled handwritten digits with a small CNN, data parallel, with compressed gradients.

    mpirun -np 2 python examples/torch_digits.py --compression sidco --ratio 0.001
    horovodrun -np 2 python examples/torch_digits.py --compression none
    torchrun --nproc-per-node 2 examples/torch_digits.py --transport ddp
    mpirun -np 2 python examples/torch_digits.py --optimizer adamw --lr 0.002 --local-updates
    mpirun -np 2 python examples/torch_digits.py --compression randomblock --ratio 0.01 --ahead 1

With more workers than idle cores set OMP_NUM_THREADS=1, or the workers' threads fight for the cores.
"""

from __future__ import annotations

import statistics
import time
from importlib import import_module
from importlib.util import find_spec
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
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler
from tqdm import tqdm

WARMUP_EPOCHS = 2


def load_data() -> tuple[TensorDataset, TensorDataset]:
    """Training and held-out images (N, 1, 8, 8) in 0..1 with their digit; the split is the same in every run."""
    images, digits = load_digits(return_X_y=True)
    x = torch.tensor(images, dtype=torch.float32).div_(16).view(-1, 1, 8, 8)
    y = torch.tensor(digits)
    train, held_out = train_test_split(torch.arange(len(y)), test_size=0.2, stratify=digits, random_state=0)
    return TensorDataset(x[train], y[train]), TensorDataset(x[held_out], y[held_out])


def make_model(width: int = 32) -> nn.Module:
    """151 thousand parameters; 602 thousand with width 64."""
    return nn.Sequential(
        nn.Conv2d(1, width, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(width, 2 * width, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(2 * width * 4 * 4, 4 * width),
        nn.ReLU(),
        nn.Linear(4 * width, 10),
    )


@torch.no_grad()
def evaluate(model: nn.Module, data: TensorDataset) -> tuple[float, float]:
    """Part of the images that the model names right, and its mean loss."""
    x, y = data.tensors
    model.eval()
    scores = model(x)
    model.train()
    return (scores.argmax(1) == y).float().mean().item(), F.cross_entropy(scores, y).item()


def main() -> None:
    parser = make_parser(__doc__.splitlines()[0], epochs=25, batch_size=16, lr=0.03, ratio=0.001)
    parser.add_argument("--width", type=int, default=32, help="channels of the first convolution")
    parser.add_argument(
        "--transport",
        choices=["horovod", "ddp"],
        default="horovod",
        help="ddp: torch.distributed, which needs no Horovod",
    )
    parser.add_argument("--optimizer", choices=["sgd", "adamw"], default="sgd")
    parser.add_argument(
        "--local-updates", action="store_true", help="exchange movements by LocalUpdates, which is the line for adamw"
    )
    args = parser.parse_args()
    if args.transport == "horovod" and find_spec("horovod") is None:
        parser.error("Horovod is not installed: start with torchrun and add --transport ddp, or install Horovod")
    hvd = import_module("ddp" if args.transport == "ddp" else "horovod_sparse.torch")
    hvd.init()
    torch.manual_seed(args.seed)

    train, held_out = load_data()
    sampler: DistributedSampler[Any] = DistributedSampler(
        train, num_replicas=hvd.size(), rank=hvd.rank(), seed=args.seed
    )
    loader = DataLoader(train, batch_size=args.batch_size, sampler=sampler, drop_last=True)

    network = model = make_model(args.width)
    # In your own script: compression = hvd.SIDCo(ratio=0.001).
    compression = make_compression(args, hvd)
    if args.transport == "horovod":
        hvd.broadcast_parameters(network.state_dict(), root_rank=0)
    if args.optimizer == "adamw":
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=args.lr)
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=optimizer_momentum(compression, args))
    if args.local_updates:
        if not hasattr(compression, "stats"):
            raise SystemExit("--local-updates needs a sparsifier")
        optimizer = hvd.LocalUpdates(optimizer, network, compression)
    elif args.transport == "ddp":
        model = hvd.wrap(network, compression, optimizer)
    else:
        names = network.named_parameters()
        optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=names, compression=compression)
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)

    numel = sum(parameter.numel() for parameter in network.parameters())
    log = RunLog(args.log_file, hvd)
    log.write("settings", **vars(args), workers=hvd.size(), parameters=numel)
    warmup_steps = WARMUP_EPOCHS * len(loader)
    step = 0
    started = time.perf_counter()
    for epoch in range(1, args.epochs + 1):
        sampler.set_epoch(epoch)
        losses, seconds = [], []
        for x, y in tqdm(loader, desc=f"epoch {epoch}/{args.epochs}", disable=hvd.rank() != 0, leave=False):
            step_started = time.perf_counter()
            step += 1
            for group in optimizer.param_groups:
                group["lr"] = args.lr * min(1.0, step / warmup_steps)
            optimizer.zero_grad()
            with local_ahead(optimizer, args) if args.local_updates else ahead(compression, model, args):
                loss = F.cross_entropy(model(x), y)
                loss.backward()
            optimizer.step()
            losses.append(loss.item())
            seconds.append(time.perf_counter() - step_started)

        mean_loss = hvd.allreduce(torch.tensor(statistics.fmean(losses)), name="mean_loss").item()
        if hvd.rank() == 0:  # all workers hold the same parameters, so one evaluates for all
            correct, held_out_loss = evaluate(network, held_out)
            log.write_epoch(
                epoch,
                step=step,
                loss=mean_loss,
                traffic=measure_traffic(compression, numel, hvd),
                seconds=seconds,
                text=f"accuracy {correct:.2%}",
                accuracy=correct,
                held_out_loss=held_out_loss,
            )

    parameters = {name: parameter.detach().numpy() for name, parameter in network.named_parameters()}
    agreed = check_replicas(parameters, hvd.allgather_object)
    log.write("end", seconds=time.perf_counter() - started, parameter_hash=agreed)


if __name__ == "__main__":
    main()
