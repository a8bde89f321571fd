"""Print the plans of docs/guides/plans.md anew: `python docs/print_plans.py`.

Runs each command of the guide and puts its output below it, without what was ruled out and without
the seconds of the search. A test compares the guide with what the commands print.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

GUIDE = Path(__file__).parent / "guides" / "plans.md"
BLOCKS = re.compile(r"```bash\nmeshwright ([^\n]*)\n```\n\n```text\n(.*?)```\n", re.DOTALL)


def output(words: str) -> str:
    """Return what a command prints, in 80 columns."""
    done = subprocess.run(
        [sys.executable, "-m", "meshwright", *words.split()],
        capture_output=True,
        text=True,
        env={**os.environ, "COLUMNS": "80"},
        check=True,
    )
    shown = re.sub(r" considered in [\d.]+ s\n", " considered\n", done.stdout)
    lines = shown.split("ruled out:")[0].rstrip().splitlines()
    return "\n".join(line.rstrip() for line in lines) + "\n"


def printed(found: re.Match[str]) -> str:
    """Return a command's blocks with its output of today."""
    return f"```bash\nmeshwright {found[1]}\n```\n\n```text\n{output(found[1])}```\n"


if __name__ == "__main__":
    GUIDE.write_text(BLOCKS.sub(printed, GUIDE.read_text(encoding="utf-8")), encoding="utf-8")
