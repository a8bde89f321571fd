"""`meshwright predict`: prices rows of measurements, published or one's own, without running."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from meshwright.cli.common import add_json, print_json
from meshwright.data.files import write_atomic
from meshwright.errors import EXIT_DONE, ConfigError
from meshwright.parsing import parse_json
from meshwright.predict.calibration import read_calibration, shipped_calibration
from meshwright.predict.rows import predict_row

EXAMPLE = """\
examples:
  meshwright predict --rows rows.jsonl --out predicted.jsonl
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `predict`."""
    parser.description = "Predict memory and step time of rows: one JSON object a line."
    parser.epilog = EXAMPLE
    parser.add_argument("--rows", type=Path, required=True, metavar="IN.jsonl")
    parser.add_argument("--out", type=Path, required=True, metavar="OUT.jsonl")
    parser.add_argument(
        "--calibration", type=Path, help="measured constants, over the shipped ones"
    )
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Write one prediction a row, in the rows' order."""
    calibration = read_calibration(args.calibration) if args.calibration else shipped_calibration()
    found = [predict_row(row, calibration) for row in _read(args.rows)]
    write_atomic(args.out, "".join(json.dumps(one) + "\n" for one in found).encode())
    refused = sum("refused" in one for one in found)
    if args.json:
        print_json({"rows": len(found), "refused": refused, "out": str(args.out)})
    else:
        print(f"{len(found)} rows, {refused} of them refused: {args.out}")
    return EXIT_DONE


def _read(path: Path) -> list[dict[str, Any]]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--rows {path} cannot be read: {error}") from None
    rows = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = parse_json(line)
        except ValueError as error:
            raise ConfigError(f"{path}:{number} is no JSON: {error}") from None
        if not isinstance(row, dict):
            raise ConfigError(f"{path}:{number} is no JSON object")
        rows.append(row)
    return rows
