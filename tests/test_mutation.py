"""The changes that `benchmarks/mutation.py` makes to the package."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"

SOURCE = '''
"""A docstring is no statement."""
LIMIT: Literal[1] = 3

@dataclass(frozen=True)
class Place:
    def full(self, count: int = 2) -> bool:
        """Nor is this."""
        self.seen += count
        self.told = True
        self.tell(count)
        if count < LIMIT and not self.open:
            raise ValueError(f"{count + 1} is too few")
        return count * 2 > LIMIT
'''
EXPECTED = {
    "LIMIT: Literal[1] = 4",
    "def full(self, count: int=3) -> bool:",
    "self.seen -= count",
    "self.told = False",
    "pass",
    "if count <= LIMIT and (not self.open):",
    "if count < LIMIT or not self.open:",
    "if count < LIMIT and +self.open:",
    "if not (count < LIMIT and (not self.open)):",
    "return count * 2 >= LIMIT",
    "return count / 2 > LIMIT",
    "return count * 3 > LIMIT",
}


@pytest.fixture
def mutation(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module `benchmarks/mutation.py`."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import mutation

    return mutation


def test_every_change_is_one_and_what_does_nothing_is_left_alone(mutation: Any) -> None:
    mutants = [mutation.mutate("m", SOURCE, number) for number in range(len(mutation.all_changes(ast.parse(SOURCE))))]
    assert {mutant.after for mutant, _ in mutants} == EXPECTED
    # Left out can be the sum, the store, the call and the error.
    assert sum(mutant.after == "pass" for mutant, _ in mutants) == 4
    original = ast.unparse(ast.parse(SOURCE)).splitlines()
    for mutant, source in mutants:
        changed = source.splitlines()
        assert [new for old, new in zip(original, changed, strict=True) if old != new] == [
            line for line in changed if line.strip() == mutant.after and line not in original
        ]


@pytest.mark.full
def test_a_sample_depends_on_its_seed_alone(mutation: Any) -> None:
    root = BENCHMARKS.parent
    first, again, other = (
        mutation.sample(root, 20, seed, ["exchange/wire", "exchange/protocols"]) for seed in (0, 0, 1)
    )
    assert first == again != other
    assert len(set(first)) == 20


def test_every_module_and_every_test_is_there(mutation: Any) -> None:
    root = BENCHMARKS.parent
    for module, tests in mutation.TESTS.items():
        assert (root / "horovod_sparse" / f"{module}.py").is_file()
        assert all((root / "tests" / f"test_{test}.py").is_file() for test in tests.split())
