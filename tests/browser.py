"""Open the page of `horovod-sparse report` in a real browser, as wide as a phone and as a screen: make report-page.

Needs Chromium (Debian: chromium). The page is made of two logs of real runs with NumPy.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from pathlib import Path

import numpy as np
from matplotlib.colors import to_rgb
from matplotlib.image import imread

from horovod_sparse.numpy import SIDCo, SparseAllreduce, StatsLog, TopK, warmup
from horovod_sparse.tools import cli
from horovod_sparse.tools.report import picture, table

WIDTHS = (412, 1280)
"""In pixels: a phone's and a screen's."""
HEIGHT = 2400
ROOM = 50 * 16
"""The most that the page takes of the width, in pixels: 48 rem, and one on each side."""
LIMIT = 120
"""Seconds after which the browser is stopped."""
MEASURE = """
<style>html {{ width: {width}px }}</style>
<script>document.title = document.body.scrollWidth + " of " + document.body.clientWidth</script>
</body>"""
"""The end of a copy of the page that says how wide it is. Chromium's own windows are never narrower than 500 pixels."""


def write_logs(folder: Path) -> list[Path]:
    written = []
    for compression in (SIDCo(warmup(0.25, 0.01, steps=60)), TopK(0.05)):
        reduce = SparseAllreduce(None, compression)
        written.append(folder / f"{type(compression).__name__} & others.jsonl")
        log, generator = StatsLog(reduce, written[-1], every=2), np.random.default_rng(0)
        for _ in range(100):
            reduce({"weight": generator.laplace(size=20_000).astype(np.float32)})
            log()
    return written


def browse(page: Path, width: int, *options: str) -> str:
    """What the browser prints after it has opened the page."""
    browser = shutil.which("chromium")
    if browser is None:
        raise SystemExit("chromium is needed and not installed: apt-get install chromium")
    with tempfile.TemporaryDirectory(prefix="profile-") as profile:
        command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
        command += [f"--user-data-dir={profile}", f"--window-size={width},{HEIGHT}", *options, page.as_uri()]
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def check_content(page: Path, logs: list[Path]) -> None:
    """The browser has understood the page: title, table and drawing are there."""
    dom = browse(page, WIDTHS[0], "--dump-dom")
    names = [str(path).replace("&", "&amp;") for path in logs]
    for text in (f"<title>Gradients sent: {', '.join(names)}</title>", *(f"<td>{name}</td>" for name in names)):
        assert text in dom, f"expected {text}\n{dom[:3000]}"
    for text in (*table.TITLES, *(panel.title for panel in picture.PANELS)):
        assert f">{text}</" in dom, f"expected {text}\n{dom[:3000]}"


def check_picture(page: Path, width: int, folder: Path) -> None:
    """The curves of both logs are to be seen, from the left to the right and in the upper and the lower panels."""
    shot = folder / "page.png"
    browse(page, width, f"--screenshot={shot}")
    pixels = imread(shot)[..., :3]
    assert pixels.shape[:2] == (HEIGHT, width), pixels.shape
    # The drawing is twice as high as it is wide.
    drawn = min(width, ROOM) - 32
    for color in ("C0", "C1"):
        rows, columns = np.nonzero((np.abs(pixels - to_rgb(color)) < 0.02).all(axis=-1))
        assert rows.size, f"nothing is {color} at {width} pixels"
        seen = np.ptp(columns), np.ptp(rows)
        assert seen[0] > 0.7 * drawn and seen[1] > 1.2 * drawn, f"{color} at {width} pixels covers {seen}"


def check_width(page: Path, width: int) -> None:
    """Nothing is wider than the screen, so that nobody must scroll sideways."""
    copy = page.with_name("measured.html")
    copy.write_text(page.read_text(encoding="utf-8").replace("</body>", MEASURE.format(width=width)), encoding="utf-8")
    (title,) = re.findall("<title>(.*)</title>", browse(copy, width, "--dump-dom"))
    room = min(width, ROOM)
    assert title == f"{room} of {room}", f"{title} pixels where there are {width}"


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="report-") as created:
        folder = Path(created)
        logs, page = write_logs(folder), folder / "report.html"
        assert cli.main(["report", *map(str, logs), "--html", str(page)]) == 0
        check_content(page, logs)
        for width in WIDTHS:
            check_width(page, width)
            check_picture(page, width, folder)
            print(f"{width} pixels: the page is whole", flush=True)


if __name__ == "__main__":
    main()
