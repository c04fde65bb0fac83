"""What is in the Markdown pages: their blocks of code and their links. Imports nothing of the package."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
NOT_RUN = ("An example to adapt", "For ", "In your environment")
"""The line above a block begins with one of these where its code cannot be run by `quickstart` or by the tests of the pages."""
_LAUNCHED = re.compile(r"Run with (\d+) workers, by `(\w+)`:")
"""The line above a block is this where its code is a script, which tests/parallel/test_saving.py runs."""

_FENCE = re.compile(r"^( *)```(\w*)[^\n]*\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"""(?:!?\[[^\]]*\]\(|<img src=")([^)\s"]+)""")
_HEADING = re.compile(r"^#+ +(.+)$", re.MULTILINE)


class Block(NamedTuple):
    """A fenced block of code."""

    page: str
    """Path from the root of the repository."""
    line: int
    """Of its first line of code."""
    language: str
    text: str
    runs: bool
    """Whether its code is meant to be run where the pages are tested."""
    launched: tuple[str, int] | None = None
    """The launcher and the number of workers if it is a script that is run by itself."""


def pages() -> list[Path]:
    """All pages: the README and everything in docs/."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def blocks(page: Path, *languages: str) -> list[Block]:
    """The page's blocks in these languages, in order."""
    text = page.read_text(encoding="utf-8")
    found = []
    for match in _FENCE.finditer(text):
        indent, language, code = match.groups()
        if language in languages:
            above = text[: match.start()].rstrip("\n").rpartition("\n")[2]
            line = text[: match.start(3)].count("\n") + 1
            code = "".join(row.removeprefix(indent) for row in code.splitlines(keepends=True))
            script = _LAUNCHED.fullmatch(above)
            launched = None if script is None else (script[2], int(script[1]))
            runs = script is None and not above.lstrip().startswith(NOT_RUN)
            found.append(Block(page.relative_to(ROOT).as_posix(), line, language, code, runs, launched))
    return found


def prose(page: Path) -> str:
    """The page without its blocks of code."""
    return _FENCE.sub("", page.read_text(encoding="utf-8"))


def links(page: Path) -> list[str]:
    """Targets of all links and pictures, as they are written."""
    return _LINK.findall(prose(page))


def anchors(page: Path) -> set[str]:
    """What a link may name behind `#`: the headings, in small letters, with dashes for blanks and without punctuation."""
    kept = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in _HEADING.findall(prose(page)))
    return {words.strip().replace(" ", "-") for words in kept}
