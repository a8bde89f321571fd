"""What `benchmarks.gpu` has found, as a page in Markdown. Whatever is missing is left out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from benchmarks.gpu_bench import Results
from benchmarks.gpu_predicted import Trained
from meshwright.cost.catalogue import find_device
from meshwright.parsing import parse_toml

_HEAD: Final = (
    "| shape | layers | length | mode | tokens/s | MFU | causal | step | predicted | calibrated "
    "| peak | predicted |",
    "|---|--:|--:|---|--:|--:|--:|--:|--:|--:|--:|--:|",
)


def machine_line(machine: Mapping[str, Any], preset: str) -> str:
    """Return the device, its versions and what it does at best in a line."""
    said = [machine["name"], f"torch {machine['torch']}", f"Python {machine['python']}"]
    if "driver" in machine:
        said += [f"CUDA {machine['cuda']}", f"driver {machine['driver']}"]
    if "flops_per_s" in machine:
        rate, best = machine["flops_per_s"], find_device(preset).peaks["bf16"]
        said += [
            f"bf16 products {rate / 1e12:.0f} TFLOP/s ({rate / best:.0%} of {preset}'s peak)",
            f"copies {machine['copied_bytes_per_s'] / 1e12:.2f} TB/s",
            f"{machine['free_bytes'] / 2**30:.1f} GiB free",
        ]
    return ", ".join(said)


def proof_line(found: Mapping[str, Any]) -> str:
    """Return how a proof went in a line."""
    wrong = [one["claim"] for one in found["failed"]]
    good = found["verdicts"] - len(wrong)
    said = [f"{good} of {found['verdicts']} verdicts passed", *(f"WRONG: {one}" for one in wrong)]
    return "; ".join(said)


def page(
    machine: Mapping[str, Any], preset: str, results: Results, notes: Sequence[str] = ()
) -> str:
    """Return the figures as Markdown."""
    best, found = find_device(preset).peaks["bf16"], results.found
    dates = sorted({one["date"] for one in found.values()})
    lines = [
        f"# One GPU: {machine.get('name', 'not found')}",
        "",
        f"`make gpu`, {' to '.join(dict.fromkeys((*dates[:1], *dates[-1:])))}: "
        f"{machine_line(machine, preset)}.",
        "",
        f"MFU is of the dense bf16 peak of {preset} in the catalogue, {best / 1e12:.0f} TFLOP/s,",
        "with attention over the whole square (arXiv:2204.02311, appendix B); `causal` counts half",
        "of it. Predicted from the shipped calibration and, `calibrated`, from what was measured",
        "of this GPU, with what compiling gains where blocks of that shape were compiled; memory",
        "is predicted for blocks that are not.",
    ]
    lines += _trained(found, best)
    for key, one in found.items():
        if "profile" in one:
            lines += ["", f"## {key}", "", "```text", one["profile"], "```"]
    for key, one in found.items():
        if "toml" in one:
            lines += ["", *_device(key, parse_toml(one["toml"]))]
    lines += _checked(found)
    left = [f"- {note}" for note in notes]
    left += [f"- left out: {key}: {why}" for key, why in results.failed.items()]
    return "\n".join([*lines, *([""] if left else []), *left]).rstrip() + "\n"


def _trained(found: Mapping[str, Mapping[str, Any]], best: float) -> Iterator[str]:
    calibrations = [one["toml"] for one in found.values() if "toml" in one]
    rows = [Trained.of_found(one, calibrations) for one in found.values() if "step_time_s" in one]
    yield from ("", *_HEAD) if rows else ()
    yield from (_row(row, best) for row in rows)


def _row(row: Trained, best: float) -> str:
    layers = str(row.layers) if row.layers == row.of else f"{row.layers} of {row.of}"
    cells = (
        *(row.shape, layers, str(row.length), row.mode, f"{row.tokens_per_s:,.0f}"),
        *(f"{rate / best:.1%}" for rate in (row.flops_per_s, row.causal_flops_per_s)),
        f"{row.step:.4f} s",
        _off(row.predicted, row.step, "{:.4f} s", 1),
        "" if row.calibrated is None else _off(row.calibrated, row.step, "{:.4f} s", 1),
        f"{row.peak / 2**30:.2f} GiB" if row.peak else "",
        _off(row.predicted_peak, row.peak, "{:.2f} GiB", 2**30) if row.peak else "",
    )
    return f"| {' | '.join(cells)} |"


def _off(value: float, measured: float, form: str, unit: float) -> str:
    """Return a prediction and how far it is off."""
    return f"{form.format(value / unit)} ({value / measured - 1:+.1%})"


def _device(key: str, content: Mapping[str, Any]) -> list[str]:
    """Return the rates among the constants of a calibration, as a table."""
    (constants,) = (table for kind, table in content.items() if kind != "about")
    rows = [
        f"| `{name}` | {value / 1e12:,.2f} T{'B' if name == 'bandwidth' else 'FLOP'}/s |"
        for name, value in constants.items()
        if name == "bandwidth" or name.startswith("peak.")
    ]
    gains = [
        f"| `{name}` | {value:.3f} |"
        for name, value in constants.items()
        if name.startswith(("compile.", "blocks.attention", "products.", "optimizer"))
    ]
    return [f"| {key} | |", "|---|--:|", *rows, *gains]


def _checked(found: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    proofs = {key: one for key, one in found.items() if "verdicts" in one}
    yield from ("", "| proven on the GPU | |", "|---|---|") if proofs else ()
    for key, one in proofs.items():
        yield f"| `{key.removeprefix('prove ')}` | {proof_line(one)} |"
    waits = found.get("syncs", {})
    if waits.get("checked"):
        head = "| a step of | where the host waits for the GPU, or what failed |"
        yield from ("", head, "|---|---|")
        yield from (f"| {row['of']} | {row['waits'] or 'nowhere'} |" for row in waits["rows"])
    if "tests" in found:
        yield from ("", f"`pytest`: {(found['tests']['said'] or ['nothing said'])[-1]}")
