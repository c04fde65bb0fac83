"""A training of a sharded model that saves its state, resumes by itself, and may kill itself at a random moment.

python -m parallel.ddp.killed FOLDER STEPS [SEED]

With SEED, one rank gets SIGKILL at a random moment of one of its first steps. At the end every rank prints a digest of what it
holds.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from ..common import digest, everyone, train
from ..killed import EVERY, killer
from . import ranks
from .sharded import OPTIMIZERS, here, load, made, mesh_of, save


def main(folder: Path, steps: int, seed: int | None) -> None:
    mesh = mesh_of(2)
    latest = folder / "latest"
    training = made(OPTIMIZERS["AdamW"], mesh)
    # Rank 0 may write it while others read.
    start = everyone(int(latest.read_text()) if latest.exists() else 0)[0]
    if start:
        load(folder / str(start), mesh, *training)
    print(f"rank {ranks.rank()} begins at step {start}", flush=True)
    begin = killer(seed, start, ranks.rank(), ranks.size())
    model, optimizer, compression = training
    for step in range(start, steps):
        begin(step)
        train(model, optimizer, [step])
        if (step + 1) % EVERY == 0:
            save(folder / str(step + 1), mesh, *training)
            everyone("saved")
            if ranks.rank() == 0:
                new = folder / "new"
                new.write_text(str(step + 1))
                new.replace(latest)
    kept = [*here(model), *compression.state_dict()["residuals"].values()]
    print(f"rank {ranks.rank()} ended with {digest(kept)}", flush=True)


if __name__ == "__main__":
    ranks.init()
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]) if len(sys.argv) > 3 else None)
