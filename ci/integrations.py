"""Run the blocks of three pages as scripts, and two examples, each on two workers or four: make integrations.

The pages are docs/libraries.md, docs/pytorch.md and docs/launching.md; `scripts.py` has what is put around their blocks.

python ci/integrations.py [NAME...]     of: "Accelerate, DDP", "Fabric, Horovod", "Ray Train", Examples and so on (default: all)

The libraries are installed into an environment of their own, which is removed again and finds everything else in the
environment that runs this. Spark needs Java. After each script all ranks must have the same parameters, and must have used
the compressor in every step. The examples are those that need torchvision and Transformers; pytest runs their tests.
"""

from __future__ import annotations

import math
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "docs"))
import pages  # noqa: E402  (it is beside the pages)
from scripts import IMPORT_LOCAL, SCRIPTS, Block  # noqa: E402

RELEASES = {
    "accelerate": "1.15.0",
    "lightning": "2.6.6",
    "ray[train]": "2.60.0",
    "pyspark": "4.3.0",
    # Horovod's module for Spark needs it.
    "pyarrow": "26.0.1",
}
PINNED = ("torchvision", "transformers")
"""What the extra "examples" has; constraints.txt has the releases."""
DDP, FSDP2, HOROVOD, LOCAL = "DDP", "FSDP2", "Horovod", "local updates"
"""How the name of a script ends that must be started on workers. The others start workers, and show the result, themselves."""
EXAMPLES = "Examples"
LIMIT = 300
"""Seconds after which a script is stopped."""
TEXT = """
checksum = sum(float(getattr(one, "full_tensor", lambda: one)().detach().double().sum()) for one in model.parameters())
text = f"rank {%s}: {compression.stats().steps} steps, checksum {checksum!r}"
"""
_AS_ROOT = ("--allow-run-as-root",) if os.geteuid() == 0 else ()
_TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node")
_RANK = "__import__('os').environ['RANK']"
_END = "__import__('os')._exit(0)\n"
"""Over Gloo, PyTorch 2.13 may abort while Python ends; docs/pytorch.md has more."""
_SHOW = TEXT % _RANK + "print(text, flush=True)\n" + _END
_SHOW_LOCAL = f"""
with torch.no_grad():
    loss = float(F.cross_entropy(getattr(model, "layers", model)(x), x[:, :3].argmax(1)))
compression = local.compression
{TEXT % _RANK}print(f"{{text}}, loss {{loss:.4f}}", flush=True)
{_END}"""
DENSE = """
from horovod_sparse.torch import SIDCo


class LocalUpdates:
    steps = 0

    def __init__(self, optimizer, model, compression):
        self.optimizer, self.param_groups, self.zero_grad = optimizer, optimizer.param_groups, optimizer.zero_grad
        self.compression = self

    def stats(self):
        return self

    def step(self, closure=None):
        if closure is not None:
            closure()
        for one in [one for group in self.param_groups for one in group["params"]]:
            torch.distributed.all_reduce(one.grad)
            one.grad /= torch.distributed.get_world_size()
        self.optimizer.step()
        self.steps += 1

    def synchronize(self):
        pass
"""
"""What the same script is dense with."""
_LINE = "SIDCo(0.01))"
_SPARSE = "SIDCo(0.05, warmup=2.0, min_numel=0)"
VARIANTS: dict[str, Callable[[str], str]] = {
    "dense": lambda text: text.replace(IMPORT_LOCAL, DENSE),
    "every=1": lambda text: text.replace(_LINE, f"{_SPARSE})"),
    "every=4": lambda text: text.replace(_LINE, f"{_SPARSE}, every=4)"),
}
"""How a script of local updates is changed: what is sent is sparse soon."""
_ADAMW = "torch.optim.AdamW(model.parameters(), lr=1e-3)"
REFUSED = {
    "Accelerate, local updates": (
        (", evaluation_mode=True", "", "leave DistributedDataParallel out"),
        (_ADAMW, f"accelerator.prepare({_ADAMW})", "got a AcceleratedOptimizer of accelerate.optimizer"),
    )
}
"""What a script must not do: what is replaced by what, and what the error says."""
WORST = 0.1
"""By how much the loss may end above dense training's, of what this has gained from ln 3."""
STARTED: dict[str, tuple[tuple[str, ...], tuple[str, ...], str]] = {
    DDP: ((), (*_TORCHRUN, "2"), _SHOW),
    LOCAL: ((), (*_TORCHRUN, "2"), ""),
    # Two replicas of two shards.
    FSDP2: ((), (*_TORCHRUN, "4"), _SHOW),
    HOROVOD: (
        ("mpirun", "-np", "2", "--oversubscribe", "--bind-to", "none", *_AS_ROOT),
        (),
        # mpirun may mix what two ranks print.
        TEXT % "hvd.rank()" + "print(*hvd.allgather_object(text) * (hvd.rank() == 0), flush=True)",
    ),
}
"""What is put before and after the interpreter to start a script, and what is added to it."""
SHOWN = re.compile(r"rank (\d): (\d+) steps, checksum ([-+.\de]+)")
LOSS = re.compile(r"loss ([.\d]+)")


def run(
    python: str | Path, *arguments: str | Path, cwd: Path, under: tuple[str, ...] = (), limit: float = LIMIT
) -> str:
    """What an interpreter prints, started by the command `under` if there is one; ends everything if it fails."""
    command = [*under, *map(str, (python, *arguments))]
    # Workers of Ray and Spark are found, and find the packages, by these.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYSPARK_PYTHON": str(python)}
    environment["PATH"] = os.pathsep.join([str(Path(python).parent), environment["PATH"]])
    done = subprocess.run(command, cwd=cwd, env=environment, text=True, capture_output=True, timeout=limit)
    if done.returncode != 0:
        raise SystemExit(f"{done.stdout}\n{done.stderr}\n{' '.join(command)}\nended with {done.returncode}")
    return done.stdout + done.stderr


def make_environment(folder: Path, wanted: Sequence[str]) -> Path:
    """Return the interpreter of an environment that has what is wanted and finds this one's packages."""
    run(sys.executable, "-m", "venv", folder, cwd=folder.parent)
    python = folder / "bin" / "python"
    (site,) = (folder / "lib").glob("python*/site-packages")
    (site / "shared.pth").write_text(f"{sysconfig.get_path('purelib')}\n{ROOT}\n", encoding="utf-8")
    run(python, "-m", "pip", "install", "--quiet", *wanted, cwd=folder)
    return python


def requirements() -> list[str]:
    """Return what the scripts import besides what `make setup` has installed."""
    pins = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    return [
        *(f"{name}=={release}" for name, release in RELEASES.items()),
        *(line for line in pins if line.startswith(PINNED)),
    ]


def mend_torchvision(python: Path) -> None:
    """Let a torchvision that was built for CUDA be imported with a torch for CPUs: it misses operators that no ResNet needs.

    PyTorch's own index has a torchvision for CPUs, PyPI has not.
    """
    (site,) = (python.parent.parent / "lib").glob("python*/site-packages")
    probe = [str(python), "-c", "import torchvision"]
    failed = subprocess.run(probe, cwd=site, text=True, capture_output=True, check=False).stderr
    if "operator torchvision::nms does not exist" not in failed:
        return
    first = site / "torchvision" / "__init__.py"
    signature = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
    lines = [f"torch.library.define('torchvision::{name}', {signature!r})" for name in ("nms", "qnms")]
    first.write_text("\n".join(["import torch", *lines, first.read_text(encoding="utf-8")]), encoding="utf-8")
    run(*probe, cwd=site)


def run_examples(python: Path) -> None:
    """Run the tests of the examples that need more than `make setup` installs."""
    chosen = ("-q", "-k", "(resumed or without_data) and (resnet or gpt2)", "-p", "no:cacheprovider")
    print(run(python, "-m", "pytest", "tests/project/test_examples.py", *chosen, cwd=ROOT, limit=900), flush=True)


def script(parts: Sequence[str | Block]) -> str:
    """The parts one after the other."""
    return "\n".join(part if isinstance(part, str) else text_of(part) for part in parts)


def text_of(block: Block) -> str:
    """The only block of its page that has its mark."""
    texts = [one.text for one in pages.blocks(ROOT / "docs" / block.page, "python") if block.mark in one.text]
    assert len(texts) == 1, f"{block.page}: expected one block with {block.mark!r}, got {len(texts)}"
    return texts[0]


def compare_local(name: str, text: str, start: Callable[[str], str]) -> str:
    """Run a script of local updates in each way, and compare what all ranks end with, and what the loss is."""
    losses = {}
    for variant, change in VARIANTS.items():
        changed = change(text)
        assert changed != text, f"{name}: nothing to change for {variant}"
        output = start(changed + _SHOW_LOCAL)
        check(f"{name}, {variant}", output, 2)
        losses[variant] = float(LOSS.findall(output)[0])
    for old, new, message in REFUSED.get(name, ()):
        changed = text.replace(old, new)
        assert changed != text, f"{name}: there is no {old!r}"
        said = "nothing raised"
        try:
            start(changed)
        except SystemExit as error:
            said = str(error)
        assert message in said, f"{name}: expected {message!r} where {new!r} is written, got {said}"
    worst = losses["dense"] + WORST * (math.log(3) - losses["dense"])
    assert max(losses.values()) < worst, f"{name}: expected losses below {worst:.4f}, got {losses}"
    return f"{name}: the same parameters on all ranks, losses {losses}"


def check(name: str, output: str, workers: int) -> str:
    """Compare what the ranks have printed."""
    ranks = {(int(rank), int(steps), checksum) for rank, steps, checksum in SHOWN.findall(output)}
    assert sorted(rank for rank, *_ in ranks) == [*range(workers)], (
        f"{name}: expected {workers} ranks, got {ranks}\n{output}"
    )
    assert len({one[1:] for one in ranks}) == 1, f"{name}: the ranks differ, {ranks}"
    (steps,) = {one[1] for one in ranks}
    assert steps >= 8, f"{name}: expected at least 8 sparse steps, got {steps}"
    return f"{name}: {steps} sparse steps, the same parameters on all ranks"


def main() -> None:
    known = [*SCRIPTS, EXAMPLES]
    names = sys.argv[1:] or known
    unknown = sorted(set(names) - set(known))
    if unknown:
        raise SystemExit(f"the arguments must be of {', '.join(known)}, got {', '.join(unknown)}")
    with tempfile.TemporaryDirectory(prefix="integrations-") as created:
        python = make_environment(Path(created) / "environment", requirements())
        mend_torchvision(python)
        for name in names:
            if name == EXAMPLES:
                run_examples(python)
                continue
            if "Spark" in name and shutil.which("java") is None:
                print(f"{name}: left out, because there is no Java (Debian: default-jre-headless)", flush=True)
                continue
            folder = Path(created) / "run"
            folder.mkdir()
            kind = name.rpartition(", ")[2]
            before, after, added = STARTED.get(kind, ((), (), ""))

            def start(
                text: str, folder: Path = folder, before: tuple[str, ...] = before, after: tuple[str, ...] = after
            ) -> str:
                (folder / "train.py").write_text(text, encoding="utf-8")
                return run(python, *after, "train.py", cwd=folder, under=before)

            text = script(SCRIPTS[name])
            if kind == LOCAL:
                print(compare_local(name, text, start), flush=True)
            else:
                print(check(name, start(text + added), 4 if kind == FSDP2 else 2), flush=True)
            shutil.rmtree(folder)


if __name__ == "__main__":
    main()
