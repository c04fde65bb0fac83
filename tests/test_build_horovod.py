"""The set-up scripts, without building anything."""

import hashlib
import io
import os
import subprocess
import sys
import tarfile
from pathlib import Path

SCRIPTS = Path(__file__).parent.parent / "docker"
BUILD = SCRIPTS / "build_horovod.sh"


def run(*command: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, **environment}
    return subprocess.run([str(part) for part in command], capture_output=True, text=True, env=env, check=False)


def make_source(folder: Path, version: str) -> str:
    """Put a made-up release of Horovod into a folder; its hash. Whatever runs its setup.py leaves a file `ran` there."""
    source = folder / f"horovod-{version}.tar.gz"
    setup = (
        f"open({str(folder / 'ran')!r}, 'w'); import setuptools; setuptools.setup(name='horovod', version={version!r})"
    )
    with tarfile.open(source, "w:gz") as archive:
        for name, text in (("setup.py", setup), ("PKG-INFO", f"Name: horovod\nVersion: {version}\n")):
            entry = tarfile.TarInfo(f"horovod-{version}/{name}")
            entry.size = len(text)
            archive.addfile(entry, io.BytesIO(text.encode()))
    return hashlib.sha256(source.read_bytes()).hexdigest()


def download(folder: Path, version: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Download a release from what is in a folder."""
    (folder / "work").mkdir()
    script = (
        f"source '{BUILD}'; describe_wheel '{sys.executable}'; work='{folder}/work' log='{folder}/log'; : >\"$log\"; "
        'download >>"$log" 2>&1 || { cat "$log"; exit 1; }'
    )
    where = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(folder), "HOROVOD_WHEEL_CACHE": str(folder)}
    return run("bash", "-c", script, HOROVOD_VERSION=version, **where, **environment)


def test_another_source_than_the_known_one_is_refused_before_anything_of_it_is_run(tmp_path: Path) -> None:
    make_source(tmp_path, "0.28.1")
    done = download(tmp_path, "0.28.1")
    assert done.returncode == 1
    assert "the index serves a horovod-0.28.1.tar.gz whose SHA-256 is not 92a43f5a94c4" in done.stdout
    assert not (tmp_path / "ran").exists()
