"""Train a small transformer to continue the source text of Python's standard library, with compressed gradients.

    mpirun -np 2 python examples/torch_charlm.py --compression sidco --ratio 0.001
    horovodrun -np 2 python examples/torch_charlm.py --compression fp16

With more workers than idle cores set OMP_NUM_THREADS=1, or the workers' threads fight for the cores.
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from text import CHARACTERS, make_text_parser, train
from torch import Tensor, nn

import horovod_sparse.torch as hvd


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


def make_model(args: argparse.Namespace) -> nn.Module:
    """2.4 million parameters by default."""
    return CharLM(args.context, args.width, args.layers, args.heads)


def main() -> None:
    parser = make_text_parser(__doc__.splitlines()[0], batch_size=2, lr=0.025, ratio=0.01)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--heads", type=int, default=4)
    args = parser.parse_args()
    hvd.init()
    torch.manual_seed(args.seed)
    train(make_model(args), args)


if __name__ == "__main__":
    main()
