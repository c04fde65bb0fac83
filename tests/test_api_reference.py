"""The API reference is made without a warning, and what docstrings refer to is there."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest
from test_imports import CORE

from horovod_sparse.compressors import COMPRESSORS

ROOT = Path(__file__).parent.parent
SOURCES = sorted((ROOT / "horovod_sparse").rglob("*.py"))
TREES = {source.relative_to(ROOT).as_posix(): ast.parse(source.read_text(encoding="utf-8")) for source in SOURCES}


@pytest.mark.full
def test_the_reference_is_made_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("pdoc")
    command = [sys.executable, "docs/api.py", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    for adapter in ("torch", "tensorflow", "tensorflow/keras", "numpy"):
        page = (tmp_path / "horovod_sparse" / f"{adapter}.html").read_text(encoding="utf-8")
        for cls in COMPRESSORS:
            assert f'id="{cls.__name__}"' in page
        assert 'id="allreduce"' not in page, "Horovod's names are not ours to describe"
    assert not [*tmp_path.glob("horovod_sparse/kernels*"), *tmp_path.glob("horovod_sparse/tools*")]


def _defined(body: list[ast.stmt]) -> set[str]:
    """Names of functions, classes and variables; also those that functions of a class give `self`."""
    names: set[str] = set()
    for node in body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
        targets = [node.target] if isinstance(node, ast.AnnAssign) else getattr(node, "targets", [])
        names |= {target.id for target in targets if isinstance(target, ast.Name)}
        if isinstance(node, ast.FunctionDef):
            own = (inner for inner in ast.walk(node) if isinstance(inner, ast.Attribute))
            names |= {inner.attr for inner in own if ast.unparse(inner.value) == "self"}
    return names


def _members() -> dict[str, set[str]]:
    """Class or module name -> what it defines, all of one name together; a class has what its bases have."""
    members: dict[str, set[str]] = defaultdict(set)
    bases: dict[str, set[str]] = defaultdict(set)
    for name, tree in TREES.items():
        members[Path(name).stem] |= _defined(tree.body)
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                members[node.name] |= _defined(node.body)
                bases[node.name] |= {ast.unparse(base).rpartition(".")[2] for base in node.bases}
    for _ in range(4):
        for name, above in bases.items():
            members[name] |= set().union(*(members.get(base, set()) for base in above))
    return members


def _references() -> list[tuple[str, str, str]]:
    """(source, owner, member) of everything like `Compressor.select` or `schedules.warmup` in a docstring."""
    members = _members()
    core = {path.stem for path in CORE}
    found = []
    for name, tree in TREES.items():
        for node in ast.walk(tree):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
                for owner, member in re.findall(r"`(\w+)\.(\w+)`", ast.get_docstring(node) or ""):
                    # Lower-case names may be a user's variables, unless a module of the core has them.
                    if owner in members and (owner[0].isupper() or owner in core):
                        found.append((name, owner, member))
    return found


@pytest.mark.parametrize(("source", "owner", "member"), _references())
def test_what_docstrings_refer_to_is_there(source: str, owner: str, member: str) -> None:
    assert member in _members()[owner], f"{source} refers to {owner}.{member}"
