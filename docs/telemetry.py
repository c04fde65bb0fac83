"""Make docs/telemetry.png: what TensorBoard shows of a StatsLog.

    pip install tensorboard
    torchrun --nproc-per-node 2 docs/telemetry.py

Trains a perceptron on scikit-learn's digits, and lets Chromium (Debian: chromium) take a picture of TensorBoard.
"""

from __future__ import annotations

import os
import socket
import subprocess
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.nn.parallel import DistributedDataParallel
from torch.utils.tensorboard import SummaryWriter

from horovod_sparse.torch import SIDCo, StatsLog, register

STEPS = 1000
BATCH = 16
PICTURE = Path(__file__).with_name("telemetry.png")
SHOWN = "/(bytes_sent%7Cresidual_norm)"
"""The scalars that the picture has; %7C is |."""


def train(folder: Path | None, ratio: float) -> None:
    """Train on all ranks; the one with a folder writes scalars there."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 512), torch.nn.ReLU(), torch.nn.Linear(512, 10))
    parallel, compression = DistributedDataParallel(model), SIDCo(ratio=ratio)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    register(parallel, compression, optimizer)
    writer = None if folder is None else SummaryWriter(str(folder))
    if writer is not None:
        optimizer.register_step_post_hook(StatsLog(compression, writer=writer))
    images, digits = (torch.as_tensor(part) for part in load_digits(return_X_y=True))
    draw = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(STEPS):
        chosen = torch.randint(len(images), (BATCH,), generator=draw)
        optimizer.zero_grad()
        F.cross_entropy(parallel(images[chosen].float() / 16), digits[chosen]).backward()
        optimizer.step()
    if writer is not None:
        writer.close()


def photograph(runs: Path) -> None:
    """Serve the runs by TensorBoard, and let Chromium look at them."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = ["tensorboard", "--logdir", ".", "--port", str(port), "--load_fast", "false"]
    with subprocess.Popen(command, cwd=runs, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
        try:
            # It reads the runs after it has started to answer.
            time.sleep(20)
            with tempfile.TemporaryDirectory() as profile:
                options = ["--headless", "--disable-gpu", "--disable-dev-shm-usage", f"--user-data-dir={profile}"]
                options += ["--no-sandbox"] if os.geteuid() == 0 else []
                # Half as large again as on a screen: readable where a page shows it 600 pixels wide.
                options += ["--force-device-scale-factor=1.5", "--window-size=700,720"]
                options += ["--virtual-time-budget=15000", f"--screenshot={PICTURE}"]
                address = f"http://127.0.0.1:{port}/?darkMode=false#scalars&tagFilter={SHOWN}&_smoothingWeight=0"
                subprocess.run(["chromium", *options, address], check=True, timeout=120, stderr=subprocess.DEVNULL)
        finally:
            server.terminate()


def main() -> None:
    """Train once with each ratio, and take the picture."""
    dist.init_process_group("gloo")
    with tempfile.TemporaryDirectory() as runs:
        for ratio in (0.01, 0.001):
            train(Path(runs, f"SIDCo({ratio})") if dist.get_rank() == 0 else None, ratio)
        if dist.get_rank() == 0:
            photograph(Path(runs))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
