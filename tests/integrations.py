"""Run the scripts of docs/integrations.md, each on two workers: make integrations.

The libraries are installed into an environment of their own, which is removed again and finds everything else in the
environment that runs this. After each script all ranks must have the same parameters, and must have sent a part of them.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "docs"))
import pages  # noqa: E402  (it is beside the pages)

RELEASES = {"accelerate": "1.15.0", "transformers": "5.23.0", "lightning": "2.6.6"}
WORKERS = 2
LIMIT = 300
"""Seconds after which a script is stopped."""
CHECK = """
import hashlib
import os

last = compression.stats().last.total
parameters = b"".join(one.detach().numpy().tobytes() for one in model.parameters())
with open(f"rank{os.environ['RANK']}", "w") as file:
    file.write(repr((compression.stats().steps, last.count / last.numel, hashlib.sha256(parameters).hexdigest())))
"""


def run(*command: str | Path, cwd: Path) -> None:
    """Run a command, and end everything if it fails."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [str(part) for part in command], cwd=cwd, env=environment, text=True, capture_output=True, timeout=LIMIT
    )
    if done.returncode != 0:
        raise SystemExit(f"{done.stdout}\n{done.stderr}\n{' '.join(map(str, command))}\nended with {done.returncode}")


def make_environment(folder: Path) -> Path:
    """Return the interpreter of an environment that has the libraries and finds this one's packages."""
    run(sys.executable, "-m", "venv", folder, cwd=folder.parent)
    python = folder / "bin" / "python"
    (site,) = (folder / "lib").glob("python*/site-packages")
    (site / "shared.pth").write_text(f"{sysconfig.get_path('purelib')}\n{ROOT}\n", encoding="utf-8")
    wanted = [f"{name}=={release}" for name, release in RELEASES.items()]
    run(python, "-m", "pip", "install", "--quiet", *wanted, cwd=folder)
    return python


def script(library: str) -> str:
    """The code that the page has for a library."""
    found = [one.text for one in pages.blocks(ROOT / "docs" / "integrations.md", "python")]
    (code,) = (text for text in found if f"from {library} import" in text or f"import {library} as" in text)
    return code


def check(library: str, folder: Path) -> str:
    """Compare what the ranks have written."""
    ranks = [ast.literal_eval((folder / f"rank{rank}").read_text(encoding="utf-8")) for rank in range(WORKERS)]
    steps, part, _ = ranks[0]
    assert steps >= 8, f"{library}: expected at least 8 steps, got {steps}"
    assert all(0.005 < one[1] < 0.02 for one in ranks), f"{library}: expected about 0.01 of the entries, got {ranks}"
    assert len({one[2] for one in ranks}) == 1, f"{library}: the ranks have different parameters: {ranks}"
    return f"{library} {RELEASES[library]}: {steps} steps, sent {part:.4f} of the entries, the same parameters on all ranks"


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="integrations-") as created:
        python = make_environment(Path(created) / "environment")
        for library in RELEASES:
            folder = Path(created) / library
            folder.mkdir()
            (folder / "train.py").write_text(script(library) + CHECK, encoding="utf-8")
            launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(WORKERS))
            run(python, *launcher, "train.py", cwd=folder)
            print(check(library, folder), flush=True)


if __name__ == "__main__":
    main()
