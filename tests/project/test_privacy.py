"""Tests use what the package offers: nothing of it that begins with an underscore."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from tests.harness.process import ROOT


def made_in(path: Path) -> Iterator[str]:
    """Names that a file gives to functions, classes, variables, and attributes of `self`."""
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.Name(id=name, ctx=ast.Store()):
                yield name
            case ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Store()):
                yield name


def named_in(path: Path) -> Iterator[str]:
    """Names that a file reads of objects, imports, or hands over as text."""
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.Attribute(attr=name) | ast.Constant(value=str(name)):
                yield name
            case ast.alias(name=name):
                yield from name.split(".")


def test_nothing_private_is_read() -> None:
    package, tests = ((ROOT / folder).rglob("*.py") for folder in ("horovod_sparse", "tests"))
    private = {name for path in package for name in made_in(path) if re.match("_[^_]", name)}
    found = {str(path): sorted(private.intersection(named_in(path)).difference(made_in(path))) for path in tests}
    read = {path: names for path, names in found.items() if names}
    assert not read, f"{read}: test these through what is public, or make them public"
