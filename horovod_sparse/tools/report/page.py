"""The page of a report: one HTML file that needs no other, no script and no network. Imports no framework."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from horovod_sparse import __version__
from horovod_sparse.tools.report import picture, table
from horovod_sparse.tools.report.log import Log

_STYLE = """
body { font: 1rem/1.5 system-ui, sans-serif; max-width: 48rem; margin: auto; padding: 1rem; color: #222; background: #fff }
.wide { overflow-x: auto }
table { border-collapse: collapse }
th, td { text-align: left; vertical-align: top; padding: .3rem .6rem .3rem 0; border-bottom: 1px solid #ddd }
td { min-width: 7rem; overflow-wrap: anywhere }
figure { margin: 1rem 0 }
svg { width: 100%; height: auto }
code { overflow-wrap: anywhere }
""".strip()


def html(logs: Sequence[Log]) -> str:
    """Return the whole page."""
    names = ", ".join(escape(log.name) for log in logs)
    columns = zip(table.TITLES, *table.rows(logs), strict=True)
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Gradients sent: {names}</title>
<style>
{_STYLE}
</style>
</head>
<body>
<h1>Gradients sent</h1>
<div class="wide">
<table>
<tbody>
{_lines(_row(title, cells) for title, *cells in columns)}
</tbody>
</table>
</div>
<p>All numbers are those of one worker. A line of a log holds the numbers of its step, and the median time of the steps since
the line before. In the sums it stands for all those steps.</p>
<figure>
{picture.svg(logs).strip()}
</figure>
<details>
<summary>All settings</summary>
<ul>
{_lines(f"<li>{escape(log.name)}: {_settings(log)}</li>" for log in logs)}
</ul>
</details>
<p>horovod_sparse {escape(__version__)}</p>
</body>
</html>
"""


def _row(title: str, cells: Sequence[str]) -> str:
    return f'<tr><th scope="row">{escape(title)}</th>' + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>"


def _settings(log: Log) -> str:
    return ", then ".join(f"<code>{escape(compressor)}</code>" for compressor in log.compressors)


def _lines(parts: Iterable[str]) -> str:
    return "\n".join(parts)
