"""Lists the measured figures of the pages whose code has changed since they were measured.

    python -m benchmarks.figures

`docs/benchmarks/figures.toml` has, for each, its page and section, the date, commit and command of
the measurement, and the paths of the code that it describes.
"""

from __future__ import annotations

import argparse
import datetime
import subprocess
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[1]
TABLE: Final = ROOT / "docs/benchmarks/figures.toml"


@dataclass(frozen=True)
class Figure:
    """Measured figures of a page, or of one of its sections."""

    page: str
    date: datetime.date
    commit: str
    command: str
    paths: tuple[str, ...]
    section: str | None = None


def read_table(path: Path = TABLE) -> list[Figure]:
    """Return the figures that a table lists."""
    rows = tomllib.loads(path.read_text(encoding="utf-8"))["figure"]
    return [Figure(**{**row, "paths": tuple(row["paths"])}) for row in rows]


def changes_since(figure: Figure, root: Path = ROOT) -> int:
    """Return how many commits have changed the code that a figure describes since its commit."""
    words = ["git", "rev-list", "--count", "--no-merges", f"{figure.commit}..HEAD", "--"]
    done = subprocess.run(
        [*words, *figure.paths], cwd=root, check=True, capture_output=True, text=True
    )
    return int(done.stdout)


def main(argv: Sequence[str] | None = None) -> None:
    argparse.ArgumentParser(description=__doc__.partition("\n")[0]).parse_args(argv)
    rows = [(changes_since(figure), figure) for figure in read_table()]
    for count, figure in sorted(rows, key=lambda row: -row[0]):
        if count:
            place = figure.page + (f", {figure.section}" if figure.section else "")
            print(f"{count:5,} commits since {figure.date}  {place}\n      {figure.command}")
    print(f"{sum(count > 0 for count, _ in rows)} of {len(rows)} are older than their code")


if __name__ == "__main__":
    main()
