"""Checks and benchmarks on one GPU, within minutes, from a bare checkout.

    python -m benchmarks.gpu --out docs/benchmarks/gpu.json --page docs/benchmarks/gpu.md

Trains the shapes of Llama-3.2-1B and Llama-3-8B with AdamW's whole state, with as many layers as
are predicted to fit, calibrates the GPU, and proves layouts of one rank on it: step time, MFU and
peak memory beside what was predicted. What is worth most comes first, each part is a process of its
own, and both files are written anew after each, so that whatever fails or has no time left takes
nothing else with it. `--device cpu` with `--tiny` tries the whole of it without a GPU.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.gpu_bench import LINES, Bench
from benchmarks.gpu_page import page
from meshwright.layout import Layout
from meshwright.predict.calibration import blocks_of, read_calibration
from meshwright.predict.catalogue import catalogue, device_named
from meshwright.predict.price import price
from meshwright.predict.timeline import timeline
from meshwright.program.lower import lower
from meshwright.program.model_flops import flops_per_token
from meshwright.program.target import Target
from meshwright.search.plan import on_cluster, setting_of
from meshwright.spec.loading import load_config


class Shape(NamedTuple):
    """A model with so many layers at most, and microbatches of so many rows of so many tokens."""

    name: str
    layers: int
    length: int
    rows: int

    def words(self, layers: int) -> list[str]:
        """Return the overrides that make a config of it, with so many layers."""
        sizes = {"vocab_size": 128, "dim": 64, "n_heads": 2, "n_kv_heads": 2, "ffn_dim": 128}
        model = {"preset": self.name} if self.name != TINY.name else sizes
        words = [f"model.{key}={value}" for key, value in {**model, "n_layers": layers}.items()]
        return [*words, f"train.seq_len={self.length}", f"train.batch={MICROBATCHES * self.rows}"]


TINY = Shape("tiny", 2, 64, 4)
SMALL_4K, SMALL_8K = Shape("llama-3.2-1b", 16, 4096, 4), Shape("llama-3.2-1b", 16, 8192, 2)
LARGE_4K, LARGE_8K = Shape("llama-3-8b", 32, 4096, 2), Shape("llama-3-8b", 32, 8192, 1)
# Of a step: an update moves as much memory as a microbatch of a large model takes time.
MICROBATCHES = 4
MODES = {
    "compiled": ["train.compile=true"],
    "eager": ["train.compile=false"],
    "compiled, recompute selective": ["train.compile=true"],
}
FIRST = ((LARGE_4K, "compiled"), (SMALL_4K, "compiled"))
NEXT = ((LARGE_8K, "compiled"), (SMALL_8K, "compiled"))
LAST = (
    *((LARGE_4K, "eager"), (SMALL_4K, "eager"), (SMALL_8K, "compiled, recompute selective")),
    *((SMALL_8K, "eager"), (LARGE_8K, "eager")),
)
# Shares of the free memory that a prediction may fill: the second where the first was too much.
SHARES = (0.95, 0.85)
PROVEN = (
    ["train.precision=fp32"],
    ["train.precision=bf16", "train.compile=true"],
    ["train.precision=bf16", "layout.zero=3"],
    ["train.precision=bf16", "layout.zero=2"],
    ["train.precision=bf16", "layout.zero=3", "train.compile=true"],
    ["train.precision=bf16", "layout.zero=3", "layout.offload=params"],
    ["train.precision=bf16", "layout.recompute=full"],
    ["train.precision=bf16", "layout.recompute=selective"],
    ["train.precision=fp32", "layout.offload=optimizer"],
    ["train.precision=fp32", "data.packing=documents"],
    ["train.precision=bf16", "data.packing=documents"],
    ["train.precision=bf16", "data.packing=documents", "train.compile=true"],
)
ALONE = ["layout.dp_replicate=1", "layout.dp_shard=1"]
TESTS = ["tests/test_context.py", "-k", "gpu"]
BESIDE = 4  # checks at a time: nothing of them is timed
PARTS = ("train", "device", "checks")


def look(bench: Bench) -> None:
    """Find out what device there is, and whether its allocator can map memory as it needs it."""
    bench.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
    found = bench.run_module("look", "benchmarks.gpu_machine", "--device", bench.device)
    if found is None:
        bench.environ.clear()
        found = bench.run_module("look again", "benchmarks.gpu_machine", "--device", bench.device)
    if found is None:
        return
    bench.done["machine"] = found | {"environ": dict(bench.environ)}
    known = device_named(found["name"]) if bench.device == "cuda" else None
    bench.preset = bench.preset if known is None else known.name


def train(bench: Bench, shape: Shape, mode: str) -> None:
    """Run steps of a shape in a mode, with as many of its layers as fit."""
    shape = TINY if bench.tiny else shape
    selective = " recompute-selective" if "selective" in mode else ""
    label = f"mb{shape.rows}{selective}"
    free = bench.done.get("machine", {}).get("free_bytes")
    more = [*MODES[mode], f"train.precision={'fp32' if bench.tiny else 'bf16'}", *bench.words]
    for share in SHARES:
        layers = shape.layers
        if free is not None:
            layers = layers_within(free * share, shape, more, label)
        words = [*shape.words(layers), *more]
        what = f"train {shape.name}, {layers} layers, {shape.length} tokens, {mode}"
        steps = ["--rounds", "1", "--steps", "2" if bench.tiny else "4", "--memory"]
        found = bench.run(what, "bench", "layouts", *words, "--layout", label, *steps)
        if found is not None:
            break
        if not any("out of memory" in line.lower() for line in bench.skipped[-1].said):
            return
    if found is None:
        return
    (row,) = found["rows"]
    model = load_config(None, words).model
    square = flops_per_token(model, shape.length)
    half = square - 6 * model.n_layers * model.n_heads * model.head_dim * shape.length
    about = {"shape": shape.name, "layers": layers, "of": shape.layers, "length": shape.length}
    rates = {
        "flops_per_s": square * row["tokens_per_s"],
        "causal_flops_per_s": half * row["tokens_per_s"],
    }
    bench.done["training"].append(about | {"mode": mode, "config": words} | row | rates)
    recalculate(bench)


def layers_within(room: float, shape: Shape, words: Sequence[str], label: str) -> int:
    """Return with how many layers a shape is predicted to stay within so many bytes of a GPU."""
    config, layout = load_config(None, [*shape.words(shape.layers), *words]), Layout.parse(label)
    for layers in range(shape.layers, 1, -1):
        model = config.model.model_copy(update={"n_layers": layers})
        program = lower(model, config.train, layout, Target("gpu"))
        if timeline(program, 0).peak.total <= room:
            return layers
    return 1


def calibrate(bench: Bench, shape: Shape, path: Path) -> None:
    """Measure the device with the blocks of a shape, one row of them at a time."""
    asked = [*shape.words(shape.layers), *bench.words, "layout.microbatch=1"]
    asked += ["train.compile=false"] if bench.tiny else ["train.precision=bf16"]
    words = ["--budget", "0.02" if bench.tiny else "0.7", "--out", str(path)]
    what = f"bench device, {shape.name}, {shape.length} tokens"
    found = bench.run(what, "bench", "device", *asked, "cluster.devices_per_node=1", *words)
    if found is not None:
        bench.done["devices"].append({"of": f"{shape.name}, {shape.length} tokens"} | found)
        bench.calibrations.append(path)
        recalculate(bench)


def recalculate(bench: Bench) -> None:
    """Price what was trained by what was measured of the device, of its own blocks if of any."""
    for row in bench.done["training"] if bench.calibrations else ():
        config, layout = load_config(None, row["config"]), Layout.parse(row["layout"])
        blocks = blocks_of(config.model, config.train.seq_len)
        found = [read_calibration(path) for path in bench.calibrations]
        own = next((one for one in found if one.blocks == blocks), found[0])
        setting = on_cluster(setting_of(config, own, layout.world), layout)
        priced = price(setting, layout).time
        row["calibrated_step_time_s"], row["calibrated_seconds"] = priced.total, priced.causes


def prove(bench: Bench, words: Sequence[str]) -> None:
    """Hold a layout of one rank on the device against one CPU."""
    label = " ".join(words)
    found = bench.run(f"prove {label}", "prove", *ALONE, *words, "--device", bench.device)
    if found is None:
        return
    row = {"of": label, "passed": found["passed"], "failed": found["failed"]}
    if found["failed"]:
        row["verdicts"] = [one for one in found["verdicts"] if not one["passed"]]
    bench.done["proofs"].append(row)


def syncs(bench: Bench) -> None:
    """Have CUDA say whether a step makes the host wait."""
    found = bench.run_module("syncs", "benchmarks.syncs", "--device", bench.device)
    if found is not None and found["checked"]:
        bench.done["syncs"] = found["rows"]


def tests(bench: Bench) -> None:
    """Run the tests that need a GPU, where there is something to run them with."""
    if importlib.util.find_spec("pytest") is None:
        bench.skip("tests", "pytest is not installed")
        return
    done = bench.call("tests", "pytest", "-q", "-p", "no:cacheprovider", *TESTS)
    if done is not None:
        said = done.stdout.strip().splitlines()[-LINES:]
        row = {"of": " ".join(TESTS), "code": done.returncode, "said": said}
        bench.done["tests"] = row


def check(bench: Bench) -> None:
    """Make all checks, a few at a time."""
    jobs: list[tuple[str, Callable[[], object]]] = [
        (" ".join(words), lambda words=words: prove(bench, words))  # type: ignore[misc]
        for words in (PROVEN[:2] if bench.tiny else PROVEN)
    ]
    jobs.append(("syncs", lambda: syncs(bench)))
    if not bench.tiny:
        jobs.append(("tests", lambda: tests(bench)))
    with ThreadPoolExecutor(BESIDE) as pool:
        list(pool.map(lambda job: bench.attempt(*job), jobs))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a tiny model, to try this itself")
    parser.add_argument(
        "--preset",
        choices=sorted(catalogue()[0]),
        default="h200",
        help="a device of the catalogue that a GPU which is not in it is like",
    )
    parser.add_argument("--minutes", type=float, default=9, help="what there is time for")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--page", type=Path)
    args = parser.parse_args(argv)
    until = time.monotonic() + 60 * args.minutes
    bench = Bench(args.device, args.tiny, until, args.preset, args.out, args.page)

    def trains(turns: Sequence[tuple[Shape, str]]) -> None:
        for shape, mode in turns if "train" in args.only else ():
            what = f"train {shape.name} {shape.length} {mode}"
            bench.attempt(what, lambda shape=shape, mode=mode: train(bench, shape, mode))  # type: ignore[misc]

    def calibrates(shape: Shape, folder: Path) -> None:
        if "device" in args.only:
            path = (args.out.parent if args.out else folder) / f"gpu-{shape.name}.toml"
            bench.attempt(f"bench device {shape.name}", lambda: calibrate(bench, shape, path))

    with tempfile.TemporaryDirectory() as folder:
        bench.attempt("look", lambda: look(bench))
        trains(((TINY, "eager"),) if bench.tiny else FIRST)
        calibrates(TINY if bench.tiny else LARGE_4K, Path(folder))
        trains(() if bench.tiny else NEXT)
        if "checks" in args.only:
            check(bench)
        if not bench.tiny:
            calibrates(SMALL_4K, Path(folder))
            trains(LAST)
    print(page(bench.found()))
    return 1 if has_failed(bench.done, args.only) else 0


def has_failed(done: dict[str, Any], parts: Sequence[str]) -> bool:
    """Whether anything that was asked for is wrong, or nothing of it is there."""
    bad = "checks" in parts and (
        not done["proofs"]
        or any(row["failed"] for row in done["proofs"])
        or any(row["waits"] for row in done.get("syncs", ()))
        or done.get("tests", {}).get("code", 0) != 0
    )
    return bad or ("train" in parts and not done["training"])


if __name__ == "__main__":
    sys.exit(main())
