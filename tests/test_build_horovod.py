"""The set-up scripts, without building anything."""

import hashlib
import io
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parent.parent / "docker"
BUILD = SCRIPTS / "build_horovod.sh"

# The smallest source distribution to which every change for torch and TensorFlow applies.
SOURCES = {
    "CMakeLists.txt": "set(CMAKE_CXX_STANDARD 14)",
    "setup.py": "config = 'RelWithDebInfo'",
    "third_party/flatbuffers/include/flatbuffers/stl_emulation.h": "const size_type count_;",
    "horovod/runner/js_run.py": "from distutils.spawn import find_executable",
    "cmake/Modules/FindPytorch.cmake": (
        "print(True if ((torch.version.cuda is not None) and (CUDA_HOME is not None)) else False)"
    ),
    "horovod/torch/CMakeLists.txt": "set(CMAKE_CXX_STANDARD 14)\n"
    "from distutils.sysconfig import get_python_inc; print(get_python_inc())",
    "horovod/torch/mpi_ops_v2.cc": "      py::gil_scoped_release release_python_gil;\n"
    'PYBIND11_MODULE(mpi_lib_v2, m) {\n  m.def("horovod_torch_join", &DoJoin);\n}',
    "horovod/tensorflow/CMakeLists.txt": "set(CMAKE_CXX_STANDARD 17)\n"
    'list(APPEND TF_SOURCES "${PROJECT_SOURCE_DIR}/horovod/tensorflow/xla_mpi_ops.cc")',
}


def run(*command: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, **environment}
    return subprocess.run([str(part) for part in command], capture_output=True, text=True, env=env, check=False)


def apply_changes(folder: Path) -> subprocess.CompletedProcess[str]:
    script = (
        f"source '{BUILD}'; python='{sys.executable}' torch=torch tensorflow=tensorflow gpu=0; apply_changes '{folder}'"
    )
    return run("bash", "-c", script)


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    for name, text in SOURCES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def test_changes_are_applied_each_with_its_reason(sources: Path) -> None:
    done = apply_changes(sources)
    assert done.returncode == 0, done.stderr
    assert (sources / "CMakeLists.txt").read_text() == "set(CMAKE_CXX_STANDARD 17)"
    assert "xla_mpi_ops" not in (sources / "horovod/tensorflow/CMakeLists.txt").read_text()
    assert not any("distutils" in (sources / name).read_text() for name in SOURCES)
    assert "need C++20" in done.stderr
    binding = (sources / "horovod/torch/mpi_ops_v2.cc").read_text()
    assert binding.count("gil_scoped_release") == binding.count("call_guard<py::gil_scoped_release>") == 1


@pytest.mark.parametrize("name", SOURCES)
@pytest.mark.full
def test_a_text_that_is_not_there_fails_loudly(sources: Path, name: str) -> None:
    (sources / name).write_text("something else\n")
    done = apply_changes(sources)
    assert done.returncode != 0
    assert f"cannot change {sources / name}: expected exactly one" in done.stderr
    assert "found 0" in done.stderr


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
