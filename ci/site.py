"""Open the site of `make docs` in headless Chromium: start page, one search, one picture, every page on a narrow screen.

    python ci/site.py [FOLDER]

The default is build/site. Without Chromium (Debian: chromium, 113 MB to download, which `make docs` installs where it may)
it says so and opens nothing. A page of its own opens those of the site in frames, looks at them there, and sends what it has
seen. No other machine is asked.
"""

from __future__ import annotations

import functools
import json
import os
import queue
import shutil
import subprocess
import sys
import tempfile
import threading
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
LIMIT = 120
"""Seconds for everything."""
NARROW = 360
"""Pixels across of a small phone."""
LOOK = """<!doctype html><body><script>
const sleep = (ms) => new Promise((done) => setTimeout(done, ms));
const opened = (page, width) => new Promise((done) => {
  const frame = document.createElement("iframe");
  frame.style = `border: 0; height: 900px; width: ${width}px`;
  frame.onload = () => done(frame);
  frame.src = page;
  document.body.replaceChildren(frame);
});
const look = async (pages, narrow) => {
  const start = (await opened("/index.html", 1200)).contentDocument;
  const seen = {
    title: start.title,
    tabs: [...start.querySelectorAll(".md-tabs__link")].map((one) => one.textContent.trim()),
  };
  const query = start.querySelector("[data-md-component=search-query]");
  query.focus();
  query.value = "error feedback";
  let hits = [];
  while (hits.length === 0) {
    query.dispatchEvent(new KeyboardEvent("keyup", { bubbles: true }));
    await sleep(100);
    hits = [...start.querySelectorAll(".md-search-result__link")];
  }
  seen.hits = hits.map((one) => new URL(one.href).pathname);
  const pictures = (await opened("/results.html", 1200)).contentDocument.querySelectorAll("article img");
  seen.pictures = [...pictures].map((one) => one.naturalWidth);
  seen.widths = {};
  for (const page of pages) {
    const frame = await opened(page, narrow);
    seen.widths[page] = frame.contentDocument.documentElement.scrollWidth;
  }
  return seen;
};
look(PAGES, NARROW).catch((error) => ({ error: String(error) })).then((seen) => {
  fetch("/seen", { method: "POST", body: JSON.stringify(seen) });
});
</script>"""


class Handler(SimpleHTTPRequestHandler):
    """Serves the site and the page that looks at it, and takes what that page has seen."""

    def __init__(self, *request: Any, look: bytes, seen: queue.Queue[Any], directory: str) -> None:
        self.look = look
        self.seen = seen
        super().__init__(*request, directory=directory)

    def do_GET(self) -> None:
        if self.path != "/look":
            super().do_GET()
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.end_headers()
        self.wfile.write(self.look)

    def do_POST(self) -> None:
        self.seen.put(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.send_response(204)
        self.end_headers()

    def log_message(self, format: str, *arguments: object) -> None:
        """Print no line for each request."""


def seen_in(browser: str, site: Path) -> dict[str, Any]:
    """Return what the page has seen of the site."""
    pages = sorted(f"/{page.relative_to(site).as_posix()}" for page in site.rglob("*.html") if page.name != "404.html")
    look = LOOK.replace("PAGES", json.dumps(pages)).replace("NARROW", str(NARROW)).encode()
    seen: queue.Queue[Any] = queue.Queue()
    handler = functools.partial(Handler, look=look, seen=seen, directory=str(site))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server, tempfile.TemporaryDirectory() as profile:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        options = ["--headless", "--disable-gpu", "--disable-dev-shm-usage", f"--user-data-dir={profile}"]
        # Chromium refuses to run as root otherwise.
        options += ["--no-sandbox"] if os.geteuid() == 0 else []
        command = [browser, *options, f"http://127.0.0.1:{server.server_port}/look"]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
            try:
                found: dict[str, Any] = seen.get(timeout=LIMIT)
            except queue.Empty:
                raise SystemExit(f"{browser} has seen nothing within {LIMIT} s") from None
            finally:
                process.terminate()
        server.shutdown()
    return found


def main() -> None:
    site = Path(sys.argv[1]).resolve() if len(sys.argv) > 1 else ROOT / "build" / "site"
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        print("site: not opened, because there is no Chromium (Debian: chromium)")
        return
    seen = seen_in(browser, site)
    assert "error" not in seen, seen
    assert seen["title"] == "horovod_sparse", seen["title"]
    assert seen["tabs"] == ["Start", "Use", "Decide", "Understand", "Evidence"], seen["tabs"]
    assert "/pytorch.html" in seen["hits"], f"a search for error feedback must find the page on PyTorch: {seen['hits']}"
    assert len(seen["pictures"]) == 2 and min(seen["pictures"]) > 0, (
        f"the results have two pictures: {seen['pictures']}"
    )
    wide = {page: width for page, width in seen["widths"].items() if width > NARROW}
    assert seen["widths"] and not wide, f"on a screen of {NARROW} pixels these pages are wider: {wide}"
    print(f"site: {len(seen['widths'])} pages opened in {Path(browser).name}, {len(seen['hits'])} found by a search")


if __name__ == "__main__":
    main()
