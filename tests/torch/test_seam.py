"""The seams to stock Horovod: what they check, that they are idempotent, and what importing them brings.

What only TensorFlow's seam does is in `tests/tensorflow/test_seam.py`.
"""

from __future__ import annotations

import inspect
import re
from importlib import import_module
from typing import Any

import pytest
from horovod.torch import optimizer as horovod_optimizer

from horovod_sparse.torch import seam
from tests.harness.process import is_from, python

STOCK_CLASSES = (horovod_optimizer._DistributedOptimizer, horovod_optimizer._DistributedAdasumOptimizer)


def modules(framework: str) -> tuple[Any, Any]:
    """Horovod's module, and ours."""
    return pytest.importorskip(f"horovod.{framework}", exc_type=ImportError), import_module(
        f"horovod_sparse.{framework}"
    )


def test_a_second_call_extends_nothing() -> None:
    before = [dict(vars(cls)) for cls in STOCK_CLASSES]
    seam.install()
    assert [dict(vars(cls)) for cls in STOCK_CLASSES] == before
    ours = [one for one in before[0].values() if is_from(seam, one)]
    stock = [inspect.unwrap(one) for one in ours if hasattr(one, "__wrapped__")]
    # Horovod's has no `add_param_group`.
    assert len(stock) == len(ours) - 1 > 0 and all(is_from(horovod_optimizer, one) for one in stock)


JOIN = """
from types import SimpleNamespace
from horovod.{framework} import join
import horovod_sparse.{framework} as ours

def said():
    try:
        join()
    except Exception as error:
        return f"{{type(error).__name__}}: {{error}}"

stock = said()
compressor = ours.TopK(0.5, warmup=None)
compressor.bind(SimpleNamespace(active=True))
refused = said()
cycle = [compressor]
cycle.append(cycle)
del compressor, cycle
print(stock, refused, said(), sep="\\n")
"""


@pytest.mark.parametrize("framework", ["torch", "tensorflow"])
def test_stock_join_is_untouched_unless_a_compressor_serves(framework: str) -> None:
    """Also by a name that was imported before; an optimizer that nobody uses any more does not count."""
    modules(framework)
    done = python("-c", JOIN.format(framework=framework))
    stock, refused, again = done.stdout.splitlines()
    assert "Horovod has not been initialized" in stock and "Horovod has not been initialized" in again, done
    assert re.fullmatch(r"AssertionError: .* TopK\(.* docs/troubleshooting\.md", refused), done


@pytest.mark.parametrize("own", [True, False])
def test_an_optimizer_of_another_framework_is_refused_with_its_class_and_the_remedy(own: bool) -> None:
    keras, (horovod, ours) = pytest.importorskip("keras"), modules("torch")
    with pytest.raises(
        TypeError, match=r"one of torch\.optim, .* got <keras.*SGD.*; .* horovod_sparse\.tensorflow\.keras"
    ):
        (ours if own else horovod).DistributedOptimizer(keras.optimizers.SGD(0.1), compression=ours.TopK(0.1))


# --- what importing brings ---


@pytest.mark.parametrize(
    ("framework", "replaced"), [("torch", set()), ("tensorflow", {"broadcast_variables"}), ("tensorflow.keras", set())]
)
def test_all_names_of_horovod_are_there(framework: str, replaced: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Also private ones, such as `_executing_eagerly`, and those that come later. What is replaced takes Keras 3 too."""
    horovod, ours = modules(framework)
    monkeypatch.setattr(horovod, "added_later", object(), raising=False)
    names = {*dir(horovod)} - {"load_model"}
    assert not [name for name in names if not hasattr(ours, name)]
    # Modules come and go with what else is imported.
    own = {name for name in names - replaced if name[:2] != "__" and not inspect.ismodule(getattr(horovod, name))}
    assert not [name for name in own if getattr(ours, name) is not getattr(horovod, name)]
    offered = set(ours.__all__)
    assert {"SIDCo", "TopK", "NoOp", "init", "allreduce", "DistributedOptimizer"} | replaced <= offered
    assert {name for name in offered if inspect.ismodule(getattr(ours, name))} <= vars(horovod).keys()
    assert ours.elastic.run is horovod.elastic.run
    assert "added_later" not in offered and not hasattr(ours, "no_such_name")


IMPORT = """
import horovod, horovod.{framework} as stock
state = lambda: {replaced}
horovod.__version__, before = {version!r}, state()
try:
    import horovod_sparse.{framework}
except ImportError as error:
    print(error)
print(state() == before)
"""
REPLACED = {
    "torch": "dict(vars(stock.optimizer._DistributedOptimizer))",
    "tensorflow": "stock._make_allreduce_grads_fn",
}


REFUSED = r"Horovod must be 0\.28\.1, .* got 0\.29\.0; install horovod==0\.28\.1.*\nTrue\n"


@pytest.mark.parametrize(
    ("framework", "version", "printed"),
    # The last is a build of one's own.
    [("torch", "0.29.0", REFUSED), ("tensorflow", "0.29.0", REFUSED), ("torch", "0.28.1+nv24.1", r"False\n")],
)
def test_another_horovod_is_refused_before_anything_is_replaced(framework: str, version: str, printed: str) -> None:
    modules(framework)
    done = python("-c", IMPORT.format(framework=framework, replaced=REPLACED[framework], version=version))
    assert re.fullmatch(printed, done.stdout), done
