"""Train a small transformer that FSDP2 has sharded, with gradients compressed between the replicas of each shard.

    torchrun --nproc-per-node 4 examples/torch_fsdp.py --replicas 2 --compression sidco --ratio 0.01
    torchrun --nproc-per-node 4 examples/torch_fsdp.py --replicas 2 --compression sidco --ratio 0.01 --local-updates
    torchrun --nproc-per-node 4 examples/torch_fsdp.py --replicas 2 --compression none

Ranks that follow each other hold a replica together, as the GPUs of a host do. Without compression FSDP exchanges between
replicas itself. Needs no Horovod.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import ddp as ranks
import torch
import torch.nn.functional as F
from closing import Row, closing_table
from common import class_of, compression_name
from text import bits_per_character, read_corpus, sample
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch_charlm import CharLM

import horovod_sparse.torch as sparse
from horovod_sparse.exchange.cost import allreduce_bytes


def shard(model: CharLM, mesh: DeviceMesh) -> nn.Module:
    """Shard every block, and then what is left. The model stays the same object."""
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--replicas", type=int, default=2, help="of the model; each is held by as many ranks")
    parser.add_argument(
        "--compression", type=compression_name, default="sidco", help="none, or a compressor's name or class"
    )
    parser.add_argument("--ratio", type=float, default=0.01, help="part of the entries to send")
    parser.add_argument("--lr", type=float, default=0.001, help="of AdamW")
    parser.add_argument(
        "--local-updates", action="store_true", help="exchange movements by LocalUpdates, which is the line for AdamW"
    )
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--batch-size", type=int, default=2, help="per rank and step")
    parser.add_argument("--context", type=int, default=32)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.compression == "fp16":
        parser.error("--compression fp16 is Horovod's; fully_shard has MixedPrecisionPolicy(reduce_dtype=...)")
    ranks.init()
    if ranks.size() % args.replicas:
        raise SystemExit(f"--replicas must divide the number of ranks, {ranks.size()}, got {args.replicas}")
    torch.manual_seed(args.seed)
    shape = args.replicas, ranks.size() // args.replicas
    device = "cuda" if torch.cuda.is_available() else "cpu"
    mesh = init_device_mesh(device, shape, mesh_dim_names=("replicate", "shard"))

    # All ranks begin with the same parameters, because they have the same seed. In your own script this is all you need:
    # fully_shard gets the mesh of the shards alone, and register that of the replicas.
    dense = args.compression == "none"
    model = shard(CharLM(args.context, args.width, 3, 4).to(device), mesh if dense else mesh["shard"])
    parameters: list[Any] = [*model.parameters()]
    held = 4.0 * sum(parameter.to_local().numel() for parameter in parameters)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=args.lr)
    compression = None if dense else class_of(args.compression, sparse)(ratio=args.ratio)
    if args.local_updates:
        if compression is None:
            raise SystemExit("--local-updates needs a sparsifier, got --compression none")
        optimizer = sparse.LocalUpdates(optimizer, model, compression, group=mesh["replicate"])
    elif compression is not None:
        sparse.register(model, compression, replicate=mesh["replicate"])

    text = read_corpus(200_000)
    boundary = int(0.95 * len(text))
    mine = text[:boundary].tensor_split(ranks.size())[ranks.rank()]
    generator = torch.Generator().manual_seed(args.seed)
    times = []
    for _ in range(args.steps):
        inputs, targets = sample(mine, args.batch_size, args.context, generator)
        begun = time.perf_counter()
        optimizer.zero_grad()
        F.cross_entropy(model(inputs.to(device)).flatten(0, 1), targets.to(device).flatten()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        times.append(time.perf_counter() - begun)

    bits = bits_per_character(model, text[boundary:].to(device), args.context)
    fp32 = allreduce_bytes(held, args.replicas)
    ratio, sent = 1.0, fp32
    if compression is not None:
        mean = compression.stats().mean
        ratio, sent = mean.total.ratio, mean.total.bytes_sent + mean.dense_bytes_sent
    if ranks.rank() == 0:
        label = "none" if dense else f"{args.compression} {args.ratio:g}"
        row = Row(label, ratio, f"{bits:.3f} bits", sent, sorted(times)[len(times) // 2])
        print(f"{args.replicas} replicas of {shape[1]} shards; bytes between replicas, of one rank, warm-up included")
        print(closing_table([row], fp32, "per char"))


if __name__ == "__main__":
    main()
