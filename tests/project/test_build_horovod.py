"""The set-up scripts, without building anything."""

import hashlib
import io
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from tests.harness.process import ROOT

BUILD = ROOT / "tools" / "build_horovod.sh"
FORMER = ROOT / "docker" / "build_horovod.sh"
"""Where pages and scripts of others may still look for it."""


@pytest.mark.parametrize("path", [BUILD, FORMER], ids=lambda path: path.parent.name)
@pytest.mark.parametrize("copied", [False, True])
def test_it_can_be_called_by_both_paths(path: Path, copied: bool, tmp_path: Path) -> None:
    """Also where an archive has a copy in place of the link, and from another folder."""
    root = ROOT
    if copied:
        for one in (BUILD, FORMER, ROOT / "docker" / "common.sh"):
            (tmp_path / one.parent.name).mkdir(exist_ok=True)
            shutil.copy(one, tmp_path / one.parent.name)
        root = tmp_path
    command = f"source '{root / path.relative_to(ROOT)}'; describe_wheel '{sys.executable}'; echo \"${{key##*-}}\""
    environment = {**os.environ, "HOROVOD_WHEEL_CACHE": str(tmp_path)}
    done = subprocess.run(
        ["bash", "-c", command], capture_output=True, text=True, env=environment, check=True, cwd=tmp_path
    )
    assert done.stdout.strip() == hashlib.sha256(BUILD.read_bytes()).hexdigest()[:12]


def test_another_source_than_the_known_one_is_refused_before_anything_of_it_is_run(tmp_path: Path) -> None:
    """Whatever runs the setup.py of this made-up release leaves a file `ran`."""
    with tarfile.open(tmp_path / "horovod-0.28.1.tar.gz", "w:gz") as archive:
        setup = f"open({str(tmp_path / 'ran')!r}, 'w'); import setuptools; setuptools.setup(name='horovod')"
        for name, text in (("setup.py", setup), ("PKG-INFO", "Name: horovod\nVersion: 0.28.1\n")):
            entry = tarfile.TarInfo(f"horovod-0.28.1/{name}")
            entry.size = len(text)
            archive.addfile(entry, io.BytesIO(text.encode()))
    (tmp_path / "work").mkdir()
    script = (
        f"source '{BUILD}'; describe_wheel '{sys.executable}'; work='{tmp_path}/work' log='{tmp_path}/log'; : >\"$log\"; "
        'download >>"$log" 2>&1 || { cat "$log"; exit 1; }'
    )
    where = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path), "HOROVOD_WHEEL_CACHE": str(tmp_path)}
    environment = {**os.environ, "HOROVOD_VERSION": "0.28.1", **where}
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 1
    assert "the index serves a horovod-0.28.1.tar.gz whose SHA-256 is not 92a43f5a94c4" in done.stdout
    assert not (tmp_path / "ran").exists()
