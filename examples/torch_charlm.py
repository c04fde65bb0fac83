"""Train a small transformer to continue the source text of Python's standard library, with compressed gradients.

    mpirun -np 2 python examples/torch_charlm.py --compression sidco --ratio 0.001
    horovodrun -np 2 python examples/torch_charlm.py --compression fp16

With few steps a sparse run trails the dense one, the more the smaller the ratio, since an entry is sent every 1/ratio steps or
so: --momentum-correction makes up for it.

With more workers than idle cores set OMP_NUM_THREADS=1, or the workers' threads fight for the cores.
"""

from __future__ import annotations

import math
import statistics
import sysconfig
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from common import RunLog, check_replicas, make_compression, make_parser, measure_traffic, optimizer_momentum
from torch import Tensor, nn
from tqdm import tqdm

import horovod_sparse.torch as hvd

CHARACTERS = 128  # ASCII; the few others in the sources become "?"
EVALUATION_CHARACTERS = 16384
# Tests are repetitive, encodings and pydoc_data are tables, and installed packages are not the standard library.
SKIPPED_FOLDERS = {"test", "tests", "idle_test", "encodings", "pydoc_data", "site-packages"}


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


class Block(nn.Module):
    """Causal self-attention and a two-layer perceptron, each normalised first and added to its input."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.query_key_value(self.norm1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.project(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.norm2(x))


class CharLM(nn.Module):
    """Scores of the next character at every position; at most `context` positions."""

    def __init__(self, context: int, width: int, layers: int, heads: int) -> None:
        super().__init__()
        self.character = nn.Embedding(CHARACTERS, width)
        self.position = nn.Parameter(torch.zeros(context, width))
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.score = nn.Linear(width, CHARACTERS)
        nn.init.normal_(self.character.weight, std=0.02)

    def forward(self, characters: Tensor) -> Tensor:
        x = self.character(characters) + self.position[: characters.shape[1]]
        return self.score(self.norm(self.blocks(x)))


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


def main() -> None:
    parser = make_parser(__doc__.splitlines()[0], epochs=8, batch_size=2, lr=0.025, ratio=0.01)
    parser.add_argument("--epoch-steps", type=int, default=500, help="steps between two evaluations")
    parser.add_argument(
        "--warmup-steps", type=int, default=60, help="steps over which the learning rate rises, to fall after"
    )
    parser.add_argument("--bytes", type=int, default=200_000, help="characters of source text, 5 %% are held out")
    parser.add_argument("--context", type=int, default=32, help="characters that the model sees")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--heads", type=int, default=4)
    args = parser.parse_args()
    hvd.init()
    torch.manual_seed(args.seed)

    # Rank 0 reads for all: another machine may have another version of Python.
    text = hvd.broadcast_object(read_corpus(args.bytes) if hvd.rank() == 0 else None, root_rank=0, name="text")
    boundary = int(0.95 * len(text))
    # Every worker trains on its own part of the text.
    shard = text[:boundary].tensor_split(hvd.size())[hvd.rank()]
    generator = torch.Generator().manual_seed(args.seed)

    model = CharLM(args.context, args.width, args.layers, args.heads)
    # In your own script: compression = hvd.SIDCo(ratio=0.001).
    compression = make_compression(args, hvd)
    # SGD, because a gradient entry that waited for n steps must move its weight n times as far: Adam would divide that away.
    # No clipping after the reduction, because it would cut off just what had waited.
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=optimizer_momentum(compression))
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(), compression=compression)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
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
            loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            seconds.append(time.perf_counter() - step_started)

        mean_loss = hvd.allreduce(torch.tensor(statistics.fmean(losses)), name="mean_loss").item()
        if hvd.rank() == 0:  # all workers hold the same parameters, so one evaluates for all
            bits = bits_per_character(model, text[boundary:], args.context)
            log.write_epoch(
                epoch,
                step=step,
                loss=mean_loss,
                traffic=measure_traffic(compression, numel, hvd),
                seconds=seconds,
                text=f"held out {bits:.3f} bits per character",
                bits_per_character=bits,
            )

    parameters = {name: parameter.detach().numpy() for name, parameter in model.named_parameters()}
    agreed = check_replicas(parameters, hvd.allgather_object)
    log.write("end", seconds=time.perf_counter() - started, parameter_hash=agreed)


if __name__ == "__main__":
    main()
