"""Write the API reference, as web pages, out of the docstrings: `make docs`. A warning is an error. Needs no network.

    python docs/api.py [FOLDER]

What the adapters hand on from Horovod is left out: it is Horovod's to describe.
"""

from __future__ import annotations

import dataclasses
import os
import pkgutil
import sys
import warnings
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, get_type_hints

PACKAGE = "horovod_sparse"
ADAPTERS = tuple(f"{PACKAGE}.{name}" for name in ("torch", "tensorflow", "tensorflow.keras", "numpy"))
LEFT_OUT = tuple(f"{PACKAGE}.{name}" for name in ("tools", "kernels"))
"""The commands, and what is compiled for a processor."""


def write(folder: Path) -> list[str]:
    """Write the reference to a folder; the warnings that there were."""
    # Imported before pdoc imports them, which does not let modules start programs.
    for adapter in ADAPTERS:
        _keep_own(import_module(adapter))
    import pdoc
    from pdoc import render

    for module in _modules():
        for cls in _classes(module):
            _resolve_constructor(cls)
    render.configure(docformat="google", footer_text=PACKAGE)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        # pdoc does not find the package keras by itself: Horovod has one of that name too.
        wanted = (PACKAGE, f"{PACKAGE}.tensorflow.keras", *(f"!{name}" for name in LEFT_OUT))
        pdoc.pdoc(*wanted, output_directory=folder)
    return [str(warning.message) for warning in caught]


def _keep_own(module: ModuleType) -> None:
    """Leave in the module's list of public names what is the package's."""
    public = {name: getattr(module, name) for name in module.__all__}
    homes = {name: str(getattr(value, "__module__", getattr(value, "__name__", ""))) for name, value in public.items()}
    module.__dict__["__all__"] = [name for name in public if homes[name].startswith(PACKAGE)]


def _modules() -> Iterator[ModuleType]:
    path = import_module(PACKAGE).__path__
    for found in pkgutil.walk_packages(path, f"{PACKAGE}."):
        if not found.name.startswith(LEFT_OUT):
            yield import_module(found.name)


def _classes(module: ModuleType) -> Iterator[type]:
    for value in list(vars(module).values()):
        if isinstance(value, type) and value.__module__ == module.__name__:
            yield value


def _resolve_constructor(cls: Any) -> None:
    """Write out the types in a constructor that Python generated: pdoc would look for their names in the wrong module."""
    name = "__new__" if issubclass(cls, tuple) else "__init__"
    if name in vars(cls) and (dataclasses.is_dataclass(cls) or hasattr(cls, "_fields")):
        made, hints = getattr(cls, name), get_type_hints(cls)
        made.__annotations__ = {field: hints.get(field) for field in made.__annotations__}


def main() -> int:
    """The exit status: 0 without warnings."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parent.parent / "build" / "api"
    found = write(folder)
    for text in found:
        print(f"warning: {text}", file=sys.stderr)
    print(f"{len(list(folder.rglob('*.html')))} pages in {folder}, {len(found)} warnings")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
