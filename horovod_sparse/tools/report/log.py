"""The content of a log, ready to be summed up and drawn. Imports no framework."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from horovod_sparse.core.stats_log import complete, records


@dataclass
class Log:
    """The lines of one file. Those that a resumed run has replaced are left out."""

    name: str
    """The file's, `printable`."""
    incomplete: bool
    """Whether a killed run has left an incomplete last line."""
    compressors: list[str] = field(default_factory=list)
    """All that were used, by their `repr`, `printable`."""
    lines: list[dict[str, Any]] = field(default_factory=list)
    weights: list[int] = field(default_factory=list)
    """The number of steps that each line stands for: those since the line before."""

    def column(self, name: str) -> list[float]:
        """Return one number of all lines; NaN where there is none."""
        return [math.nan if line[name] is None else float(line[name]) for line in self.lines]

    def _sum(self, name: str) -> float:
        """Return the sum over all steps; a step that was not logged counts as the next one that was."""
        return math.fsum(w * value for w, value in zip(self.weights, self.column(name), strict=True) if value == value)

    @property
    def steps(self) -> int:
        """The number of the last step."""
        return int(self.lines[-1]["step"])

    @property
    def ratio(self) -> float:
        """Entries sent / entries selected from, over all steps; NaN if nothing is selected."""
        return self._sum("count") / (self._sum("numel") or math.nan)

    @property
    def bytes_sent(self) -> float:
        """Bytes of all steps, of what is compressed and what is not."""
        return self._sum("bytes_sent") + self._sum("dense_bytes_sent")

    @property
    def seconds(self) -> float:
        """The median time of a step; NaN if it is not known."""
        return median([value for value in self.column("seconds") if value == value] or [math.nan])


def printable(text: str) -> str:
    """Return a text for a terminal: each character that does not print, such as the escape character, becomes U+FFFD."""
    return "".join(one if one.isprintable() else "\ufffd" for one in text)


def read(path: Path) -> Log:
    """Read a log.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is no log of a `StatsLog`.
    """
    lines, rest = complete(path.read_bytes())
    log = Log(printable(str(path)), bool(rest))
    before = 0
    for record in records(lines):
        step = record["step"]
        if "format" not in record:
            log.lines.append(record)
            log.weights.append(step - before)
        else:
            # A run that was resumed from a checkpoint makes the later steps again.
            while log.lines and log.lines[-1]["step"] > step:
                log.lines.pop()
                log.weights.pop()
            compressor = printable(record["compressor"])
            if compressor not in log.compressors:
                log.compressors.append(compressor)
        before = step
    return log
