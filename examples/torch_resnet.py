"""Train a ResNet of torchvision on folders of images or on CIFAR-10, data parallel, with compressed gradients.

    mpirun -np 2 python examples/torch_resnet.py --data FOLDER --compression sidco --ratio 0.01
    mpirun -np 2 python examples/torch_resnet.py --synthetic --epochs 1

FOLDER has train/ and val/, which have a folder of images for every class, or it has cifar-10-batches-py/.
docs/libraries.md says more.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from functools import partial
from itertools import islice
from typing import Any

import torch
import torch.nn.functional as F
from common import ahead, check_replicas, make_compression, measure_traffic, optimizer_momentum
from jobs import make_course, make_job_parser, print_closing_table, resume, save, start_log
from torch import nn
from torch.utils.data import DataLoader, Dataset, Subset
from torch.utils.data.distributed import DistributedSampler
from torch_states import read_states, write_states
from torchvision import datasets, models, transforms

import horovod_sparse.torch as hvd

MEAN, DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
"""Of ImageNet's colours."""


class Changed(Dataset[Any]):
    """Images that are changed at random, in a way that depends on seed, epoch and index alone.

    So a run that is resumed within an epoch sees what it would have seen, whatever the number of loading processes.
    """

    def __init__(self, images: Dataset[Any], seed: int) -> None:
        self.images = images
        self.seed = seed
        self.epoch = 0

    def __len__(self) -> int:
        return len(self.images)  # type: ignore[arg-type]

    def __getitem__(self, index: int) -> Any:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(hash((self.seed, self.epoch, index)))
            return self.images[index]


def load_data(args: argparse.Namespace) -> tuple[Dataset[Any], Dataset[Any], int]:
    """Images to train on, held-out images, and the number of classes."""
    finish = [transforms.ToTensor(), transforms.Normalize(MEAN, DEVIATION)]
    if args.synthetic:
        images = datasets.FakeData(64, (3, 32, 32), num_classes=4, transform=transforms.Compose(finish))
        return images, Subset(images, range(16)), 4
    if (args.data / "cifar-10-batches-py").is_dir():
        change = transforms.Compose([transforms.RandomCrop(32, 4), transforms.RandomHorizontalFlip(), *finish])
        train = datasets.CIFAR10(args.data, train=True, transform=change)
        return train, datasets.CIFAR10(args.data, train=False, transform=transforms.Compose(finish)), 10
    change = transforms.Compose([transforms.RandomResizedCrop(224), transforms.RandomHorizontalFlip(), *finish])
    keep = transforms.Compose([transforms.Resize(256), transforms.CenterCrop(224), *finish])
    folders = datasets.ImageFolder(args.data / "train", change), datasets.ImageFolder(args.data / "val", keep)
    if folders[0].classes != folders[1].classes:
        raise SystemExit(f"{args.data}/train and {args.data}/val must have the same classes")
    return *folders, len(folders[0].classes)


def make_model(args: argparse.Namespace, classes: int) -> nn.Module:
    """torchvision's network; for the small images of CIFAR-10 its first layers keep the size."""
    name = "resnet18" if args.synthetic else args.model
    model: nn.Module = getattr(models, name)(num_classes=classes)
    if not args.synthetic and (args.data / "cifar-10-batches-py").is_dir():
        model.conv1 = nn.Conv2d(3, 64, 3, padding=1, bias=False)
        model.maxpool = nn.Identity()
    return model


def lr_factor(step: int, warmup: float, total: int) -> float:
    """Rises to 1 in the warm-up, then falls along a cosine to 0. Steps count from 0."""
    if step < warmup:
        return (step + 1) / (warmup + 1)
    return 0.5 * (1 + math.cos(math.pi * (step - warmup) / (total - warmup)))


@torch.no_grad()
def evaluate(model: nn.Module, held_out: Dataset[Any], args: argparse.Namespace, device: torch.device) -> float:
    """Part of the held-out images that the model names right. Every worker looks at its own part of them."""
    total = len(held_out)  # type: ignore[arg-type]
    mine = Subset(held_out, range(hvd.rank(), total, hvd.size()))
    model.eval()
    correct = torch.zeros((), device=device)
    for images, labels in DataLoader(mine, args.batch_size, num_workers=args.loaders):
        with torch.autocast(device.type, torch.bfloat16, enabled=not args.float32):
            scores = model(images.to(device, memory_format=torch.channels_last))
        correct += (scores.argmax(1) == labels.to(device)).sum()
    model.train()
    return hvd.allreduce(correct, op=hvd.Sum, name="correct").item() / total


def main() -> None:
    parser = make_job_parser(
        __doc__.splitlines()[0],
        data="folder with train/ and val/, or with cifar-10-batches-py/",
        epochs=90,
        batch_size=32,
        lr=0.1,
        ratio=0.01,
    )
    parser.add_argument("--model", choices=["resnet18", "resnet34", "resnet50"], default="resnet50")
    parser.add_argument("--float32", action="store_true", help="no autocast to bfloat16")
    parser.add_argument("--weight-decay", type=float, default=1e-4)
    parser.add_argument("--warmup-epochs", type=float, default=5, help="over which the learning rate rises")
    parser.add_argument("--loaders", type=int, default=0, help="processes that read images, for every worker")
    args = parser.parse_args()
    hvd.init()
    torch.manual_seed(args.seed)
    device = torch.device("cuda", hvd.local_rank()) if torch.cuda.is_available() else torch.device("cpu")

    images, held_out, classes = load_data(args)
    train = Changed(images, args.seed)
    sampler: DistributedSampler[Any] = DistributedSampler(train, hvd.size(), hvd.rank(), seed=args.seed, drop_last=True)
    course = make_course(args, len(sampler) // args.batch_size)

    # In your own script: compression = hvd.SIDCo(ratio=0.01).
    compression = make_compression(args, hvd)
    # Gradients have the layout of their parameters, and Horovod's own exchanges refuse channels_last.
    sparse = hasattr(compression, "stats")
    layout = torch.channels_last if sparse else torch.contiguous_format
    model = make_model(args, classes).to(device)
    # Before: Horovod refuses channels_last here, too.
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    # PyTorch's types do not know this argument of modules.
    model = model.to(memory_format=layout)  # type: ignore[call-overload]
    optimizer = torch.optim.SGD(
        model.parameters(),
        lr=args.lr,
        momentum=optimizer_momentum(compression, args),
        weight_decay=args.weight_decay,
    )
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(), compression=compression)
    # The dense exchanges have no state.
    kept = {"model": model, "optimizer": optimizer, **({"compression": compression} if sparse else {})}
    step = resume(args, hvd, partial(read_states, kept))

    numel = sum(parameter.numel() for parameter in model.parameters())
    log = start_log(args, hvd, numel)
    warmup = min(args.warmup_epochs * course.epoch_steps, course.total - 1)
    started = time.perf_counter()
    while step < course.last:
        epoch, done = divmod(step, course.epoch_steps)
        sampler.set_epoch(epoch)
        train.epoch = epoch
        # What this epoch has done already is left out before it is read.
        order = list(sampler)[done * args.batch_size :]
        loader = DataLoader(
            train,
            args.batch_size,
            sampler=order,
            num_workers=args.loaders,
            drop_last=True,
            pin_memory=device.type == "cuda",
        )
        losses, seconds = [], []
        for x, y in islice(loader, course.last - step):
            step_started = time.perf_counter()
            for group in optimizer.param_groups:
                group["lr"] = args.lr * lr_factor(step, warmup, course.total)
            x, y = x.to(device, memory_format=torch.channels_last), y.to(device)
            optimizer.zero_grad()
            with ahead(compression, model, args):
                # Parameters, gradients and residuals stay float32; no GradScaler is needed.
                with torch.autocast(device.type, torch.bfloat16, enabled=not args.float32):
                    loss = F.cross_entropy(model(x), y)
                loss.backward()
            optimizer.step()
            losses.append(loss.item())
            seconds.append(time.perf_counter() - step_started)
            step += 1
            if args.checkpoint_dir and course.saves(step):
                save(args, hvd, step, partial(write_states, kept))

        accuracy = evaluate(model, held_out, args, device)
        mean_loss = hvd.allreduce(torch.tensor(statistics.fmean(losses)), name="mean_loss").item()
        if hvd.rank() == 0:
            log.write_epoch(
                epoch + 1,
                step=step,
                loss=mean_loss,
                traffic=measure_traffic(compression, numel, hvd),
                seconds=seconds,
                text=f"accuracy {accuracy:.2%}",
                accuracy=accuracy,
            )

    parameters = {name: parameter.detach().cpu().numpy() for name, parameter in model.named_parameters()}
    agreed = check_replicas(parameters, hvd.allgather_object)
    log.write("end", seconds=time.perf_counter() - started, parameter_hash=agreed)
    print_closing_table(args, log, hvd, numel)


if __name__ == "__main__":
    main()
