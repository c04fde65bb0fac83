"""One version and one list of needs everywhere, and an environment in which no test skips for want of something."""

from __future__ import annotations

import re
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

import horovod_sparse
from horovod_sparse import kernels
from tests.harness.process import ROOT

yaml = pytest.importorskip("yaml")


def test_one_version_everywhere() -> None:
    version = horovod_sparse.__version__
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == version
    newest = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest is not None
    assert newest.group(1) == version


def test_the_recipe_for_conda_says_what_pyproject_says() -> None:
    tomllib = pytest.importorskip("tomllib", reason="Python 3.11 has it")
    recipe = yaml.safe_load((ROOT / "conda" / "recipe.yaml").read_text())
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text())
    project, needs = pyproject["project"], recipe["requirements"]
    assert recipe["context"]["version"] == horovod_sparse.__version__
    assert recipe["package"]["name"] == project["name"]
    assert needs["run"] == [f"python {project['requires-python']}", *project["dependencies"]]
    wanted = [re.sub("(?=>)", " ", one) for one in pyproject["build-system"]["requires"]]
    assert needs["host"] == ["python", "pip", *wanted]
    about = recipe["about"]
    assert (about["summary"], about["license"]) == (project["description"], project["license"])
    assert [about["license_file"]] == project["license-files"]


def test_make_installs_what_builds_the_package_before_the_package() -> None:
    tomllib = pytest.importorskip("tomllib", reason="Python 3.11 has it")
    wanted = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
    frameworks, package = (ROOT / "docker" / "setup.sh").read_text().split("install_package() {")
    assert "--no-build-isolation" in package, "else pip installs them itself"
    (line,) = re.findall(r'"installing \$wanted" "\$\{pip\[@\]\}" (.*)', frameworks)
    assert {re.match(r"\w+", need).group() for need in wanted} <= set(line.split())


@pytest.mark.skipif(not Path(sys.prefix, ".setup").exists(), reason="the environment is not one of `make setup`")
def test_make_setup_has_installed_what_tests_skip_without() -> None:
    for name in ("triton", "xdist", "mpi4py", "matplotlib", "sklearn"):
        assert find_spec(name) is not None, f"{name} is missing: run 'make clean setup'"
    assert kernels.variants(), "the kernels are missing: see .venv/setup.log"
