"""What `benchmarks.gpu` has found, as a page in Markdown. Whatever is missing is left out."""

from __future__ import annotations

from typing import Any

from meshwright.predict.catalogue import catalogue

_HEAD = (
    "| shape | layers | length | mode | tokens/s | MFU | causal | step | predicted | calibrated "
    "| peak | predicted |",
    "|---|--:|--:|---|--:|--:|--:|--:|--:|--:|--:|--:|",
)


def page(found: dict[str, Any]) -> str:
    """Return the figures as Markdown."""
    preset = found["preset"]
    peak = catalogue()[0][preset].peaks["bf16"]
    machine = found.get("machine", {})
    lines = [
        f"# One GPU: {machine.get('name', 'not found')}",
        "",
        f"`{found['command']}`, {found['date']}, {found['seconds']:.0f} s, torch "
        f"{machine.get('torch', 'unknown')}. MFU is of the",
        f"dense bf16 peak of {preset} in the catalogue, {peak / 1e12:.0f} TFLOP/s, with attention",
        "over the whole square (arXiv:2204.02311, appendix B); `causal` counts half of it.",
        "Predicted from the shipped calibration and, `calibrated`, from what `bench device` has",
        "measured of this GPU, with what compiling gains where blocks of that shape were compiled;",
        "predicted memory is that of blocks that are not.",
    ]
    if found.get("training"):
        lines += ["", *_HEAD, *(_row(row, peak) for row in found["training"])]
    for one in found.get("devices", ()):
        lines += ["", *_device(one["of"], one["constants"])]
    if found.get("proofs"):
        lines += ["", "| proven on the GPU | passed | failed |", "|---|--:|--:|"]
        lines += [f"| `{r['of']}` | {r['passed']} | {r['failed']} |" for r in found["proofs"]]
    if "syncs" in found:
        lines += [
            "",
            "| a step of | where the host waits for the GPU, or what failed |",
            "|---|---|",
        ]
        lines += [f"| {row['of']} | {row['waits'] or 'nowhere'} |" for row in found["syncs"]]
    if "tests" in found:
        last = (found["tests"]["said"] or ["nothing said"])[-1]
        lines += ["", f"`pytest {found['tests']['of']}`: {last}"]
    lines += ["", *(f"- left out: {one['what']}: {one['why']}" for one in found["skipped"])]
    return "\n".join(lines).rstrip() + "\n"


def _row(row: dict[str, Any], peak: float) -> str:
    layers = row["layers"] if row["layers"] == row["of"] else f"{row['layers']} of {row['of']}"
    step, held = row["step_time_s"], max(row["peak_bytes"], default=0)
    memory = max(row["predicted_peak_bytes"], default=0)
    cells = (
        *(row["shape"], layers, row["length"], row["mode"], f"{row['tokens_per_s']:,.0f}"),
        *(f"{row[name] / peak:.1%}" for name in ("flops_per_s", "causal_flops_per_s")),
        f"{step:.4f} s",
        _beside(row["predicted_step_time_s"], step, "{:.4f} s", 1),
        _beside(row.get("calibrated_step_time_s"), step, "{:.4f} s", 1),
        f"{held / 2**30:.2f} GiB" if held else "",
        _beside(memory or None, held, "{:.2f} GiB", 2**30),
    )
    return f"| {' | '.join(map(str, cells))} |"


def _beside(value: float | None, measured: float, form: str, unit: float) -> str:
    """Return a prediction and how far it is off."""
    if value is None or not measured:
        return ""
    return f"{form.format(value / unit)} ({value / measured - 1:+.1%})"


def _device(of: str, constants: dict[str, float]) -> list[str]:
    """Return the rates among the constants of a calibration, as a table."""
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
    return [f"| measured of the GPU, blocks of {of} | |", "|---|--:|", *rows, *gains]
