"""Ten published trainings beside the planner's prices and choices: docs/guides/published.md.

    python -m benchmarks.published_trainings [--only NAME] --out docs/benchmarks/published.json

Each training keeps its published layout, and is priced as the system that ran it, or as one that is
like it. The best layout is that of a search with the same prices, over the same devices and batch.
`--out` keeps the results, and a second call computes what is missing there. The page is written
anew from all results.
"""

from __future__ import annotations

import argparse
import json
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from meshwright.cost.calibration import shipped_calibration
from meshwright.cost.evidence import evidence
from meshwright.cost.price import Prediction, price
from meshwright.cost.rows import read_row
from meshwright.planner.advice import lost_by
from meshwright.planner.rank import MARGIN, Search
from meshwright.units import GIB

ROOT = Path(__file__).parents[1]
TRAININGS = Path(__file__).with_suffix(".toml")
PAGE = ROOT / "docs" / "guides" / "published.md"
# A part of a step below this share is not listed.
_LEAST = 0.01
BEGIN, END = "<!-- trainings -->\n", "<!-- end of trainings -->\n"


def trainings() -> list[dict[str, Any]]:
    """Return the trainings of published_trainings.toml."""
    content = tomllib.loads(TRAININGS.read_text(encoding="utf-8"))
    return list(content["training"])


def held(training: Mapping[str, Any]) -> tuple[Prediction, list[str]]:
    """Return the price of a training in its published layout, and what its row leaves open."""
    case = read_row(training["row"], shipped_calibration())
    return price(case.setting, case.layout), list(case.assumed)


def result(training: Mapping[str, Any]) -> dict[str, Any]:
    """Return a training's prices, in its published layout and in the best one, as JSON."""
    case = read_row(training["row"], shipped_calibration())
    published = price(case.setting, case.layout)
    ranked = Search(case.setting, case.layout.world, MARGIN).run(1).ranked
    step = training.get("step_s") or published.time.total * published.mfu / training["mfu"]
    return {
        "name": training["name"],
        "assumed": list(case.assumed),
        "near": evidence(case.setting, case.layout),
        "published": {"step_s": step, "mfu": published.mfu * published.time.total / step},
        "held": priced(published),
        "best": priced(ranked[0]) if ranked else None,
        "why": lost_by(published, ranked[0]) if ranked else "no layout fits",
    }


def priced(prediction: Prediction) -> dict[str, Any]:
    """Return what the page has of a prediction."""
    return {
        "layout": prediction.layout.label,
        "step_s": prediction.time.total,
        "interval_s": list(prediction.interval),
        "mfu": prediction.mfu,
        "seconds": prediction.time.causes,
        "memory_gib": prediction.memory.total / GIB,
        "of_gib": prediction.memory.limit / GIB,
    }


def rows(results: Sequence[Mapping[str, Any]]) -> str:
    """Return the page's table and the paragraphs below it."""
    lines = [
        "| training | GPUs | published layout | MFU published | predicted | error of the step | "
        "memory | best layout of the plan | its step beside the published layout's | MFU |",
        "|---|--:|---|--:|--:|--:|--:|---|--:|--:|",
    ]
    by_name = {training["name"]: training for training in trainings()}
    for entry in results:
        training = by_name[entry["name"]]
        of, best = entry["held"], entry["best"]
        error = of["step_s"] / entry["published"]["step_s"] - 1
        mark = "" if training.get("fitted") else "**"
        lines.append(
            f"| {mark}{entry['name']}{mark} | {training['row']['n_gpus']:,} | `{of['layout']}` | "
            f"{entry['published']['mfu']:.1%} | {of['mfu']:.1%} | {error:+.0%} | "
            f"{of['memory_gib']:.0f} of {of['of_gib']:.0f} GiB | "
            + (
                f"`{best['layout']}` | {best['step_s'] / of['step_s'] - 1:+.0%} | "
                f"{best['mfu']:.1%} |"
                if best
                else "none fits | - | - |"
            )
        )
    lines += ["", *(paragraph(entry, by_name[entry["name"]]) for entry in results)]
    return "\n".join(lines) + "\n"


def paragraph(entry: Mapping[str, Any], training: Mapping[str, Any]) -> str:
    """Return what there is to say of a training: its source, what differs, what is assumed."""
    derived = f" ({training['derived']})" if "derived" in training else ""
    low, high = entry["held"]["interval_s"]
    causes = ", ".join(
        f"{name} {seconds:.2f}"
        for name, seconds in entry["held"]["seconds"].items()
        if seconds > _LEAST * entry["held"]["step_s"]
    )
    stated, predicted = entry["published"]["step_s"], entry["held"]["step_s"]
    text = (
        f"- **{entry['name']}** ({training['source']}): published {stated:.2f} s a step{derived}, "
        f"predicted {predicted:.2f} s ({causes}), interval {low:.2f} to {high:.2f} s. "
        f"{training['note']} "
        f"The published layout beside the best: {entry['why']}."
    )
    return text + (f" Assumed: {'; '.join(entry['assumed'])}." if entry["assumed"] else "")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", help="the training of this name, again")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args(argv)
    known = json.loads(args.out.read_text(encoding="utf-8")) if args.out.exists() else []
    results = {entry["name"]: entry for entry in known}
    for training in trainings():
        name = training["name"]
        if name == args.only or (args.only is None and name not in results):
            results[name] = result(training)
            print(json.dumps(results[name]), flush=True)
        ordered = [results[one["name"]] for one in trainings() if one["name"] in results]
        args.out.write_text(json.dumps(ordered, indent=1) + "\n", encoding="utf-8")
    text = PAGE.read_text(encoding="utf-8")
    head, _, rest = text.partition(BEGIN)
    PAGE.write_text(head + BEGIN + rows(ordered) + END + rest.partition(END)[2], encoding="utf-8")


if __name__ == "__main__":
    main()
