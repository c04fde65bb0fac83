"""Whether the tests notice when the package is wrong: changes its code in small ways and runs them on each change.

    python ci/mutation.py [--mutants 100] [--seed 0] [--json FILE]

A mutant is a copy of the package with one comparison, operation, condition, constant or statement changed. The tests that
`make test` runs in one process go first, those of the mutated module before all others, up to the first failure; what they
do not notice is given to the tests that only `make test-all` runs. Printed is how many of the mutants that some test notices
`make test` notices, and every one that no test does.

All mutants are forked from one process, which has imported what takes long and nothing of this package. Each takes one core.
"""

from __future__ import annotations

import argparse
import ast
import copy
import json
import os
import random
import re
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "horovod_sparse"
LEFT_OUT = shutil.ignore_patterns(".*", "build", "dist", "*.egg-info", "__pycache__")

FOLDERS = {
    "core": "core/feedback core/step core/state core/statistics core/driver compressors/laws compressors/momentum "
    "compressors/schedules numpy/allreduce core/machine",
    "exchange": "exchange/wire exchange/protocols exchange/cost core/feedback compressors/laws compressors/micro "
    "core/machine",
    "estimation": "compressors/sidco compressors/micro compressors/laws",
    "kernels": "kernels/ops kernels/tracked ops/protocol exchange/wire compressors/backends",
    "compressors": "compressors/checks compressors/laws compressors/momentum core/feedback core/state",
}
"""The mutated folders, and the tests that follow a module's own. Where all backends run the same code, that they agree says
nothing."""
LEFT_ALONE = ("core/binding", "core/stock", "core/transport", "kernels/build")
"""What these do shows in adapters, and in installed packages."""
MODULES = [
    f"{folder}/{path.stem}"
    for folder in FOLDERS
    for path in sorted((ROOT / PACKAGE / folder).glob("[a-z]*.py"))
    if f"{folder}/{path.stem}" not in LEFT_ALONE
]


def tests_of(module: str) -> list[str]:
    """The files that test a module: first the one of its name, or those that its docstring says; then its folder's."""
    folder, name = module.split("/")
    own = f"tests/{folder}/test_{name}.py"
    said = re.findall(
        r"tests/\w+/test_\w+\.py", ast.get_docstring(ast.parse((ROOT / PACKAGE / f"{module}.py").read_text())) or ""
    )
    others = [f"tests/{one.replace('/', '/test_')}.py" for one in FOLDERS[folder].split()]
    return list(dict.fromkeys([*([own] if (ROOT / own).exists() else said), *others]))


SLOW_TO_IMPORT = (
    "tests.conftest",
    "horovod.torch",
    "hypothesis.extra.numpy",
    "pytest",
    "scipy.stats",
    "tensorflow",
    "torch",
)
"""In this order: `tests.conftest` imports Triton, which must come before TensorFlow."""

NOTICED, SURVIVED, TIMED_OUT = "noticed", "survived", "timed out"
_PATIENCE = 5
"""Seconds by the clock for a second of the processor; a test that waits for ever takes none."""


# --- what is changed ---

COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
OPERATIONS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.BitXor: ast.BitOr,
}


def changes(node: ast.AST) -> list[Callable[[], None]]:
    """The ways to change a node, each in place."""
    if isinstance(node, ast.Compare):
        return [lambda: node.ops.__setitem__(0, COMPARISONS[type(node.ops[0])]())]
    if isinstance(node, (ast.BinOp, ast.AugAssign)) and type(node.op) in OPERATIONS:
        return [lambda: setattr(node, "op", OPERATIONS[type(node.op)]())]
    if isinstance(node, ast.BoolOp):
        return [lambda: setattr(node, "op", ast.And() if isinstance(node.op, ast.Or) else ast.Or())]
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        return [lambda: setattr(node, "op", ast.UAdd())]
    if isinstance(node, (ast.If, ast.IfExp)):
        return [lambda: setattr(node, "test", ast.UnaryOp(ast.Not(), node.test))]
    if isinstance(node, ast.Constant) and isinstance(node.value, bool):
        return [lambda: setattr(node, "value", not node.value)]
    if isinstance(node, ast.Constant) and isinstance(node.value, (int, float)):
        return [lambda: setattr(node, "value", node.value + 1)]
    return []


def removals(node: ast.AST) -> list[Callable[[], None]]:
    """The ways to leave out a statement of a body, that is not a docstring and binds no local name."""
    found: list[Callable[[], None]] = []
    body: Any = getattr(node, "body", None)
    for number, statement in enumerate(body if isinstance(body, list) else []):
        calls = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call)
        targets = statement.targets if isinstance(statement, ast.Assign) else []
        stores = bool(targets) and not any(isinstance(target, ast.Name) for target in targets)
        if calls or stores or isinstance(statement, (ast.AugAssign, ast.Raise, ast.Continue, ast.Break)):
            found.append(partial(body.__setitem__, number, ast.Pass()))
    return found


def nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """All that do something: no annotations, no texts of errors, no decorators, in an order that is always the same."""
    yield tree
    for name, value in ast.iter_fields(tree):
        skipped = name in ("annotation", "returns", "decorator_list") or (isinstance(tree, ast.Raise) and name == "exc")
        if not skipped:
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from nodes(child)


@dataclass(frozen=True)
class Mutant:
    """One change of one module."""

    module: str
    number: int
    """Of the change, in the order of `all_changes`."""
    line: int
    before: str
    after: str

    def __str__(self) -> str:
        return f"{PACKAGE}/{self.module}.py:{self.line}: {self.before}  ->  {self.after}"


def all_changes(tree: ast.AST) -> list[tuple[ast.AST, Callable[[], None]]]:
    return [(node, change) for node in nodes(tree) for change in (*changes(node), *removals(node))]


def mutate(module: str, source: str, number: int) -> tuple[Mutant, str]:
    """A mutant and its source."""
    tree = ast.parse(source)
    node, change = all_changes(tree)[number]
    before = copy.deepcopy(tree)
    change()
    ast.fix_missing_locations(tree)
    old, new = ast.unparse(before).splitlines(), ast.unparse(tree).splitlines()
    first = next(i for i, (a, b) in enumerate(zip(old, new, strict=False)) if a != b)
    return Mutant(module, number, getattr(node, "lineno", 0), old[first].strip(), new[first].strip()), "\n".join(new)


def sample(folder: Path, count: int, seed: int, modules: list[str]) -> list[Mutant]:
    """So many mutants of some modules, in proportion to what there is to change."""
    sources = {module: (folder / PACKAGE / f"{module}.py").read_text(encoding="utf-8") for module in modules}
    places = [(m, number) for m, source in sources.items() for number in range(len(all_changes(ast.parse(source))))]
    chosen = random.Random(seed).sample(places, min(count, len(places)))
    return [mutate(module, sources[module], number)[0] for module, number in sorted(chosen)]


# --- the tests ---


def run_tests(folder: Path, tests: list[str], options: list[str], limit: float) -> str:
    """Run some tests in a process of their own, up to the first failure; what came of them."""
    child = os.fork()
    if child == 0:
        os.setsid()
        # Of the processor, so that a busy machine does not pass for a loop without end.
        resource.setrlimit(resource.RLIMIT_CPU, (round(limit), round(limit)))
        output = os.open(folder / "output", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(output, 1)
        os.dup2(output, 2)
        import pytest

        os._exit(int(pytest.main([*tests, "-x", "-q", "-p", "no:cacheprovider", *options])))
    status = _wait(child, _PATIENCE * limit)
    if status in (None, -signal.SIGXCPU, -signal.SIGKILL):
        return TIMED_OUT
    # 5: there are no such tests.
    return SURVIVED if status in (0, 5) else NOTICED


def _wait(child: int, limit: float) -> int | None:
    """Exit status of a process, or None if it had to be ended."""
    end = time.monotonic() + limit
    while time.monotonic() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.05)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


QUICK = ["-m", "not full and not parallel"]
FULL = ["-m", "(full or hypothesis) and not parallel", "--hypothesis-profile", "full"]


@dataclass
class Outcome:
    """What came of a mutant; a mutant for which a test takes too long is noticed."""

    quick: str
    full: str
    seconds: float


def judge(folder: Path, mutant: Mutant, limit: float) -> Outcome:
    path = folder / PACKAGE / f"{mutant.module}.py"
    source = path.read_text(encoding="utf-8")
    path.write_text(mutate(mutant.module, source, mutant.number)[1], encoding="utf-8")
    began = time.monotonic()
    tests = tests_of(mutant.module)
    try:
        quick = run_tests(folder, tests, QUICK, limit)
        full = run_tests(folder, tests, FULL, limit) if quick == SURVIVED else quick
    finally:
        path.write_text(source, encoding="utf-8")
    return Outcome(quick, full, time.monotonic() - began)


def prepare(folder: Path) -> None:
    """Copy the repository, and import what takes long."""
    shutil.copytree(ROOT, folder, ignore=LEFT_OUT, dirs_exist_ok=True)
    os.chdir(folder)
    # Nothing of the package, and none of the places where it is installed, may be found before the copy.
    os.environ |= {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": str(folder)}
    sys.dont_write_bytecode = True
    sys.path.insert(0, str(folder))
    for name in SLOW_TO_IMPORT:
        import_module(name)

    for name in [name for name in sys.modules if name.split(".")[0] == "tests"]:
        del sys.modules[name]
    assert not any(name.split(".")[0] == PACKAGE for name in sys.modules), "the mutant must be what is imported"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mutants", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit", type=float, default=300.0, help="seconds of the processor for a mutant's tests")
    parser.add_argument(
        "--modules", nargs="+", choices=MODULES, default=MODULES, metavar="MODULE", help="of the package"
    )
    parser.add_argument("--json", type=Path, help="file for the results")
    options = parser.parse_args()
    written = options.json.resolve() if options.json else None
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare(folder)
        results = []
        every = sorted({test for module in options.modules for test in tests_of(module)})
        if run_tests(folder, every, QUICK, 4 * options.limit) != SURVIVED:
            print(f"the tests must pass on the package as it is:\n{(folder / 'output').read_text()[-3000:]}")
            return 1
        for mutant in sample(folder, options.mutants, options.seed, options.modules):
            outcome = judge(folder, mutant, options.limit)
            results.append((mutant, outcome))
            print(f"{outcome.seconds:6.1f} s  {outcome.quick:9}  {outcome.full:9}  {mutant}", flush=True)
    report(results)
    if written:
        written.write_text(json.dumps([asdict(mutant) | asdict(outcome) for mutant, outcome in results], indent=1))
    return 0


def report(results: list[tuple[Mutant, Outcome]]) -> None:
    quick = sum(outcome.quick != SURVIVED for _, outcome in results)
    full = sum(outcome.full != SURVIVED for _, outcome in results)
    print(f"\n{len(results)} mutants: {Counter(mutant.module for mutant, _ in results)}")
    late = sum(outcome.quick == TIMED_OUT for _, outcome in results)
    print(
        f"noticed by make test: {quick}, {late} of them because a test took too long; by make test-all: {full}"
        + (f" ({quick / full:.1%})" if full else "")
    )
    for title, chosen in (
        ("noticed by make test-all only", [m for m, o in results if o.quick == SURVIVED != o.full]),
        ("noticed by no test", [m for m, o in results if o.full == SURVIVED]),
    ):
        print(f"\n{title}: {len(chosen)}")
        for mutant in chosen:
            print(f"  {mutant}")


if __name__ == "__main__":
    sys.exit(main())
