"""What `docs/quickstart.py` reads out of pages, and how it runs it."""

from __future__ import annotations

import os
from pathlib import Path

import pages
import pytest
import quickstart

PAGE = """# Title

```bash
make setup   # words

# a comment
mpirun -np 2 \\
    python train.py
```

Not run here (it needs a cluster):

```bash
srun python train.py
cat <<EOF
```

```python
no = "command"
```

1. In a list:

   ```sh
   echo inside
   ```
"""


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A page of its own, in a repository of its own."""
    monkeypatch.setattr(pages, "ROOT", tmp_path)
    path = tmp_path / "page.md"
    path.write_text(PAGE)
    return path


@pytest.fixture
def place(tmp_path: Path) -> quickstart.Place:
    """A folder to run in, without a clone."""
    (tmp_path / "clone" / "inner").mkdir(parents=True)
    return quickstart.Place(tmp_path, None, {"PATH": os.environ["PATH"], "HOME": str(tmp_path)})


def command(text: str, runs: bool = True) -> quickstart.Command:
    return quickstart.Command("page.md", 1, text, runs)


def test_commands_of_a_page(page: Path) -> None:
    assert quickstart.commands_of(page) == [
        ("page.md", 4, "make setup   # words", True),
        ("page.md", 7, "mpirun -np 2 python train.py", True),
        ("page.md", 14, "srun python train.py", False),
        ("page.md", 15, "cat <<EOF", False),
        ("page.md", 25, "echo inside", True),
    ]


def test_commands_share_a_shell_and_end_at_the_first_failure(place: quickstart.Place) -> None:
    todo = [
        command("cd inner"),
        command("word=kept"),
        command("cat"),  # Its input is empty, and not the shell's.
        command("srun x", runs=False),
        command("make test"),
        command("echo $PWD $word; echo trouble >&2; exit_status() { return 3; }; exit_status"),
        command("touch reached"),
    ]
    results = list(quickstart.run(todo, place, skip=["make test"]))
    assert [result.outcome for result in results] == [
        "ok", "ok", "ok", "not run here", "skipped", "failed", "not reached",
    ]  # fmt: skip
    assert results[5].output == f"{place.folder}/clone/inner kept\ntrouble\n"
    assert not (place.folder / "clone" / "inner" / "reached").exists()
    assert all(result.seconds > 0.0 for result in results if result.outcome in ("ok", "failed"))
    assert quickstart.summary(results).startswith(
        "7 commands: 3 ok, 1 not run here, 1 skipped, 1 failed, 1 not reached; "
    )
