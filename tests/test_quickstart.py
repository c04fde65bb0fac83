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


def test_commands_of_a_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "ROOT", tmp_path)
    page = tmp_path / "page.md"
    page.write_text(PAGE)
    assert quickstart.commands_of(page) == [
        ("page.md", 4, "make setup   # words", True),
        ("page.md", 7, "mpirun -np 2 python train.py", True),
        ("page.md", 14, "srun python train.py", False),
        ("page.md", 15, "cat <<EOF", False),
        ("page.md", 25, "echo inside", True),
    ]


def test_commands_share_a_shell_and_end_at_the_first_failure(tmp_path: Path) -> None:
    (tmp_path / "clone" / "inner").mkdir(parents=True)
    place = quickstart.Place(tmp_path, None, {"PATH": os.environ["PATH"], "HOME": str(tmp_path)})
    # The input of `cat` is empty, and not the shell's.
    texts = ["cd inner", "word=kept", "cat", "srun x", "make test"]
    texts += ["echo $PWD $word; echo trouble >&2; exit_status() { return 3; }; exit_status", "touch reached"]
    todo = [quickstart.Command("page.md", 1, text, not text.startswith("srun")) for text in texts]
    results = list(quickstart.run(todo, place, skip=["make test"]))
    assert [result.outcome for result in results] == [
        "ok", "ok", "ok", "not run here", "skipped", "failed", "not reached",
    ]  # fmt: skip
    assert results[5].output == f"{place.folder}/clone/inner kept\ntrouble\n"
    assert not (place.folder / "clone" / "inner" / "reached").exists()
