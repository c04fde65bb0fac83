"""Run every shell command of the README and docs/ as a new user would: in a fresh clone, with a home of its own: make commands.

    python docs/quickstart.py [--root FOLDER] [--skip TEXT ...] [PAGE ...]

The commands of a page run one after the other in one shell, so that `cd` and `activate` last, in a virtual environment that has
only what the page installs (with --root in the root's own); a page is left at its first command that fails or takes too long.
Blocks below a line that begins as `pages.NOT_RUN` says are counted, not run. Prints how long each command took; the exit status
is 0 if all succeeded. pip's and Horovod's caches are those of the caller, unless --no-cache.
"""

from __future__ import annotations

import argparse
import os
import select
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, NamedTuple

import pages

SHELL = ("bash", "sh")
"""Languages of the blocks whose lines are commands."""
KEPT = ("PIP_", "SSL_", "LANG", "LC_", "http_proxy", "https_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY")
"""What variables of the caller's environment begin with that the commands see too."""
ENTER = """set -e
mount --rbind "$0" "$0"
cd "$0"
mount -t proc proc proc
mount --rbind /dev dev
mount --rbind /sys sys
mount -t tmpfs tmpfs run
exec chroot . sh -c "$1"
"""
"""How a root is entered; bound to itself, because `ip netns exec` works only where the root is a mount point."""
TAIL = 30
"""Lines that are shown of the output of a command that failed."""


class Command(NamedTuple):
    """A command line, continuation lines joined."""

    page: str
    line: int
    text: str
    runs: bool


def commands(block: pages.Block) -> list[Command]:
    """The commands of a block; raises ValueError for what is no line by itself."""
    found: list[Command] = []
    parts: list[str] = []
    open_line = 0
    for number, row in enumerate(block.text.splitlines(), start=block.line):
        if not parts and (not row.strip() or row.lstrip().startswith("#")):
            continue
        open_line = open_line if parts else number
        parts.append(row.removesuffix("\\").strip())
        if row.endswith("\\"):
            continue
        text = " ".join(parts)
        if block.runs and "<<" in text:
            raise ValueError(f"{block.page}:{open_line}: a command must be one line, got a here-document: {text}")
        found.append(Command(block.page, open_line, text, block.runs))
        parts = []
    if parts:
        raise ValueError(f"{block.page}:{open_line}: the block ends within a command: {' '.join(parts)}")
    return found


def commands_of(page: Path) -> list[Command]:
    """All commands of a page."""
    return [command for block in pages.blocks(page, *SHELL) for command in commands(block)]


@dataclass(frozen=True)
class Place:
    """Where commands run."""

    folder: Path
    """As this process sees it: the fresh clone's, and the home beside it."""
    root: Path | None
    """The folder that the commands see as /; None for the real one."""
    environment: Mapping[str, str]

    def shell(self) -> list[str]:
        """The command line of a shell that reads commands."""
        begin = f"cd {shlex.quote(self.seen('clone'))} && exec bash --noprofile --norc"
        if self.root is None:
            return ["sh", "-c", begin]
        return ["unshare", "--mount", "sh", "-c", ENTER, str(self.root), begin]

    def seen(self, name: str) -> str:
        """The path of a file of the folder, as the commands see it."""
        path = self.folder / name
        return f"/{path.relative_to(self.root)}" if self.root else str(path)


@contextmanager
def fresh(root: Path | None, caches: bool) -> Iterator[Place]:
    """A clone of what is committed here and an empty home, both removed in the end."""
    within = root / "tmp" if root else None
    with tempfile.TemporaryDirectory(prefix="quickstart-", dir=within) as name:
        folder = Path(name)
        folder.chmod(0o755)
        (folder / "home").mkdir()
        clone = ["git", "clone", "--quiet", "--no-hardlinks", str(pages.ROOT), str(folder / "clone")]
        subprocess.run(clone, check=True)
        home = Place(folder, root, {}).seen("home")
        environment = {name: value for name, value in os.environ.items() if name.startswith(KEPT)}
        environment |= {"HOME": home, "PATH": _path(), "TERM": "dumb"}
        if os.geteuid() == 0:
            # Open MPI refuses root unless told; a user of one's own needs none of this.
            environment |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
        if root is None:
            subprocess.run([sys.executable, "-m", "venv", str(folder / "venv")], check=True)
            environment |= {
                "VIRTUAL_ENV": str(folder / "venv"),
                "PATH": f"{folder / 'venv' / 'bin'}{os.pathsep}{_path()}",
            }
        if caches and root is None:
            environment |= _caches()
        yield Place(folder, root, environment)


def _path() -> str:
    """The caller's without virtual environments, whose python a new user would not have."""
    folders = os.environ.get("PATH", os.defpath).split(os.pathsep)
    kept = [folder for folder in folders if not Path(folder).parent.joinpath("pyvenv.cfg").exists()]
    return os.pathsep.join(kept)


def _caches() -> dict[str, str]:
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return {
        "PIP_CACHE_DIR": os.environ.get("PIP_CACHE_DIR", str(base / "pip")),
        "HOROVOD_WHEEL_CACHE": os.environ.get("HOROVOD_WHEEL_CACHE", str(base / "horovod_sparse")),
    }


@dataclass(frozen=True)
class Result:
    """What came of a command."""

    command: Command
    outcome: str
    """"ok", "failed", "skipped", "not run here" or "not reached"; "to run" where commands are only listed."""
    seconds: float = 0.0
    output: str = ""

    def __str__(self) -> str:
        took = f"{self.seconds:8.1f} s" if self.outcome in ("ok", "failed") else " " * 10
        return f"{self.outcome:<12} {took}  {self.command.page}:{self.command.line}: {self.command.text}"


def run(todo: Sequence[Command], place: Place, skip: Sequence[str], limit: float) -> Iterator[Result]:
    """Run one page's commands in one shell, each for `limit` seconds at most; ends with the first that fails."""
    reading, writing = os.pipe()
    with subprocess.Popen(
        place.shell(),
        stdin=subprocess.PIPE,
        env=dict(place.environment),
        pass_fds=(writing,),
        text=True,
        start_new_session=True,
    ) as shell:
        os.close(writing)
        assert shell.stdin is not None
        with os.fdopen(reading) as statuses, shell.stdin as commands_in:
            if os.geteuid() == 0:
                commands_in.write('command -v sudo >/dev/null || sudo() { "$@"; }\n')
            failed = False
            for number, command in enumerate(todo):
                if not command.runs:
                    yield Result(command, "not run here")
                elif any(text in command.text for text in skip):
                    yield Result(command, "skipped")
                elif failed:
                    yield Result(command, "not reached")
                else:
                    result = _run_one(number, command, place, commands_in, statuses, writing, limit)
                    failed = result.outcome == "failed"
                    if failed:
                        # The command may still run.
                        os.killpg(shell.pid, signal.SIGKILL)
                    yield result


def _run_one(
    number: int,
    command: Command,
    place: Place,
    commands_in: IO[str],
    statuses: IO[str],
    status_fd: int,
    limit: float,
) -> Result:
    """Hand a command to the shell as a file that it sources, so that its own input is not the shell's."""
    script, output = place.folder / f"command-{number}.sh", place.folder / f"output-{number}.txt"
    script.write_text(command.text + "\n", encoding="utf-8")
    began = time.perf_counter()
    source, into = (shlex.quote(place.seen(path.name)) for path in (script, output))
    commands_in.write(f". {source} </dev/null >{into} 2>&1; echo $? >&{status_fd}\n")
    commands_in.flush()
    ended, _, _ = select.select([statuses], [], [], limit)
    status = statuses.readline().strip() if ended else ""
    seconds = time.perf_counter() - began
    text = output.read_text(encoding="utf-8", errors="replace") if output.exists() else ""
    text += "" if ended else f"\nstopped after {limit:g} s"
    return Result(command, "ok" if status == "0" else "failed", seconds, text)


def summary(results: Sequence[Result]) -> str:
    """How many commands came to what, and how long all took."""
    outcomes = Counter(result.outcome for result in results)
    counted = ", ".join(f"{count} {outcome}" for outcome, count in outcomes.items())
    return f"{len(results)} commands: {counted}; {sum(result.seconds for result in results):.0f} s"


def main() -> int:
    """Run or list the commands; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("pages", nargs="*", type=Path, metavar="PAGE", help="default: all that have commands")
    add(
        "--root",
        type=Path,
        help="a folder that the commands see as / (chroot, as root), such as debootstrap makes; with git, make and iproute2",
    )
    add("--skip", nargs="+", default=[], metavar="TEXT", help="leave out commands that contain one of these")
    add("--limit", type=float, default=1800.0, metavar="SECONDS", help="for each command; default: 1800")
    add("--no-cache", action="store_true", help="download and build everything anew")
    add("--list", action="store_true", help="print the commands, and run none")
    args = parser.parse_args()
    if args.root and (os.geteuid() != 0 or not (args.root / "bin").exists()):
        parser.error(f"--root must be the root of a system, and needs chroot, which is for root; got {args.root}")
    if not args.list and shutil.which("git") is None:
        parser.error("git is needed, for a fresh clone")
    results: list[Result] = []
    for page in [path.resolve() for path in args.pages] or pages.pages():
        todo = commands_of(page)
        if args.list:
            results += [Result(command, "to run" if command.runs else "not run here") for command in todo]
        elif todo:
            with fresh(args.root, not args.no_cache) as place:
                for result in run(todo, place, args.skip, args.limit):
                    print(result, flush=True)
                    if result.outcome == "failed":
                        print("\n".join(f"  | {line}" for line in result.output.splitlines()[-TAIL:]), flush=True)
                    results.append(result)
    if args.list:
        print("\n".join(str(result) for result in results))
    print(summary(results))
    return int(any(result.outcome in ("failed", "not reached") for result in results))


if __name__ == "__main__":
    sys.exit(main())
