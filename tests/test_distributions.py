"""What must be in the distributions and what must not; `make package` builds them and tries them."""

from __future__ import annotations

import pytest
from distributions import CORE, INSTALLATIONS, ROOT, check_contents

SOURCES = {path.relative_to(ROOT).as_posix() for path in (ROOT / "horovod_sparse").rglob("*.py")}
MARKERS = {"horovod_sparse/py.typed", "horovod_sparse/kernels/kernels.h"}
CONTENTS = {
    "sdist": SOURCES
    | MARKERS
    | {"horovod_sparse/kernels/kernels.cpp", "setup.py", "pyproject.toml", "README.md", "LICENSE"},
    "wheel": SOURCES
    | MARKERS
    | {"horovod_sparse/kernels/_native.abi3.so", "horovod_sparse-1.0.dist-info/licenses/LICENSE"},
}


@pytest.mark.parametrize("kind", CONTENTS)
def test_nothing_may_be_missing(kind: str) -> None:
    check_contents(CONTENTS[kind], kind)
    for name in CONTENTS[kind]:
        with pytest.raises(AssertionError, match=f"{kind} (lacks|must hold)"):
            check_contents(CONTENTS[kind] - {name}, kind)


@pytest.mark.parametrize("kind", CONTENTS)
@pytest.mark.parametrize(
    "strange", ["tests/test_wire.py", "horovod_sparse/exchange/__pycache__/wire.pyc", "docker/setup.sh"]
)
def test_nothing_else_may_be_there(kind: str, strange: str) -> None:
    with pytest.raises(AssertionError, match=f"{kind} must not hold"):
        check_contents(CONTENTS[kind] | {strange}, kind)


def test_installations_run_tests_that_there_are_and_have_one_framework_at_most() -> None:
    for installation in INSTALLATIONS.values():
        assert all((ROOT / "tests" / f"test_{test}.py").is_file() for test in (*CORE, *installation.tests))
        assert any((ROOT / word).is_file() for word in installation.command)
        assert len({"torch", "tensorflow"} & set(installation.modules)) <= 1
