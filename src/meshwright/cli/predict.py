"""`meshwright predict`: predicts the step time and memory of trainings in a file of rows."""

from __future__ import annotations

import argparse
import itertools
import json
from pathlib import Path
from typing import Final

from meshwright.cli.common import add_json, print_json, read_rows
from meshwright.cli.measured import add_measured, measured_rows, take_measured
from meshwright.cost.calibration import read_calibration, shipped_calibration
from meshwright.cost.rows import predict_row
from meshwright.errors import EXIT_DONE, ConfigError
from meshwright.files import write_atomic
from meshwright.units import counted

_SHOWN: Final = 10

EXAMPLE = """\
examples:
  meshwright predict --rows rows.jsonl --out predicted.jsonl
  meshwright predict --rows rows.jsonl --measured one.jsonl --out predicted.jsonl
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `predict` to the parser."""
    parser.description = "Predict memory and step time of rows: one JSON object a line."
    parser.epilog = EXAMPLE
    parser.add_argument("--rows", type=Path, required=True, metavar="IN.jsonl")
    parser.add_argument("--out", type=Path, required=True, metavar="OUT.jsonl")
    parser.add_argument(
        "--calibration", type=Path, help="measured constants, over the shipped ones"
    )
    add_measured(parser, "RUN | FILE.jsonl", keeps=False)
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Write a prediction for each row of the input, in order; returns the exit code."""
    calibration = read_calibration(args.calibration) if args.calibration else shipped_calibration()
    args.words = []
    measured = measured_rows(take_measured(args), calibration)
    if args.words:
        raise ConfigError(f"--measured: what is {args.words[0]}?")
    calibration = calibration if measured is None else measured.calibration
    predictions = [predict_row(row, calibration) for row in read_rows(args.rows, "--rows")]
    write_atomic(
        args.out, "".join(json.dumps(prediction) + "\n" for prediction in predictions).encode()
    )
    refused = sum("refused" in prediction for prediction in predictions)
    if args.json:
        document = {"rows": len(predictions), "refused": refused, "out": str(args.out)}
        print_json(document if measured is None else {**document, "measured": measured.document})
    else:
        if measured is not None:
            measured.print()
        print(f"{counted(len(predictions), 'row')}, {refused} of them refused: {args.out}")
        reasons = (
            (row, prediction["refused"])
            for row, prediction in enumerate(predictions, 1)
            if "refused" in prediction
        )
        for row, reason in itertools.islice(reasons, _SHOWN):
            print(f"row {row} refused: {reason}")
    return EXIT_DONE
