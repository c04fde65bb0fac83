"""Train the digits example on two local workers, dense and sparse, and compare accuracy with bytes sent.

    python examples/demo.py
    python examples/demo.py --framework tensorflow
    python examples/demo.py --compression mine:RMSThreshold

Prints one table and draws one picture. Needs mpirun or horovodrun; a worker is one process with one thread.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from closing import Row, closing_table
from own import own_class

EXAMPLES = Path(__file__).resolve().parent
FRAMEWORKS = ("torch", "tensorflow", "keras")
"""Each has a `<framework>_digits.py`."""
TAIL_LINES = 60


@dataclass(frozen=True)
class Run:
    """One training run of the demonstration."""

    name: str
    label: str
    options: tuple[str, ...]
    color: str


RUNS = (
    Run("fp32", "dense fp32", ("--compression", "none"), "#000000"),
    Run("fp16", "dense fp16", ("--compression", "fp16"), "#e69f00"),
    Run("sidco-0.01", "SIDCo 0.01", ("--compression", "sidco", "--ratio", "0.01"), "#0072b2"),
    Run("topk-0.01", "TopK 0.01", ("--compression", "topk", "--ratio", "0.01"), "#d55e00"),
)
ADAMW = tuple(
    replace(
        run,
        name=f"adamw-{run.name}",
        label=f"AdamW {run.label}",
        options=(*run.options, "--optimizer", "adamw", "--lr", "0.002", *more),
    )
    for run, more in ((RUNS[0], ()), (RUNS[2], ("--local-updates",)))
)
"""With PyTorch. `LocalUpdates` exchanges movements in place of gradients."""


def own_run(text: str) -> Run:
    """The run of a compressor of one's own, `module:Class`."""
    name = own_class(text).__name__
    return Run(f"{name}-0.01", f"{name} 0.01", ("--compression", text, "--ratio", "0.01"), "#009e73")


TRANSPORTS = ("horovod", "ddp")


def launcher(workers: int, transport: str = "horovod") -> list[str]:
    """The command that starts local workers: mpirun where there is one, else horovodrun over Gloo; torchrun for DDP."""
    if transport == "ddp":
        return [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--no-python",
            "--nproc-per-node",
            str(workers),
        ]
    if shutil.which("mpirun"):
        # Workers that wait must leave the core to those that compute, and Open MPI refuses root unless told.
        root = ["--allow-run-as-root"] if os.getuid() == 0 else []
        share = ["--oversubscribe", "--bind-to", "none", "--mca", "mpi_yield_when_idle", "1"]
        return ["mpirun", *root, *share, "-np", str(workers)]
    # An environment that is not activated is not on PATH, so look beside the interpreter as well.
    found = shutil.which("horovodrun") or shutil.which("horovodrun", path=str(Path(sys.executable).parent))
    if found:
        return [found, "--gloo", "-np", str(workers)]
    raise SystemExit("the demonstration needs mpirun (Open MPI) or horovodrun (installed with Horovod) on PATH")


def worker_environment() -> dict[str, str]:
    """One computing thread per worker, Horovod's shortest cycle, and the package from this checkout."""
    path = os.pathsep.join(filter(None, [str(EXAMPLES.parent), os.environ.get("PYTHONPATH")]))
    # TensorFlow has threads of its own: one within an operation, two for operations side by side.
    tensorflow = {"TF_NUM_INTRAOP_THREADS": "1", "TF_NUM_INTEROP_THREADS": "2", "TF_CPP_MIN_LOG_LEVEL": "3"}
    return {**os.environ, "OMP_NUM_THREADS": "1", "HOROVOD_CYCLE_TIME": "1", **tensorflow, "PYTHONPATH": path}


def stop(process: subprocess.Popen[bytes]) -> None:
    """End a launcher that still runs; asked to end, it ends its workers first."""
    if process.poll() is not None:
        return
    process.terminate()
    try:
        process.wait(15)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def run_workers(
    script: Path, options: list[str], *, workers: int, output: Path, timeout: float, transport: str = "horovod"
) -> None:
    """Run `script` on local workers with their output in a file; ends the demonstration if they fail."""
    command = [*launcher(workers, transport), sys.executable, str(script), *options]
    with output.open("w", encoding="utf-8") as file:
        # In a session of its own, so that an interrupt reaches the launcher through `stop` alone.
        process = subprocess.Popen(
            command, stdout=file, stderr=subprocess.STDOUT, env=worker_environment(), start_new_session=True
        )
        try:
            code = process.wait(timeout)
            outcome = f"ended with exit status {code}"
        except subprocess.TimeoutExpired:
            code = None
            outcome = f"was still running after {timeout:.0f} s and was stopped"
        finally:
            stop(process)
    if code != 0:
        # A progress bar redraws its line with carriage returns; only its last state is of interest.
        text = output.read_text(encoding="utf-8", errors="replace")
        lines = [line.rsplit("\r", 1)[-1] for line in text.split("\n")]
        tail = "\n".join(f"  | {line}" for line in lines[-TAIL_LINES:])
        raise SystemExit(f"\n{' '.join(command)}\n{outcome}. The end of its output ({output}):\n{tail}")


def read_epochs(log: Path) -> list[dict[str, Any]]:
    """The "epoch" lines of a log."""
    lines = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    return [line for line in lines if line["event"] == "epoch"]


def table(epochs: dict[Run, list[dict[str, Any]]]) -> str:
    """The last epoch of every run, and its bytes against those of the first run."""
    last = {run: lines[-1] for run, lines in epochs.items()}
    rows = [
        Row(run.label, line["ratio"], f"{line['accuracy']:.2%}", line["bytes_per_step"], line["step_seconds"])
        for run, line in last.items()
    ]
    return closing_table(rows, fp32_bytes=last[RUNS[0]]["bytes_per_step"])


def draw(epochs: dict[Run, list[dict[str, Any]]], workers: int, path: Path) -> None:
    """Held-out accuracy against the bytes that a worker has sent so far, one curve per run."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.ticker import EngFormatter, LogLocator, NullFormatter, PercentFormatter

    # Readable where the picture is 600 pixels wide.
    plt.rcParams["font.size"] = 12
    figure, axes = plt.subplots(figsize=(6.5, 4.2), layout="constrained")
    for run, lines in epochs.items():
        sent = [line["bytes_per_step"] * line["step"] for line in lines]
        accuracy = [line["accuracy"] for line in lines]
        label = f"{run.label}: {accuracy[-1]:.1%}"
        axes.plot(sent, accuracy, color=run.color, linewidth=1.8, marker="o", markersize=2.5, label=label)
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter(EngFormatter(unit="B", sep=" "))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    axes.set_xlabel("bytes that one worker has sent (log scale)")
    axes.set_ylabel("accuracy on held-out images")
    axes.set_title(f"Handwritten digits, {workers} workers", loc="left", fontsize=12)
    axes.legend(frameon=False, loc="lower right")
    axes.grid(color="#e5e5e5", linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--framework", choices=FRAMEWORKS, default="torch", help="whose digits example to train")
    parser.add_argument("--transport", choices=TRANSPORTS, default="horovod", help="ddp: torch.distributed, no Horovod")
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("demo-output"),
        help="folder for logs and picture, in a folder per framework",
    )
    text = "a compressor of one's own, module:Class: one more run, at ratio 0.01"
    parser.add_argument("--compression", type=own_run, metavar="CLASS", help=text)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--epochs", type=int, help="epochs per run (default: that of the example)")
    parser.add_argument("--timeout", type=float, default=120, help="seconds after which a run is stopped")
    args = parser.parse_args()
    script = EXAMPLES / f"{args.framework}_digits.py"
    through_ddp = args.transport == "ddp"
    if through_ddp and args.framework != "torch":
        parser.error(f"--transport ddp is for PyTorch, got --framework {args.framework}")
    if not through_ddp and find_spec("horovod") is None:
        parser.error("Horovod is not installed: add --transport ddp, or install Horovod")
    output = args.output / ("ddp" if through_ddp else args.framework)
    output.mkdir(parents=True, exist_ok=True)

    drawn = RUNS if args.compression is None else (*RUNS, args.compression)
    runs = (*drawn, *ADAMW) if args.framework == "torch" else drawn
    print(
        f"Training examples/{script.name} {len(runs)} times on {args.workers} workers "
        f"({'torchrun' if through_ddp else launcher(args.workers)[0]}), same seed.",
        flush=True,
    )
    epochs: dict[Run, list[dict[str, Any]]] = {}
    for number, run in enumerate(runs, start=1):
        print(f"[{number}/{len(runs)}] {run.label:<16}", end=" ", flush=True)
        started = time.perf_counter()
        log = output / f"{run.name}.jsonl"
        options = [*run.options, "--log-file", str(log), *(["--transport", "ddp"] if through_ddp else [])]
        if args.epochs is not None:
            options += ["--epochs", str(args.epochs)]
        text = output / f"{run.name}.txt"
        run_workers(script, options, workers=args.workers, output=text, timeout=args.timeout, transport=args.transport)
        epochs[run] = read_epochs(log)
        print(
            f"accuracy {epochs[run][-1]['accuracy']:.2%} after {epochs[run][-1]['step']} steps, "
            f"{time.perf_counter() - started:.0f} s with start-up",
            flush=True,
        )

    picture = output / "accuracy-per-byte.png"
    draw({run: epochs[run] for run in drawn}, args.workers, picture)
    print(f"\n{table(epochs)}\n\nPicture: {picture}")
    print(
        "All workers are on this machine: the step times hold the cost of compressing, but hardly any of a network's."
    )


if __name__ == "__main__":
    main()
