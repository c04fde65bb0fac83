"""Run suites of tests that were written elsewhere, dense and with this package's exchange: make outside.

python ci/outside.py [NAME...] --horovod FOLDER [--pytorch FOLDER]    of: "Horovod: test_torch" and so on (default: all)

Horovod's tests come from its repository, which --horovod names, and PyTorch's of FSDP2 from PyTorch's; without --pytorch they
are left out. The other suites come with the packages. What the suites need besides is installed into an environment of its
own, which is removed again. No suite is changed: a plugin of pytest (ci/suites/) puts a compressor of ratio 1 where a test
asks for none. Each suite is run twice, dense and so. What passes dense must pass so, unless REASONS says why not; a reason
that is not needed any more is an error, too.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))
import markdown  # noqa: E402  (benchmarks share it)
from integrations import make_environment  # noqa: E402  (it is beside this file)
from suites.outcomes import DENSE, EXCHANGE, FOLDER, OURS  # noqa: E402

NEEDED = ("mock==5.2.0", "expecttest==0.3.0", "accelerate==1.15.0", "torchdata==0.11.0", "jax==0.10.2")
"""What the suites import besides what `make setup` has installed."""
_AS_ROOT = ("--allow-run-as-root",) if os.geteuid() == 0 else ()
_MPIRUN = ("mpirun", *_AS_ROOT, "--oversubscribe", "--bind-to", "none", "--mca", "mpi_yield_when_idle", "1", "-np", "2")
_FOREIGN = ("OMPI_", "PMIX_", "PMI_", "PRTE_", "HOROVOD_")
_SERIOUS = ("passed", "skipped", "failed")
"""Outcomes, the more serious ones last: a test's is that of its worst rank."""


@dataclass(frozen=True)
class Suite:
    """Where the tests are, and what starts them."""

    distribution: str
    """The package whose release is shown."""
    folder: str
    """What has the tests: `HERE`, `KERAS`, `HOROVOD` or `PYTORCH`."""
    tests: tuple[str, ...]
    """Patterns of the files within the folder."""
    plugin: str = ""
    """The module of ci/suites that is loaded before the tests; none if the tests' own module puts the exchange in."""
    under: tuple[str, ...] = ()
    """What starts the ranks; nothing if each test starts them."""
    limit: float = 1200
    """Seconds after which a run is ended."""

    def files(self, given: Mapping[str, Path]) -> list[str]:
        """Return the paths of the tests. Repositories are in the folders that are given."""
        folder = {HERE: ROOT / "ci" / "suites", **given}.get(self.folder)
        if self.folder == KERAS:
            keras = find_spec("keras")
            if keras is None or keras.origin is None:
                raise SystemExit("Keras must be installed for its tests, and was not found; run make setup")
            folder = Path(keras.origin).parent / "src"
        found = [path for pattern in self.tests for path in sorted(folder.glob(pattern))] if folder else []
        if not found:
            copy = f"--{self.folder} must be a copy of the repository, for {self.tests}, got {folder}; get one"
            raise SystemExit(f"{copy}: {CLONES.get(self.folder)}")
        return [str(path.resolve()) for path in found]


HERE, KERAS, HOROVOD, PYTORCH = "ci/suites", "keras", "horovod", "pytorch"
_FSDP2 = "test/distributed/_composable/fsdp"
CLONES = {
    HOROVOD: "git clone --depth 1 --branch v0.28.1 https://github.com/horovod/horovod",
    PYTORCH: "git clone --depth 1 --filter blob:none --sparse https://github.com/pytorch/pytorch; "
    f"git -C pytorch sparse-checkout set {_FSDP2}",
}
SUITES = {
    "Horovod: test_torch": Suite("horovod", HOROVOD, ("test/parallel/test_torch.py",), "suites.horovod_torch", _MPIRUN),
    "PyTorch: DDP": Suite("torch", HERE, ("torch_ddp.py",), "suites.no_gpu"),
    "PyTorch: FSDP2": Suite(
        "torch",
        PYTORCH,
        tuple(f"{_FSDP2}/test_fully_shard_{one}.py" for one in ("autograd", "frozen")),
        "suites.torch_fsdp",
    ),
    "PyTorch: optimizers": Suite("torch", HERE, ("torch_optimizers.py",), under=_MPIRUN),
    "Keras: optimizers": Suite("keras", KERAS, ("optimizers/*_test.py",), "suites.keras_optimizers", _MPIRUN),
    "Keras: trainers": Suite("keras", KERAS, ("trainers/trainer_test.py",), "suites.keras_trainers", _MPIRUN, 2400),
    "Accelerate: scripts": Suite("accelerate", HERE, ("accelerate_scripts.py",)),
}
_OF_DDP = "torch_ddp::TestDDP::test_ddp_"
REASONS: dict[str, dict[str, str]] = {
    "PyTorch: DDP": {
        f"{_OF_DDP}comm_hook_logging": "it wants DDP to have no hook; PyTorch's own allreduce_hook fails it, too",
        f"{_OF_DDP}grad_div_uneven_inputs": "join(divide_by_initial_world_size=False) is not told to a hook; PyTorch's own "
        "allreduce_hook fails it, too",
        f"{_OF_DDP}profiling_torch_profiler": "it counts calls of all_reduce, and the exchange has collectives of its own",
    },
    "PyTorch: optimizers": {
        f"torch_optimizers::test_trains_as_on_the_union[SparseAdam-{one}-DDP]": "DDP hands sparse gradients over alone; they "
        "are refused by name, with the advice to make the embedding with sparse=False"
        for one in ("default", "non-default lr", "Tensor lr", "maximize")
    },
    "Keras: optimizers": {
        "multi_optimizer_test::MultiOptimizerTest::test_multi_optimizer_wrapped_in_loss_scale_optimizer": "the plugin makes "
        "the innermost optimizers distributed, which is refused by name: the outer one must be",
    },
}
"""By suite: the tests that pass dense and not with our exchange, and why that is right."""


@dataclass
class Outcomes:
    """What came of a run, by test."""

    outcomes: dict[str, str]
    messages: dict[str, str]
    used: set[str]
    """The tests into which the exchange was put."""

    def of(self, outcome: str) -> set[str]:
        return {test for test, one in self.outcomes.items() if one == outcome}


def run(command: Sequence[str], folder: Path, exchange: str, limit: float) -> str:
    """Return what a command prints. It may fail, as tests do, and is ended at the limit."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(_FOREIGN)}
    environment |= {FOLDER: str(folder), EXCHANGE: exchange, "PYTHONPATH": f"{ROOT / 'ci'}{os.pathsep}{ROOT}"}
    environment |= {"OMP_NUM_THREADS": "1", "TF_NUM_INTRAOP_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "3"}
    # A rank that waits for one whose test has failed must end.
    environment["HOROVOD_STALL_SHUTDOWN_TIME_SECONDS"] = "120"
    printed = folder / "printed.txt"
    with printed.open("w", encoding="utf-8") as file:
        running = subprocess.Popen(
            command, cwd=folder, env=environment, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            running.wait(limit)
        except subprocess.TimeoutExpired:
            os.killpg(running.pid, signal.SIGKILL)
            running.wait()
    return printed.read_text(encoding="utf-8", errors="replace")


def read(folder: Path) -> Outcomes:
    """Return what the ranks have written. A test that some rank has not ended counts as failed."""
    ranks = [
        [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        for path in sorted(folder.glob("outcomes-*.jsonl"))
    ]
    found = Outcomes({}, {}, set())
    for line in (line for rank in ranks for line in rank):
        test = _short(line["test"])
        worst = max(found.outcomes.get(test, "passed"), line["outcome"], key=_SERIOUS.index)
        if worst != found.outcomes.get(test):
            found.outcomes[test], found.messages[test] = worst, line["message"]
    for rank in ranks:
        for test in found.outcomes.keys() - {_short(line["test"]) for line in rank}:
            found.outcomes[test], found.messages[test] = "failed", "not ended on all ranks"
    for path in folder.glob("used-*.jsonl"):
        found.used |= {_short(json.loads(line)["test"]) for line in path.read_text(encoding="utf-8").splitlines()}
    return found


def _short(test: str) -> str:
    """The test's name without folders."""
    file, _, name = test.partition("::")
    return f"{Path(file).stem}::{name}"


def run_suite(suite: Suite, python: Path, given: Mapping[str, Path], within: Path) -> dict[str, Outcomes]:
    """Outcomes by exchange."""
    plugins = [part for one in ("suites.outcomes", suite.plugin, "no:cacheprovider") if one for part in ("-p", one)]
    results = {}
    for exchange in (DENSE, OURS):
        folder = within / exchange
        folder.mkdir(parents=True)
        options = ["-q", "-c", os.devnull, *plugins]
        command = [*suite.under, str(python), "-m", "pytest", *options, *suite.files(given)]
        printed = run(command, folder, exchange, suite.limit)
        results[exchange] = read(folder)
        if not results[exchange].of("passed"):
            raise SystemExit(f"{printed[-5000:]}\n{' '.join(command)}\nno test has passed")
    if not results[OURS].used:
        raise SystemExit(f"the exchange was put into no test of {suite.tests}")
    return results


def differences(name: str, results: dict[str, Outcomes]) -> tuple[list[tuple[str, str]], list[str]]:
    """Return the tests that pass dense only, with their reasons, and what is wrong."""
    reasons, wrong = REASONS.get(name, {}), []
    lost = sorted(results[DENSE].of("passed") - results[OURS].of("passed"))
    for test in lost:
        if test not in reasons:
            message = results[OURS].messages.get(test, "not run")
            wrong.append(f"{name}: {test} passes dense, and has no reason to fail with our exchange:\n{message}")
    wrong += [f"{name}: {test} has a reason, and passes, or fails dense, too" for test in sorted({*reasons} - {*lost})]
    return [(test, reasons.get(test, "none: a fault")) for test in lost], wrong


def release_of(distribution: str, python: Path) -> str:
    code = f"from importlib.metadata import version; print({distribution!r}, version({distribution!r}))"
    return subprocess.run([str(python), "-c", code], text=True, capture_output=True, check=True).stdout.strip()


def main() -> None:
    parser = argparse.ArgumentParser(description="run suites of tests from elsewhere, dense and with our exchange")
    parser.add_argument("names", nargs="*", help=f"of {', '.join(SUITES)}; all if none is given")
    for name, clone in CLONES.items():
        parser.add_argument(f"--{name}", type=Path, help=f"a copy of its repository: {clone}")
    chosen = parser.parse_args()
    unknown = sorted(set(chosen.names) - set(SUITES))
    if unknown:
        parser.error(f"the names must be of {', '.join(SUITES)}, got {', '.join(unknown)}")
    given = {name: folder for name in CLONES if (folder := getattr(chosen, name)) is not None}
    names = chosen.names or [name for name, suite in SUITES.items() if suite.folder != PYTORCH or PYTORCH in given]
    for name in names:
        SUITES[name].files(given)
    rows, lost, wrong = [], [], []
    with tempfile.TemporaryDirectory(prefix="outside-") as created:
        python = make_environment(Path(created) / "environment", NEEDED)
        for number, name in enumerate(names):
            results = run_suite(SUITES[name], python, given, Path(created) / str(number))
            dense, ours = results[DENSE], results[OURS]
            without, faults = differences(name, results)
            lost += [[name, f"`{test}`", reason] for test, reason in without]
            wrong += faults
            counts = [len(dense.outcomes), len(dense.of("passed")), len(ours.of("passed")), len(ours.used)]
            rows.append([name, release_of(SUITES[name].distribution, python), *map(str, counts)])
            print(f"{name}: {counts}", file=sys.stderr, flush=True)
    print(
        markdown.table(["suite", "release", "tests", "pass dense", "pass with us", "with our exchange"], rows, words=2)
    )
    if lost:
        print()
        print(markdown.table(["suite", "passes dense only", "reason"], lost, words=3))
    if wrong:
        raise SystemExit("\n\n".join(wrong))


if __name__ == "__main__":
    main()
