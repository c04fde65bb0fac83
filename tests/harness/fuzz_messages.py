"""Damaged messages for the receiving side of every backend: each is refused with one error, or decoded within bounds.

Messages that real compressors have made (`receivers`) are changed (`damage`), and given to the receiving code of every
backend. It must come to the outcome that the specification asks for (`wire`), with the same error to the last letter or with
the same sums, and it must write nothing beyond the memory it was given.

Some messages go the whole way: through the exchange, together with those of other workers. There the first damaged
message hides the others. So all others are judged one by one, many in a call, and those that are right are added up together.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import numpy as np

from horovod_sparse.exchange import wire
from horovod_sparse.exchange.shared import Dense, SharedIndices
from horovod_sparse.public import Pairs, Union
from tests.harness.damage import change_gathered, change_indices, change_packed, change_pairs, change_values
from tests.harness.receivers import WORLD, Receiver, Recorded, record
from tests.harness.table import ORACLE, Backend

TOGETHER = 64
"""Number of messages that are judged in one call."""
JUDGED = (Pairs, Union)
"""The exchanges whose messages can be judged one by one."""
QUICK = ("numpy-compiled", "torch")
"""The backends with kernels. They judge all messages, the others those of every eighth call."""


def expected(recorded: Recorded, results: Sequence[np.ndarray]) -> str | None:
    """Return what the error must contain, by the specification; "" for none, None if a gradient was not finite."""
    first, disagree = results[0], "the ranks disagree on the state of bucket 'p2'"
    gathers = not isinstance(recorded.exchange, (Dense, SharedIndices))
    like, many = recorded.messages[0], WORLD if gathers else 1
    if first.dtype != like.dtype or first.shape != (many * len(like), *like.shape[1:]):
        return disagree
    if not gathers:
        flag, *bits = first[-17:].tolist()
        if any(bit not in (0, WORLD) for bit in bits):
            return disagree
        return None if flag in range(1, WORLD + 1) else "" if flag == 0 else "sum of the messages"
    messages = np.split(_as_pairs(first, WORLD, recorded), WORLD)
    if isinstance(recorded.exchange, Pairs):
        return _expected_of([message[:, 0].tolist() for message in messages], recorded.numel, finite=False)
    room = min(recorded.numel, recorded.capacity * WORLD)
    if results[1].shape != (room,) or results[1].dtype != np.float32:
        # What was gathered is looked at when the values are there.
        return disagree
    headers = [(message[0].item(), message[1:2].view(np.float32).item()) for message in messages]
    if any(checksum == wire.NOT_FINITE for checksum, _ in headers):
        return None
    for sender, header in enumerate(headers):
        if header[0] < 0 or not np.isfinite(header[1]):
            return f"the message of worker {sender} for bucket 'p2' is damaged: its header"
    if len({checksum for checksum, _ in headers}) > 1:
        return disagree
    return _expected_of([message[2:].tolist() for message in messages], recorded.numel, finite=True)


def _expected_of(indices: list[list[int]], numel: int, *, finite: bool) -> str | None:
    for sender, of_one in enumerate(indices):
        if _rows(of_one, numel) < 0 and (finite or of_one[0] != wire.NOT_FINITE):
            which = "a worker" if finite else f"worker {sender}"
            return f"the message of {which} for bucket 'p2' is damaged: its indices do not ascend within the bucket"
    return None if not finite and any(of_one[0] == wire.NOT_FINITE for of_one in indices) else ""


def damaged(recorded: Recorded, random: Random) -> tuple[list[np.ndarray], int]:
    """Return the results of the collectives, changed, and the number of messages that were changed."""
    if isinstance(recorded.exchange, (Dense, SharedIndices)):
        total = np.sum(recorded.messages, axis=0, dtype=recorded.messages[0].dtype)
        return [change_values(total, WORLD, 17, random)], 1
    pairs = isinstance(recorded.exchange, Pairs)
    messages = [message.copy() for message in recorded.messages]
    changed = random.sample(range(WORLD), random.randint(1, WORLD))
    change = _change_of(recorded)
    for sender in changed:
        for _ in range(random.choice((1, 1, 1, 2, 4))):
            change(messages, sender, recorded.numel, random)
    gathered = np.concatenate(messages)
    if random.random() < 0.05:
        gathered = change_gathered(gathered, random)
    if pairs:
        return [gathered], len(changed)
    room = min(recorded.numel, recorded.capacity * WORLD)
    total = np.array([random.gauss(0, 1) for _ in range(room)], np.float32)
    return [gathered, change_values(total, WORLD, 0, random)], len(changed)


def check(receivers: Sequence[Receiver], results: list[np.ndarray], random: Random) -> str:
    """Give the results to all receivers. Return what became of them: refused, decoded or not finite."""
    recorded = receivers[0].recorded
    right = expected(recorded, results)
    outcomes = [receiver.receive(results) for receiver in receivers]
    for outcome in outcomes:
        if right is None:
            assert outcome is None, (right, outcome)
        elif right:
            assert isinstance(outcome, str) and right in outcome and outcome == outcomes[0], (right, outcome)
        else:
            assert isinstance(outcome, np.ndarray), (right, outcome)
            assert _same(outcome, outcomes[0]), (outcome, outcomes[0])
    return "not finite" if right is None else "refused" if right else "decoded"


def judge(receivers: Sequence[Receiver], random: Random) -> Counter[str]:
    """Change many messages and have each of them judged. Return what became of them."""
    recorded = receivers[0].recorded
    pairs = isinstance(recorded.exchange, Pairs)
    change, first = _change_of(recorded), 0 if pairs else wire.HEADER
    messages = [random.choice(recorded.messages).copy() for _ in range(TOGETHER)]
    for sender in range(TOGETHER):
        change(messages, sender, recorded.numel, random)
    every = np.stack(messages)[:, first:]
    if pairs and every.ndim == 2:
        unpacked = _as_pairs(every.reshape(-1), TOGETHER, recorded).reshape(TOGETHER, -1, 2)
        for receiver in receivers:
            np.testing.assert_array_equal(receiver.unpacked(every), unpacked)
        every = unpacked
    verdicts = [_rows(indices, recorded.numel) for indices in (every[:, :, 0] if pairs else every).tolist()]
    used = [max(rows, 0) for rows in verdicts]
    anything = [random.randint(0, every.shape[1]) for _ in verdicts]
    first_made: np.ndarray | None = None
    for receiver in receivers:
        got = receiver.rows_in_use(every)
        assert got == verdicts, (got, verdicts)
        if pairs:
            receiver.assemble(every, anything)
            made: Any = receiver.assemble(every, used)
        else:
            # One message that is refused is enough.
            assert (receiver.union(every) is None) == (min(verdicts) < 0)
            made = receiver.union(every[np.array(used) > 0])
            assert made is not None
        first_made = made if first_made is None else first_made
        assert _same(made, first_made), (made, first_made)
    what = {wire.DAMAGED: "refused", wire.NOT_FINITE: "not finite"}
    return Counter(what.get(rows, "decoded") for rows in verdicts)


def _as_pairs(gathered: np.ndarray, world: int, recorded: Recorded) -> np.ndarray:
    """Return the messages of pairs that gathered messages stand for."""
    if recorded.exchange != Pairs("packed"):
        return gathered
    pairs: np.ndarray = ORACLE.ops.unquantize(gathered, world, recorded.numel)
    return pairs


def _change_of(recorded: Recorded) -> Callable[[list[np.ndarray], int, int, Random], None]:
    """Return what changes a message of this kind that was gathered."""
    if isinstance(recorded.exchange, Pairs):
        return {"float32": change_pairs, "packed": change_packed}[recorded.exchange.values]
    return change_indices


def _rows(indices: list[int], numel: int) -> int:
    """Return `Ops.rows_in_use` of one message, by the specification."""
    if indices[0] == wire.NOT_FINITE:
        return wire.NOT_FINITE
    rows = [index for index in indices if index != wire.PADDING]
    right = rows == sorted(set(rows)) and all(0 <= index < numel for index in rows) and indices[: len(rows)] == rows
    return len(rows) if right else wire.DAMAGED


def _same(one: np.ndarray, other: Any) -> bool:
    return one.tobytes() == other.tobytes() or np.array_equal(one, other, equal_nan=True)


def fuzz(name: str, backends: Sequence[Backend], messages: int, seed: int, whole: float = 0.05) -> Counter[str]:
    """Fuzz one of `CASES`. Return how many messages were changed, and what became of them or of their collectives.

    Args:
        whole: the share of the messages that go through exchanges; all do that hold values only.
    """
    recorded, random = record(name), Random(f"{name} {seed}")
    receivers = [Receiver(backend, recorded) for backend in backends]
    quick = [receiver for receiver in receivers if receiver.backend.name in QUICK]
    alone = isinstance(recorded.exchange, JUDGED)
    counts: Counter[str] = Counter()
    calls = 0
    while counts["messages"] < messages:
        try:
            with np.errstate(all="ignore"):
                if alone and counts["exchanged"] > whole * counts["messages"]:
                    calls += 1
                    counts += judge(receivers if calls % 8 == 1 or not quick else quick, random)
                    counts["messages"] += TOGETHER
                    continue
                results, changed = damaged(recorded, random)
                counts[f"{check(receivers, results, random)}, exchanged"] += 1
        except Exception as error:
            error.add_note(f"case {name!r}, seed {seed}, after {counts['messages']} messages")
            raise
        counts["exchanged"] += changed
        counts["messages"] += changed
    return counts
