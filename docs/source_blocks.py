"""Copy functions of the package into the Markdown pages that show them.

    python docs/source_blocks.py

A line such as `<!-- source: horovod_sparse/exchange/pairs.py:Pairs.collectives -->` names what the Python block below it shows.
To show another function, change that line and run the script. A test fails if a block differs from the source.
"""

from __future__ import annotations

import ast
import re
import textwrap

import pages

_MARKER = re.compile(rf"^{re.escape(pages.SOURCE)}", re.MULTILINE)
_SHOWN = re.compile(rf"({_MARKER.pattern}(\S+):([\w.]+) -->\n```python\n).*?^(?=```$)", re.MULTILINE | re.DOTALL)


def source_of(path: str, name: str) -> str:
    """Return a function or class of a file of the repository, without the indentation of the class that it is in."""
    text = (pages.ROOT / path).read_text(encoding="utf-8")
    found: list[ast.FunctionDef | ast.ClassDef] = []
    body = ast.parse(text).body
    for part in name.split("."):
        found = [node for node in body if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.name == part]
        if not found:
            raise ValueError(f"{path} has no {name}")
        body = found[-1].body
    first = min(node.lineno for node in (found[-1], *found[-1].decorator_list))
    return textwrap.dedent("".join(text.splitlines(keepends=True)[first - 1 : found[-1].end_lineno]))


def updated(text: str) -> str:
    """Return the text of a page with every block as the source is now. Raise ValueError for a marker without a block."""
    result, count = _SHOWN.subn(lambda match: f"{match[1]}# {match[2]}\n{source_of(match[2], match[3])}", text)
    if count != len(_MARKER.findall(text)):
        raise ValueError(f"a Python block must follow directly on each line '{pages.SOURCE}FILE:NAME -->'")
    return result


def main() -> None:
    """Write every page anew."""
    for page in pages.pages():
        page.write_text(updated(page.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
