"""Checks and benchmarks on one GPU, within minutes, from a bare checkout.

    python -m benchmarks.gpu --out docs/benchmarks/gpu.json --page docs/benchmarks/gpu.md

Proves layouts of one rank on the GPU, calibrates it, then trains the shapes of Llama-3.2-1B and
Llama-3-8B, with as many layers as fit with AdamW's whole state, and writes step time, MFU and peak
memory beside what was predicted. `--device cpu` with `--tiny` tries the whole of it without a GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from meshwright.predict.catalogue import catalogue
from meshwright.program.parts import flops_per_token
from meshwright.spec.presets import PRESETS
from meshwright.spec.resolve import model_spec

# Layers that 139 GiB hold with 16 bytes a weight and a microbatch of activations.
SHAPES = (
    ("llama-3.2-1b", 16, 4096, 4),
    ("llama-3.2-1b", 16, 8192, 2),
    ("llama-3-8b", 20, 4096, 2),
    ("llama-3-8b", 20, 8192, 1),
)
PROVEN = (
    ["train.precision=fp32"],
    ["train.precision=bf16"],
    ["train.precision=fp16"],
    ["train.precision=bf16", "train.compile=true"],
    ["train.precision=bf16", "layout.recompute=full"],
    ["train.precision=bf16", "layout.recompute=selective"],
    ["train.precision=fp32", "layout.offload=optimizer"],
    ["train.precision=fp32", "data.packing=documents"],
    ["train.precision=bf16", "data.packing=documents"],
    ["train.precision=bf16", "data.packing=documents", "train.compile=true"],
)
MODES = (
    ("eager", []),
    ("compiled", ["train.compile=true"]),
    ("compiled, recompute selective", ["train.compile=true", "layout.recompute=selective"]),
)
LAYOUT = "layout.dp_replicate=1"


@dataclass
class Bench:
    """What is asked for, and what came of it; `until` is when no more is begun."""

    device: str
    tiny: bool
    until: float
    preset: str
    done: dict[str, Any] = field(default_factory=dict)
    skipped: list[str] = field(default_factory=list)

    def run(self, what: str, *words: str, limit_s: float = 240) -> dict[str, Any] | None:
        """Return the JSON document of a command, or None where it failed or had no time."""
        return self.run_module(what, "meshwright", *words, "--json", limit_s=limit_s)

    def run_module(
        self, what: str, module: str, *words: str, limit_s: float = 240
    ) -> dict[str, Any] | None:
        """Return the JSON document that a module prints; as `run`."""
        left = self.until - time.monotonic()
        if left < 5:
            self.skipped.append(f"{what}: no time left")
            return None
        print(f"{what} ...", flush=True)
        try:
            done = subprocess.run(
                [sys.executable, "-m", module, *words],
                capture_output=True,
                text=True,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(["src", *sys.path])},
                timeout=min(left, limit_s),
            )
        except subprocess.TimeoutExpired:
            self.skipped.append(f"{what}: took longer than {min(left, limit_s):.0f} s")
            return None
        if done.returncode not in (0, 1):
            last = (done.stderr.strip().splitlines() or ["no words"])[-1]
            self.skipped.append(f"{what}: exit code {done.returncode}: {last}")
            return None
        found: dict[str, Any] = json.loads(done.stdout)
        return found


def prove(bench: Bench) -> None:
    """Hold layouts of one rank on the GPU against one CPU."""
    rows = []
    for words in PROVEN[:2] if bench.tiny else PROVEN:
        label = " ".join(words)
        found = bench.run(f"prove {label}", "prove", LAYOUT, *words, "--device", bench.device)
        if found is not None:
            rows.append({"of": label, "passed": found["passed"], "failed": found["failed"]})
    bench.done["proofs"] = rows


def syncs(bench: Bench) -> None:
    """Have CUDA say whether a step makes the host wait."""
    found = bench.run_module("syncs", "benchmarks.syncs", "--device", bench.device)
    if found is not None and found["checked"]:
        bench.done["syncs"] = found["rows"]


def calibrate(bench: Bench, out: Path) -> list[str]:
    """Measure the device; returns the words that make plans use it."""
    words = ["--budget", "0.02" if bench.tiny else "1", "--out", str(out)]
    asked = [f"cluster.device={bench.device}", "cluster.devices_per_node=1", "train.compile=false"]
    found = bench.run("bench device", "bench", "device", *asked, *words)
    if found is None:
        return []
    bench.done["device"] = {name: found[name] for name in ("constants", "machine", "torch")}
    return ["--calibration", str(out)]


def shapes(bench: Bench) -> list[tuple[str, int, int, int, list[str]]]:
    """Return name, layers, length, batch and the words that make the model of each shape."""
    if bench.tiny:
        small = ["vocab_size=128", "dim=64", "n_layers=2", "n_heads=2", "n_kv_heads=2"]
        return [("tiny", 2, 64, 4, [f"model.{word}" for word in (*small, "ffn_dim=128")])]
    return [
        (name, layers, length, batch, [f"model.preset={name}", f"model.n_layers={layers}"])
        for name, layers, length, batch in SHAPES
    ]


def train(bench: Bench, calibration: Sequence[str]) -> None:
    """Run steps of each shape in each mode."""
    rows = []
    for name, layers, length, batch, model in shapes(bench):
        for mode, words in MODES[:1] if bench.tiny else MODES:
            asked = [*model, *words, f"train.seq_len={length}", f"train.batch={batch}"]
            precision = "fp32" if bench.tiny else "bf16"
            more = [f"train.precision={precision}", f"cluster.device={bench.device}"]
            recompute = " recompute-selective" if "selective" in mode else ""
            found = bench.run(
                f"{name} {length} {mode}",
                *("bench", "layouts", *asked, *more, *calibration),
                *("--layout", f"mb{1 if recompute else batch}{recompute}"),
                *("--rounds", "1", "--steps", "2" if bench.tiny else "6", "--memory"),
            )
            if found is None:
                continue
            row = found["rows"][0]
            spec = model_spec(**{**PRESETS.get(name, {}), **_sizes(model)})
            flops = flops_per_token(spec, length) * row["tokens_per_s"]
            rows.append({"shape": name, "layers": layers, "length": length, "mode": mode} | row)
            rows[-1]["flops_per_s"] = flops
    bench.done["training"] = rows


def _sizes(words: Sequence[str]) -> dict[str, int]:
    pairs = (word.removeprefix("model.").split("=") for word in words)
    return {name: int(value) for name, value in pairs if value.isdecimal()}


def page(found: dict[str, Any], preset: str) -> str:
    """Return the figures as Markdown."""
    peak = catalogue()[0][preset].peaks["bf16"]
    lines = [
        f"# One GPU: {found.get('device', {}).get('machine', 'not measured')}",
        "",
        f"`{found['command']}`, {found['date']}, {found['seconds']:.0f} s. MFU is against the",
        f"dense bf16 peak of {preset} in the catalogue, {peak / 1e12:.0f} TFLOP/s.",
        "",
        "| shape | layers | length | mode | tokens/s | MFU | step | predicted | peak | predicted |",
        "|---|--:|--:|---|--:|--:|--:|--:|--:|--:|",
    ]
    for row in found["training"]:
        step, held = row["step_time_s"], max(row["peak_bytes"])
        off = row["predicted_step_time_s"] / step - 1
        memory = max(row["predicted_peak_bytes"]) / held - 1
        lines.append(
            f"| {row['shape']} | {row['layers']} | {row['length']} | {row['mode']} | "
            f"{row['tokens_per_s']:,.0f} | {row['flops_per_s'] / peak:.1%} | {step:.4f} s | "
            f"{off:+.1%} | {held / 2**30:.2f} GiB | {memory:+.1%} |"
        )
    lines += ["", "| proven on the GPU | passed | failed |", "|---|--:|--:|"]
    lines += [f"| `{row['of']}` | {row['passed']} | {row['failed']} |" for row in found["proofs"]]
    if "syncs" in found:
        lines += ["", "| a step of | where the host waits for the GPU |", "|---|---|"]
        lines += [f"| {row['of']} | {row['waits'] or 'nowhere'} |" for row in found["syncs"]]
    lines += ["", *(f"- left out: {what}" for what in found["skipped"])]
    return "\n".join(lines).rstrip() + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a tiny model, to try this itself")
    parser.add_argument("--preset", default="h200", help="of the catalogue, for the peak")
    parser.add_argument("--minutes", type=float, default=8.5, help="begin nothing after so many")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--page", type=Path)
    args = parser.parse_args(argv)
    started = time.monotonic()
    bench = Bench(args.device, args.tiny, started + 60 * args.minutes, args.preset)
    with tempfile.TemporaryDirectory() as folder:
        prove(bench)
        syncs(bench)
        train(bench, calibrate(bench, Path(folder) / "device.toml"))
    found = {
        "command": "make gpu",
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "seconds": time.monotonic() - started,
        **bench.done,
        "skipped": bench.skipped,
    }
    text = page(found, args.preset)
    print(text)
    if args.out:
        args.out.write_text(json.dumps(found, indent=1) + "\n")
    if args.page:
        args.page.write_text(text)
    failed = not bench.done["proofs"] or any(row["failed"] for row in bench.done["proofs"])
    failed = failed or any(row["waits"] for row in bench.done.get("syncs", ()))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
