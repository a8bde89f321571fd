"""Write the table of docs/guides/models.md anew: `python docs/print_models.py`.

Plans each config of examples/models for the machine that it names. Tests compare the table with
what the planner says of each layout, and with the layouts that it finds.
"""

from __future__ import annotations

import re
from pathlib import Path

from meshwright import load_config, plan
from meshwright.cost.price import Prediction
from meshwright.units import format_bytes, format_count

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "guides" / "models.md"
HEAD = "| config | machine | layout | memory | tokens/s | MFU |\n|---|---|---|--:|--:|--:|\n"
KINDS = ("pretrain", "tune", "lora")
TABLE = re.compile(re.escape(HEAD) + r"(?:\|.*\n)*")


def configs() -> list[Path]:
    """Return the configs, in the order of the table: from scratch, all weights, adapters."""
    paths = sorted((ROOT / "examples" / "models").glob("*.toml"))
    return sorted(paths, key=lambda path: KINDS.index(path.stem.partition("-")[0]))


def row(config: Path, best: Prediction) -> str:
    """Return a config's row of the table."""
    machine = config.read_text(encoding="utf-8").splitlines()[0].rpartition(" on ")[2].rstrip(".")
    numbers = (
        f"{format_bytes(best.memory.total)} | {format_count(best.tokens_per_s)} | {best.mfu:.0%}"
    )
    return f"| `{config.name}` | {machine} | `{best.layout.label}` | {numbers} |\n"


def table() -> str:
    """Return the table as the planner has it today."""
    rows = []
    for config in configs():
        best = plan(load_config(config), top=1).best
        assert best is not None, config
        rows.append(row(config, best))
    return HEAD + "".join(rows)


if __name__ == "__main__":
    text = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(TABLE.sub(lambda _: table(), text), encoding="utf-8")
