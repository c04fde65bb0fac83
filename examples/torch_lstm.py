"""Train an LSTM to continue the source text of Python's standard library, with compressed gradients.

    mpirun -np 2 python examples/torch_lstm.py --compression sidco --ratio 0.01
    horovodrun -np 2 python examples/torch_lstm.py --compression fp16

The text, the options and the training are those of `torch_charlm.py`, in `text.py`. With more workers than idle cores set
OMP_NUM_THREADS=1, or the workers' threads fight for the cores.
"""

from __future__ import annotations

import argparse

import torch
from text import CHARACTERS, make_text_parser, train
from torch import Tensor, nn

import horovod_sparse.torch as hvd


class CharLSTM(nn.Module):
    """Scores of the next character at every position. Each window begins with a state of zeros."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.character = nn.Embedding(CHARACTERS, width // 2)
        self.lstm = nn.LSTM(width // 2, width, layers, batch_first=True)
        self.score = nn.Linear(width, CHARACTERS)

    def forward(self, characters: Tensor) -> Tensor:
        hidden, _ = self.lstm(self.character(characters))
        return self.score(hidden)


def make_model(args: argparse.Namespace) -> nn.Module:
    """1.7 million parameters by default."""
    return CharLSTM(args.width, args.layers)


def main() -> None:
    parser = make_text_parser(__doc__.splitlines()[0], batch_size=4, lr=0.5, ratio=0.01)
    parser.add_argument("--width", type=int, default=512, help="of the state; the embedding has half of it")
    parser.add_argument("--layers", type=int, default=1)
    args = parser.parse_args()
    hvd.init()
    torch.manual_seed(args.seed)
    train(make_model(args), args)


if __name__ == "__main__":
    main()
