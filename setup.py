"""The compiled part of horovod_sparse, and what is read from other files. Without a C++ compiler it installs all the same."""

import re
from pathlib import Path

from setuptools import find_packages, setup

here = Path(__file__).parent

REPOSITORY = "https://example.org/horovod_sparse"
"""The owner of the repository replaces this address, here alone."""


def find(pattern: str, file: str) -> str:
    """Return the one text that a line of a file has in place of the pattern's group."""
    found = re.search(pattern, (here / file).read_text(encoding="utf-8"), re.MULTILINE)
    if found is None:
        raise RuntimeError(f"{file} must have a line like {pattern}")
    return found.group(1)


def read_description() -> str:
    """Return the README with absolute links, or nothing where it was left out, as in a container that only installs."""
    readme = here / "README.md"
    text = readme.read_text(encoding="utf-8") if readme.exists() else ""
    # Package indexes have neither the pages nor the pictures of the repository.
    text = text.replace('src="docs/', f'src="{REPOSITORY}/raw/main/docs/')
    return re.sub(r"\]\((?!https?://|#)", f"]({REPOSITORY}/blob/main/", text)


setup(
    # Without an import, because the dependencies may not be installed yet.
    version=find('^__version__ = "([^"]+)"$', "horovod_sparse/__init__.py"),
    long_description=read_description(),
    long_description_content_type="text/markdown",
    project_urls={
        "Repository": REPOSITORY,
        "Documentation": f"{REPOSITORY}/blob/main/docs/index.md",
        "Changelog": f"{REPOSITORY}/blob/main/CHANGELOG.md",
        "Issues": f"{REPOSITORY}/issues",
    },
    packages=find_packages(include=["horovod_sparse", "horovod_sparse.*"]),
    package_data={"horovod_sparse": ["py.typed", "kernels/*.h"]},
    cffi_modules=["horovod_sparse/kernels/build.py:ffibuilder"],
    # The kernels use no more of Python than all its versions since then have.
    options={"bdist_wheel": {"py_limited_api": "cp310"}},
    zip_safe=False,
)
