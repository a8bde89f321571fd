"""The table of docs/guides/out-of-memory.md is what `plan` says of its rows."""

import json
import re
from pathlib import Path

import pytest

from meshwright.cli import main

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/guides/out-of-memory.md"
CONFIG = ROOT / "examples/mistral-7b-2-a40.toml"
ROW = re.compile(
    r"^\| (adamw|lion|muon) \| (fp32|none)"
    + r" \| (\w+)" * 3
    + r" \| ([\d.]+) \| (\w+) \| ([\d.]*) ?\|$",
    re.M,
)
ROWS = ROW.findall(PAGE.read_text())


def test_the_table_is_there():
    assert len(ROWS) == 13
    assert {row[1:3] for row in ROWS} >= {("none", "bf16"), ("none", "int8")}
    assert {row[0] for row in ROWS} == {"adamw", "lion", "muon"}


@pytest.mark.parametrize("row", ROWS, ids=" ".join)
def test_a_row_is_what_plan_says(row, capsys):
    name, master, states, reduced, offload, size, fits, seconds = row
    layout = "shard2 zero3 mb1 recompute-full"
    layout += "" if offload == "none" else f" offload-{offload}"
    words = [f"optimizer.name={name}", f"train.master={master}", f"optimizer.state_dtype={states}"]
    words += [f"train.reduce_dtype={reduced}", "--explain", layout, "--json"]
    assert main(["plan", str(CONFIG), *words]) in (0, 1)
    found = json.loads(capsys.readouterr().out)
    assert f"{found['peak_memory_bytes'] / 2**30:.1f}" == size
    assert found["fits"] == (fits == "yes")
    if seconds:
        assert f"{found['step_time_s']:.1f}" == seconds
