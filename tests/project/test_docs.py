"""The pages: their code runs, their links lead somewhere, what they quote is in the sources, and they stay short."""

from __future__ import annotations

import ast
import inspect
import re
import sys
from collections.abc import Iterator
from dataclasses import fields
from importlib import import_module
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import pages
import pytest

from horovod_sparse import kernels
from horovod_sparse.compressors import COMPRESSORS
from horovod_sparse.compressors.base import Compressor
from horovod_sparse.numpy import SparseAllreduce
from tests.exchange import test_protocols
from tests.harness.process import ROOT, python
from tests.harness.table import COMPRESSORS as ROWS

COMMON = {one.name for one in fields(Compressor)} - {"ratio"}
"""The settings that all compressors share."""
PAGES = [*pages.pages(), ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md"]
PYTHON_PAGES = [page for page in pages.pages() if any(block.runs for block in pages.blocks(page, "python"))]


@pytest.mark.parametrize("page", PYTHON_PAGES, ids=attrgetter("name"))
def test_the_code_of_a_page_runs(page: Path, tmp_path: Path) -> None:
    # Empty lines first, so that an error names the line of the page.
    lines: list[str] = []
    for block in pages.blocks(page, "python"):
        if block.runs:
            lines += [""] * (block.line - 1 - len(lines)) + block.text.splitlines()
    code = "\n".join(lines)
    done = python("-W", "error::DeprecationWarning:horovod_sparse", "-c", code, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.full
@pytest.mark.parametrize("name", ["RMSThreshold", "Unusual"])
def test_a_compressor_of_the_page_passes_all_laws(name: str, tmp_path: Path) -> None:
    page = ROOT / "docs" / "adding-a-compressor.md"
    blocks = [one.text for one in pages.blocks(page, "python")]
    (number,) = (number for number, text in enumerate(blocks) if f"class {name}(Compressor)" in text)
    code, _, _ = blocks[number].partition("\n\n\ntrain(")
    # The page goes on with what it has imported before.
    imports = re.findall(r"^(?:import|from) .+$", "\n".join(blocks[:number]), re.MULTILINE)
    assert sum(bool(line) for line in code.splitlines()) <= 30, "the page promises 30 lines"
    text = " ".join(page.read_text(encoding="utf-8").split())
    (imported,) = re.findall(r"`(from tests\.harness\.table import Row)`", text)
    (row,) = re.findall(rf"\b(Row\(\"\w+\", {name}, .*?\))`", text)
    (tmp_path / "mine.py").write_text("\n".join([*imports, code, imported, f"ROW = {row}\n"]))
    (arguments,) = re.findall(r"`\.venv/bin/python (-m pytest .* --compressor) mine:", text)
    command = (*arguments.split(), "mine:ROW", "-q", "-p", "no:cacheprovider")
    done = python(*command, limit=600, PYTHONPATH=f"{ROOT}:{tmp_path}")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert re.search(r"\n[1-9]\d* passed", done.stdout), done.stdout[-3000:]


def test_the_exchange_of_the_page_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """What all workers have sent and kept is what came, all of them get the same, and NaN fails the step of all."""
    page = ROOT / "docs" / "adding-a-compressor.md"
    (code,) = (block.text for block in pages.blocks(page, "python") if "class OfOne" in block.text)
    names: dict[str, Any] = {"np": np, "SparseAllreduce": SparseAllreduce}
    exec(code, names)
    monkeypatch.setitem(test_protocols.EXCHANGES, "of one", names["OfOne"]())
    (row,) = (one for one in ROWS if str(one) == "topk")
    test_protocols.test_sent_and_kept_are_what_came("of one", row, "float32")


@pytest.mark.parametrize("page", PAGES, ids=attrgetter("name"))
def test_links_lead_somewhere(page: Path) -> None:
    for target in pages.links(page):
        if target.startswith(("https://", "http://")):
            continue
        name, _, anchor = target.partition("#")
        other = (page.parent / name) if name else page
        assert other.exists(), f"{page.name} links to {target}"
        if anchor:
            assert anchor in pages.anchors(other), f"{page.name} links to {target}"


def test_who_stays_in_the_clone_installs_it_in_place() -> None:
    """There the clone's folder is what Python imports, and another way of installing would leave it without kernels."""
    # Jobs on clusters start elsewhere.
    for page in [page for page in pages.pages() if page.name != "launching.md"]:
        lines = re.findall(r"pip install .*", page.read_text(encoding="utf-8"))
        copied = [line for line in lines if re.search(r' "?\.[\["`\s]|\.$', line) and " -e " not in line]
        assert copied == [], page.name


def test_links_of_the_description_on_package_indexes_are_absolute() -> None:
    done = python("setup.py", "--long-description", cwd=ROOT)
    assert done.returncode == 0, done.stderr
    targets = re.findall(r"(?:\]\(|src=\")([^)\s\"]+)", done.stdout)
    assert len(targets) > 20
    assert [target for target in targets if not target.startswith(("https://", "#")) or "/../" in target] == []


READ = [page for page in pages.pages() if "evidence" not in page.parts]
"""The pages that somebody reads who wants to use the package."""
TABLE = re.compile(r"(?:^ *\|.*\n)+", re.MULTILINE)


@pytest.mark.parametrize("page", PAGES, ids=attrgetter("name"))
def test_lines_are_short(page: Path) -> None:
    text = TABLE.sub("", page.read_text(encoding="utf-8"))
    assert [line for line in text.splitlines() if len(line) > 120] == []


def test_pages_are_few_and_tables_are_small() -> None:
    docs = [page for page in READ if page.parent.name == "docs"]
    assert len(docs) <= 16
    assert sum(len(page.read_text(encoding="utf-8").split()) for page in docs) <= 15_000
    for page in READ:
        for table in TABLE.findall(pages.prose(page)):
            rows = table.splitlines()
            # The names of the columns, and a line below them.
            assert len(rows) - 2 <= 15 and rows[1].count("|") - 1 <= 8, f"{page.name}:\n{table}"


@pytest.mark.full
def test_the_site_is_built_without_a_warning_and_opened(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs", reason="make setup installs it for Python 3.11 and later")
    done = python("-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path), NO_MKDOCS_2_WARNING="1")
    assert done.returncode == 0, done.stderr
    done = python(str(ROOT / "ci" / "site.py"), str(tmp_path), limit=180)
    assert done.returncode == 0, done.stderr
    if "not opened" in done.stdout:
        pytest.skip(done.stdout)


FILE = re.compile(
    r"(?<![\w./-])(?:\.ci|benchmarks|ci|docker|docs|examples|horovod_sparse|studies|tests|tools)/[\w./-]*[\w/]"
)
MODULE = re.compile(r"(?<!::: )\bhorovod_sparse(?:\.[a-z_]+)+")
"""Names in the API reference are those of functions and classes, too; `make docs` finds them or fails."""


@pytest.mark.parametrize("page", PAGES, ids=attrgetter("name"))
def test_files_and_modules_that_are_named_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for name in FILE.findall(text):
        assert (ROOT / name).exists(), f"{page.name} names {name}"
    # The file that the guide tells its reader to write.
    for name in set(MODULE.findall(text)) - {"horovod_sparse.compressors.rms"}:
        path = ROOT / name.replace(".", "/")
        assert path.is_dir() or path.with_suffix(".py").exists(), f"{page.name} names {name}"


def test_methods_whose_files_are_named_are_there() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    named = re.findall(r"`(\w+\.\w+)`\s+\(`(horovod_sparse/[\w/]+)\.py`\)", text)
    assert len(named) >= 3
    for name, file in named:
        assert attrgetter(name)(import_module(file.replace("/", "."))), f"{name} in {file}"


@pytest.mark.parametrize("file", ["pyproject.toml", "conda/recipe.yaml"])
def test_what_a_build_asks_of_its_kernels_is_there(file: str) -> None:
    (name,) = re.findall(r"assert kernels\.(\w+)\(\)", (ROOT / file).read_text(encoding="utf-8"))
    assert hasattr(kernels, name)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="code objects have no full names")
def test_the_calls_of_a_step_lead_from_the_gradient_to_the_message_and_back() -> None:
    done = python(str(ROOT / "docs" / "calls.py"), limit=300, PYTHONPATH=str(ROOT))
    assert done.returncode == 0, done.stderr
    there, back = (part.splitlines() for part in done.stdout.strip().split("\n\n"))
    assert "Driver.add in horovod_sparse/core/driver.py" in there[1:-1] and there[-1].startswith("Collectives.start in")
    assert "Driver.finish in horovod_sparse/core/driver.py" in back[1:-1] and back[-1].startswith(
        "KernelOps.assemble in"
    )


QUOTE = re.compile(r"^> `(\w+): (.*)`$", re.MULTILINE)
QUOTED = QUOTE.findall((ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8"))
"""(kind, text) of every message on the page; "..." stands for what changes."""


def text_of(node: ast.expr) -> str:
    """The text of a literal; "..." for what is filled in, which may be all of it."""
    parts = node.values if isinstance(node, ast.JoinedStr) else [node]
    return "".join(str(part.value) if isinstance(part, ast.Constant) else "..." for part in parts)


def messages() -> Iterator[tuple[str, str]]:
    """(kind, text) of everything that the package raises or warns of with a text of its own."""
    for source in sorted((ROOT / "horovod_sparse").rglob("*.py")):
        for node in ast.walk(ast.parse(source.read_text(encoding="utf-8"))):
            kind = ast.unparse(node.func).removeprefix("warnings.") if isinstance(node, ast.Call) else ""
            if kind == "warn" or kind.endswith("Error"):
                assert isinstance(node, ast.Call)
                yield kind, text_of(node.args[0])


def test_quoted_messages_are_in_the_sources() -> None:
    raised = set(messages())
    for kind, text in QUOTED:
        pattern = re.compile(".*".join(map(re.escape, text.split("..."))), re.DOTALL)
        assert any(one == kind and pattern.search(words) for one, words in raised), f"{kind}: {text}"


def test_variables_of_the_package_are_documented() -> None:
    name = re.compile(r"HOROVOD_SPARSE_[A-Z_]+")
    sources = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "horovod_sparse").rglob("*.py"))
    launching = (ROOT / "docs" / "launching.md").read_text(encoding="utf-8")
    assert set(name.findall(launching)) == set(name.findall(sources))


def test_the_tables_have_every_compressor_and_every_setting() -> None:
    page = (ROOT / "docs" / "settings.md").read_text(encoding="utf-8")
    compressors, settings = page.split("\n## ")[1:3]
    listed = re.findall(r"^\| `(\w+)\(", compressors, re.MULTILINE)
    assert sorted(listed) == sorted(cls.__name__ for cls in COMPRESSORS)
    assert sorted(re.findall(r"^\| `(\w+)` \|", settings, re.MULTILINE)) == sorted(COMMON)


def test_the_warm_up_is_said_as_it_is() -> None:
    said = inspect.getdoc(Compressor) or ""
    said += "".join((ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8") for name in ("index", "settings"))
    found = re.findall(r"(?:\"auto\"`? is |at least |default )(\d+)(?:[, ;]|/\(t\+1\))", said)
    assert found == [f"{Compressor.default_warmup:g}"] * 4


def test_pages_pass_arguments_that_exist() -> None:
    """Every compressor that a page of Markdown makes can be made so, as far as its arguments' names go."""
    parameters = {cls.__name__: COMMON | set(inspect.signature(cls).parameters) for cls in COMPRESSORS}
    for page in pages.pages():
        for name, arguments in re.findall(r"\b([A-Z]\w+)\(([^()]*)\)", page.read_text(encoding="utf-8")):
            given = set(re.findall(r"\b([a-z_]+) ?=", arguments))
            assert name not in parameters or given <= parameters[name], f"{page.name}: {name}({arguments})"
