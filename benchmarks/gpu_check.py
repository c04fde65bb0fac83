"""Whether the Triton kernels are right on this machine's GPU, never wait for it, and how long they take.

    python benchmarks/gpu_check.py [--sizes 25M 110M 1B] [--repetitions 20]

Needs PyTorch and Triton, no Horovod and no compiled kernels. First every step is compared with the NumPy oracle. Then, with
PyTorch set to raise where the host waits for the device, steps run from gradient to message. The table has what a worker's step
takes, and what comes after the collective, in units of `residual.add_(gradient)`. Rows take turns, with the unit before each.
Launches queue up behind a busy device, as in a backward pass. A selection that was timed is checked.

Without a GPU it says "not measured: no GPU" and exits with status 2. `--interpret` runs all of it on the CPU in Triton's
interpreter, as a test of this script: what it prints is then no measurement.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import markdown
import numpy as np
import torch
from plain import plain_sidco
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from horovod_sparse.compressors import DGC, GaussianK, RedSync, SIDCo, Threshold, TopK
from horovod_sparse.compressors.base import Compressor
from horovod_sparse.core.feedback import Feedback
from horovod_sparse.core.layout import Parameter
from horovod_sparse.core.plan import Stage, layouts_of
from horovod_sparse.core.sending import Sending
from horovod_sparse.core.step import Step
from horovod_sparse.estimation import fits
from horovod_sparse.numpy.ops import NumpyOps
from horovod_sparse.tools.quantities import parse_count
from horovod_sparse.torch.compiled import tensor_ops

NOT_MEASURED = 2
BAR, BAR_RATIO = 1.6, 0.001
WORLD = 4
_BUSY_CYCLES = 2_000_000
"""For about a millisecond the device is busy, while the host queues up what is timed."""
_WARM_STEPS = 100
_SHIFTS = 2**20
"""Numbers are drawn in addition to a gradient's, which then begins at another one in each step."""
_ROOM = 16
"""Memory that a size is measured with, as a multiple of the residual's."""


def main() -> int:
    options = parse()
    if options.interpret:
        os.environ["TRITON_INTERPRET"] = "1"
    elif not torch.cuda.is_available():
        print("not measured: no GPU")
        return NOT_MEASURED
    if find_spec("triton") is None:
        print("not measured: no Triton")
        return NOT_MEASURED
    device = Device(options.interpret)
    say(f"{device.name}; comparing steps with the NumPy oracle")
    compared = sum(compare(device, make) for make in COMPARED)
    say("steps while PyTorch raises where the host would wait")
    for make in COMPARED:
        never_waits(device, make)
    results: list[Figures] = []
    for size in options.sizes:
        if not device.has_room(_ROOM * 4 * size):
            print(f"{size:,} elements: not measured, the device has no {_ROOM * 4 * size / 1e9:.0f} GB left")
            continue
        for ratio in options.ratios if size == options.sizes[0] else options.ratios[:1]:
            results += measure(device, size, ratio, options.repetitions)
    report(device, compared, results)
    return 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    sizes, default = partial(parse_count, "sizes"), [25_000_000, 110_000_000, 1_000_000_000]
    parser.add_argument("--sizes", nargs="+", type=sizes, default=default, metavar="N", help="elements, as 25M")
    parser.add_argument("--ratios", nargs="+", type=float, default=[0.001, 0.01, 0.1], help="all for the first size")
    parser.add_argument("--repetitions", type=int, default=20)
    parser.add_argument("--interpret", action="store_true", help="on the CPU: tests the script, measures nothing")
    return parser.parse_args()


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


class Device:
    """The GPU, or the CPU that stands for one."""

    def __init__(self, interpreted: bool) -> None:
        self.interpreted = interpreted
        self.torch = torch.device("cpu" if interpreted else "cuda")
        self.name = "CPU, interpreted: no measurement" if interpreted else torch.cuda.get_device_name()

    def has_room(self, nbytes: int) -> bool:
        return self.interpreted or torch.cuda.mem_get_info()[0] >= nbytes

    def generator(self, seed: int) -> torch.Generator:
        return torch.Generator(self.torch).manual_seed(seed)

    def wait(self) -> None:
        if not self.interpreted:
            torch.cuda.synchronize()

    def raise_where_it_waits(self, on: bool) -> None:
        if on:
            self.wait()
        if not self.interpreted:
            torch.cuda.set_sync_debug_mode("error" if on else "default")

    def time(self, run: Callable[[], object]) -> tuple[float, float]:
        """Seconds that the device takes, and that the host takes to ask for it."""
        if self.interpreted:
            start = time.perf_counter()
            run()
            return (seconds := time.perf_counter() - start), seconds
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        self.wait()
        torch.cuda._sleep(_BUSY_CYCLES)
        begin.record()
        start = time.perf_counter()
        run()
        host = time.perf_counter() - start
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) * 1e-3, host


class Worker:
    """One worker with one bucket on the device."""

    def __init__(self, device: Device, compressor: Compressor, sizes: list[int], **shape: int) -> None:
        from horovod_sparse.kernels.gpu.bucket import DeviceBucket
        from horovod_sparse.kernels.gpu.rules import rule_of

        numel = sum(sizes)
        rule = rule_of(compressor, numel)
        assert rule is not None
        self.compressor, self.sizes = compressor, sizes
        self.residual = torch.zeros(numel, device=device.torch)
        self.state = compressor.new_state()
        self.k = compressor.target_count(numel)
        self.capacity = compressor.message_capacity(numel, self.k, WORLD)
        self.bucket = DeviceBucket(rule, self.residual, None, sizes, self.k / numel, **shape)

    def launch(self, gradient: Tensor) -> Tensor:
        """From the gradient to the message; waits for nothing."""
        self.bucket.begin(self.state, Stage(range(1), self.k, self.capacity, self.compressor.exchange, False, 0.0))
        offset = 0
        for part in gradient.split(self.sizes):
            self.bucket.accumulate([(offset, part)], None, 1.0)
            offset += part.numel()
        self.bucket.decide(gives_up=False)
        return self.bucket.message()

    def finish(self) -> dict[str, float]:
        from horovod_sparse.kernels.gpu.tiles import NUMBERS

        numbers = self.bucket.numbers.tolist()
        self.bucket.finish(numbers)
        self.state.step += 1
        return dict(zip(NUMBERS, numbers, strict=True))


# --- right? ---

COMPARED: list[Callable[[float], Compressor]] = [
    TopK,
    SIDCo,
    lambda ratio: SIDCo(ratio, distribution="gpareto", warmup=None),
    lambda ratio: SIDCo(ratio, stages=1, warmup=None),
    lambda ratio: Threshold(3.0, ratio=ratio),
    GaussianK,
    DGC,
    RedSync,
]


def compare(device: Device, make: Callable[[float], Compressor]) -> int:
    """Run some steps beside the NumPy oracle; how many."""
    rng, steps = np.random.default_rng(0), 0
    shapes = [[150, 1, 49]] if device.interpreted else [[65], [300, 1, 77], [5000, 40_000], [3_000_000]]
    for sizes in shapes:
        worker = Worker(device, make(0.05), sizes, **({"block": 64, "chunk": 16} if device.interpreted else {}))
        for step in range(3 if device.interpreted else 6):
            gradient = rng.laplace(size=sum(sizes)).astype(np.float32)
            if step == 2:
                # Candidates of the step before are too few.
                gradient *= np.float32(1e-3)
            x = worker.residual.cpu().numpy() + gradient
            request = worker.bucket.rule.request(worker.state, worker.k, worker.capacity)
            message = worker.launch(torch.from_numpy(gradient).to(device.torch)).cpu().numpy()
            told = worker.finish()
            try:
                check_choice(worker, request, x, message, told)
            except AssertionError as error:
                at = f"{worker.compressor}, {sizes}, step {step}: k {worker.k}, capacity {worker.capacity}, {told}"
                raise AssertionError(at) from error
            steps += 1
    return steps


def check_choice(worker: Worker, request: Any, x: np.ndarray, message: np.ndarray, told: dict[str, float]) -> None:
    """The entries that the oracle chooses, exactly, by the threshold that its fit gives, and nothing lost."""
    oracle, compressor, k, sent = NumpyOps(), worker.compressor, worker.k, int(told["sent"])
    indices, values = message[:sent, 0], message[:sent, 1].copy().view(np.float32)
    assert (message[sent:] == [-1, 0]).all(), "padding"
    restored = worker.residual.cpu().numpy()
    restored[indices] += values
    np.testing.assert_array_equal(restored, x)
    # An estimate that is far off is replaced by the k largest.
    trusted = request.trust[0] <= told["found"] <= request.trust[1]
    exact = oracle.select_largest(x, worker.capacity if trusted and told["found"] > worker.capacity else k)
    chosen = exact if told["exact"] else oracle.select_above(x, told["limit"], worker.capacity)
    np.testing.assert_array_equal(indices, chosen.indices)
    if isinstance(compressor, SIDCo):
        if told["estimated"] and not told["exact"]:
            np.testing.assert_allclose(told["limit"], fitted(request, told), rtol=1e-6)
        assert told["count"] == np.count_nonzero(x) and told["largest"] == np.abs(x).max()
        assert k / 2 <= sent <= worker.capacity or told["count"] <= k
    if isinstance(compressor, TopK):
        assert told["exact"]


def fitted(request: Any, told: dict[str, float]) -> float:
    """The threshold of SIDCo's last stage, by the fits of the host."""
    mean = told["tail_total"] / told["tail_count"]
    variance = max(told["tail_squares"] / told["tail_count"] - mean * mean, 0.0)
    ratio = min(request.aim, told["count"] - 1.0) / told["tail_count"]
    exponential = request.rule == "exponential"
    excess = fits.exponential(mean, ratio) if exponential else fits.generalized_pareto(mean, variance, ratio)
    return min(float(request.cut + excess), told["largest"])


def never_waits(device: Device, make: Callable[[float], Compressor]) -> None:
    """Run steps, as the hooks of an optimizer do, from the gradients to the collective; the last one must not wait."""
    from horovod_sparse.kernels.gpu.bucket import selector_for

    sizes = {"a": 400, "b": 100} if device.interpreted else {"a": 900_000, "b": 100_000}
    gradients = {name: laplace(device, numel, 0) for name, numel in sizes.items()}
    compressor = make(0.01)
    feedback = Feedback(tensor_ops(), compressor, world=1, position=0, rank=0, device_selector=selector_for)
    parameters = [Parameter(name, (numel,), "float32", "device") for name, numel in sizes.items()]
    feedback.add_buckets(layouts_of(parameters, compressor), gradients.get)
    warm = 1 if device.interpreted else 3
    for step in range(warm + 1):
        taken = Step(feedback)
        # The first time Triton compiles.
        device.raise_where_it_waits(step == warm)
        for name, gradient in gradients.items():
            sending = taken.add(name, gradient)
        assert isinstance(sending, Sending)
        own = sending.begin().message
        device.raise_where_it_waits(False)
        taken.advance([(sending, own)])
        assert sending.outcome.sent > 0
        taken.finish(lambda slots, reduced: None)


# --- how fast? ---


Figures = dict[str, Any]
"""What was measured of a row; it keeps no memory of the device."""


@dataclass
class Row:
    """What is timed: `prepare` and `check` are not."""

    title: str
    run: Callable[[], object]
    bar: float | None = None
    prepare: Callable[[], object] = lambda: None
    check: Callable[[], object] = lambda: None


def laplace(device: Device, numel: int, seed: int) -> Tensor:
    x = torch.empty(numel, device=device.torch).exponential_(generator=device.generator(seed))
    signs = torch.empty(numel, dtype=torch.int8, device=device.torch)
    return x.mul_(signs.random_(0, 2, generator=device.generator(seed + 1)).mul_(2).sub_(1))


def normal(device: Device, numel: int, seed: int) -> Tensor:
    return torch.empty(numel, device=device.torch).normal_(generator=device.generator(seed))


def student(device: Device, numel: int, seed: int) -> Tensor:
    """Student's t with four degrees of freedom: normal over the root of a mean of two exponential ones."""
    chi = torch.empty(numel, device=device.torch).exponential_(generator=device.generator(seed))
    chi.add_(torch.empty(numel, device=device.torch).exponential_(generator=device.generator(seed + 1)))
    return normal(device, numel, seed + 2).div_(chi.mul_(0.5).sqrt_())


KINDS = {"Laplace": laplace, "Gaussian": normal, "Student": student}


def measure(device: Device, numel: int, ratio: float, repetitions: int) -> Iterator[Figures]:
    for number, (kind, draw) in enumerate(KINDS.items()):
        drawn = draw(device, numel + _SHIFTS, 10 * number)
        gradient = drawn[:numel]
        residual = torch.zeros_like(gradient)
        timed: list[tuple[str, Compressor, float | None]] = [("SIDCo-E, " + kind, SIDCo(ratio, warmup=None), BAR)]
        if number == 0:
            timed += [
                ("SIDCo-P, " + kind, SIDCo(ratio, distribution="gpareto", warmup=None), BAR),
                ("TopK, warm", TopK(ratio, warmup=None), BAR),
                ("TopK, cold", TopK(ratio, warmup=None), None),
                ("Threshold", Threshold(-math.log(ratio), ratio=ratio, slack=2.0), None),
            ]
        rows = [step_row(device, *one, drawn, numel) for one in timed]
        if number == 0:
            rows += other_rows(device, ratio, gradient)
        say(f"{numel:,} elements, ratio {ratio:g}: {', '.join(row.title for row in rows)}")
        for figures in time_rows(device, rows, partial(residual.add_, gradient), repetitions):
            yield {"size": numel, "ratio": ratio, **figures}


def step_row(device: Device, title: str, compressor: Compressor, bar: float | None, drawn: Tensor, numel: int) -> Row:
    """Steps after many others, with other gradients each time: the same numbers at other places."""
    worker = Worker(device, compressor, [numel])
    cold = title.endswith("cold")
    message = torch.empty(0)

    def gradient() -> Tensor:
        first = worker.state.step * 64 * 7919 % _SHIFTS
        return drawn[first : first + numel]

    def run() -> None:
        nonlocal message
        message = worker.launch(gradient())

    def prepare() -> None:
        worker.finish()
        if cold:
            worker.bucket.forget()

    def check() -> None:
        """Of one more step, on the device: nothing lost, and the largest sent."""
        prepare()
        expected = worker.residual + gradient()
        run()
        sent = int(worker.finish()["sent"])
        indices, values = message[:sent, 0].long(), message[:sent, 1].contiguous().view(torch.float32)
        assert worker.k / 2 <= sent <= worker.capacity or isinstance(compressor, Threshold), f"{title}: {sent} sent"
        assert sent == worker.k or not isinstance(compressor, TopK), f"{title}: {sent} sent"
        assert (indices[1:] > indices[:-1]).all() and (message[sent:, 0] == -1).all(), f"{title}: order, padding"
        assert sent == 0 or values.abs().min() >= worker.residual.abs().max(), f"{title}: not the largest are sent"
        worker.residual[indices] += values
        assert torch.equal(worker.residual, expected), f"{title}: sent + kept is not gradient + old residual"
        worker.residual[indices] -= values
        arrays = [one for one in vars(worker.bucket).values() if isinstance(one, Tensor)]
        more = sum(one.nbytes for one in arrays if one.device == worker.residual.device) / worker.residual.nbytes - 1.0
        say(f"  {title}: {sent / worker.k:.3f} k sent, {more:.1%} more memory")

    run()
    for _ in range(0 if device.interpreted else _WARM_STEPS):
        prepare()
        run()
    return Row(title, run, bar if compressor.ratio == BAR_RATIO else None, prepare, check)


def other_rows(device: Device, ratio: float, gradient: Tensor) -> list[Row]:
    from horovod_sparse.kernels.gpu.message import assemble, rows_in_use

    numel, k = gradient.numel(), max(1, int(ratio * gradient.numel()))
    residual, target = torch.zeros_like(gradient), torch.empty_like(gradient)
    gathered = torch.cat([message_of(device, numel, k, rank) for rank in range(WORLD)])

    def receive() -> None:
        rows_in_use(gathered, WORLD, numel)
        assemble([(0, target)], gathered, WORLD, WORLD)

    def check_received() -> None:
        assert rows_in_use(gathered, WORLD, numel).tolist() == [k] * WORLD
        expected = torch.zeros_like(target)
        for message in gathered.chunk(WORLD):
            expected.index_add_(0, message[:, 0].long(), message[:, 1].contiguous().view(torch.float32) / WORLD)
        torch.testing.assert_close(target, expected)

    def plain_topk() -> Tensor:
        return torch.topk(residual.abs(), k).indices

    return [
        Row(f"decompress, {WORLD} ranks", receive, check=check_received),
        Row("torch.topk(x.abs(), k)", plain_topk, prepare=lambda: residual.copy_(gradient)),
        Row("SIDCo in torch operations", lambda: plain_sidco(residual, gradient, ratio), prepare=residual.zero_),
        Row("cast to fp16 and back", lambda: gradient.half().float()),
    ]


def message_of(device: Device, numel: int, k: int, seed: int) -> Tensor:
    """Entries spread over the whole bucket."""
    step = numel // k
    starts = torch.arange(k, device=device.torch) * step
    indices = starts + torch.randint(0, step, (k,), device=device.torch, generator=device.generator(seed))
    values = torch.randn(k, device=device.torch, generator=device.generator(seed))
    return torch.stack([indices.int(), values.view(torch.int32)], 1).contiguous()


def time_rows(device: Device, rows: list[Row], unit: Callable[[], object], repetitions: int) -> list[Figures]:
    results: list[Figures] = [
        {"title": row.title, "bar": row.bar, "seconds": [], "units": [], "host_seconds": []} for row in rows
    ]
    for repetition in range(0 if device.interpreted else -1, repetitions):
        for row, figures in zip(rows, results, strict=True):
            row.prepare()
            unit_seconds, _ = device.time(unit)
            seconds, host = device.time(row.run)
            if repetition >= 0:
                # The one before warms up.
                figures["seconds"].append(seconds)
                figures["units"].append(seconds / unit_seconds)
                figures["host_seconds"].append(host)
    for row in rows:
        row.check()
    return results


# --- what came out ---


def line(one: Figures) -> list[str]:
    """Of the table."""
    low, units, high = np.quantile(one["units"], (0.25, 0.5, 0.75))
    # The unit moves 12 bytes per element; 10^9 per second.
    rate = 12e-9 * one["size"] / float(np.median(one["seconds"]))
    host = f"{1e6 * np.median(one['host_seconds']):.0f}"
    bar = "" if one["bar"] is None else f"{one['bar']:g}" + ("" if units <= one["bar"] else " exceeded")
    where = [f"{one['size']:,}", f"{one['ratio']:g}", one["title"]]
    return [*where, f"{units:.2f}", f"{low:.2f}-{high:.2f}", f"{rate:.0f}", host, bar]


def report(device: Device, compared: int, results: list[Figures]) -> None:
    steps = f"{compared} steps as the NumPy oracle's; no step waited for the device"
    print(f"{device.name}, torch {torch.__version__}; {steps}\n")
    header = ("elements", "ratio", "row", "units", "quartiles", "GB/s", "host, us", "bar")
    print(markdown.table(header, map(line, results), words=3))


if __name__ == "__main__":
    raise SystemExit(main())
