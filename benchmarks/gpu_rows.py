"""What `benchmarks.gpu` measures, in the order of its worth, and what a time is enough for."""

from __future__ import annotations

import importlib.util
from collections.abc import Collection, Iterator, Sequence
from typing import Final, Literal, NamedTuple

Part = Literal["train", "device", "checks"]
PARTS: Final[tuple[Part, ...]] = ("train", "device", "checks")
# What it takes until the first row begins: torch is imported, and the device looked at.
LOOK_S: Final = 15.0
# What is left to write the files and to end.
MARGIN_S: Final = 3.0


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


TINY: Final = Shape("tiny", 2, 64, 4)
SMALL_4K: Final = Shape("llama-3.2-1b", 16, 4096, 4)
SMALL_8K: Final = Shape("llama-3.2-1b", 16, 8192, 2)
LARGE_4K: Final = Shape("llama-3-8b", 32, 4096, 2)
LARGE_8K: Final = Shape("llama-3-8b", 32, 8192, 1)
MIXTURE_4K: Final = Shape("olmoe-1b-7b", 16, 4096, 2)
# No constant was set from these. They have q/k norms, many experts, parallel residuals, windows
# with soft caps, experts with sinks and biases, and latent attention.
OTHERS: Final = (
    Shape("qwen3-8b", 36, 4096, 2),
    Shape("qwen3-30b-a3b", 48, 4096, 2),
    Shape("pythia-6.9b", 32, 2048, 4),
    Shape("gemma-2-9b", 42, 4096, 2),
    Shape("gpt-oss-20b", 24, 4096, 2),
    Shape("moonlight-16b-a3b", 27, 4096, 2),
)
# Of a step: an update moves as much memory as a microbatch of a large model takes time.
MICROBATCHES: Final = 4
ALONE: Final = ("layout.dp_replicate=1", "layout.dp_shard=1")


class Row(NamedTuple):
    """One thing to measure, of about so many seconds; `key` tells it from all others.

    The seconds are those of an H100 with 16 cores on 2026-11-27, with some room. It `needs` a
    package that not every machine has.
    """

    key: str
    part: Part
    work: str
    seconds: float
    shape: Shape = TINY
    words: tuple[str, ...] = ()
    label: str = ""
    compiles: bool = False
    profiles: bool = False
    needs: str = ""


def training(shape: Shape, mode: str, seconds: float) -> Row:
    """Return the row of a shape's step: "eager" or "compiled", maybe a word of a layout or fp8."""
    how, _, more = mode.partition(", ")
    compiles, is_fp8 = how == "compiled", more == "fp8"
    label = " ".join(filter(None, (f"mb{shape.rows}", "" if is_fp8 else more)))
    words = (f"train.compile={'true' if compiles else 'false'}", *([FP8] if is_fp8 else []))
    key = f"train {shape.name}, {shape.length} tokens, {mode}"
    profiles, needs = shape.length <= 4096 and not more, "torchao" if is_fp8 else ""
    return Row(key, "train", "train", seconds, shape, words, label, compiles, profiles, needs)


def calibrating(shape: Shape, seconds: float) -> Row:
    """Return the row that measures the device with the blocks of a shape."""
    key = f"calibrate, {shape.name}, {shape.length} tokens"
    words = (f"layout.microbatch={shape.rows}",)
    return Row(key, "device", "calibrate", seconds, shape, words)


def proving(*words: str) -> Row:
    """Return the row that holds a layout of one rank on the device against one CPU."""
    compiles = "train.compile=true" in words
    key = f"prove {' '.join(words)}"
    found, needs = (*ALONE, *words), "torchao" if FP8 in words else ""
    seconds = 30 if compiles else 5
    return Row(key, "checks", "prove", seconds, TINY, found, "", compiles, needs=needs)


FP8: Final = "train.fp8=true"
BF16: Final = "train.precision=bf16"
FP32: Final = "train.precision=fp32"
PACKED: Final = "data.packing=documents"
# Small models with kernels of their own: experts, windows with soft caps, attention sinks.
EXPERTS: Final = ("model.family=qwen3_moe", "model.experts=4", "model.top_k=2")
CAPPED: Final = ("model.family=gemma2", "model.layer_pattern=[{window=7},{}]")
SINKS: Final = ("model.family=gpt_oss", "model.experts=4", "model.top_k=4")
COMPILED: Final = "train.compile=true"
EAGER: Final = "train.compile=false"
# In one minute the eager rows, in five also the compiled ones, a calibration and the first proofs.
ROWS: Final = (
    training(LARGE_4K, "eager", 14),
    training(SMALL_4K, "eager", 13),
    training(LARGE_4K, "compiled", 32),
    training(SMALL_4K, "compiled", 32),
    calibrating(LARGE_4K, 37),
    proving(FP32, EAGER),
    proving(BF16, EAGER, "layout.zero=3"),
    proving(BF16, COMPILED),
    proving(BF16, EAGER, *EXPERTS),
    Row("syncs", "checks", "syncs", 50),
    training(MIXTURE_4K, "eager", 12),
    training(MIXTURE_4K, "compiled", 32),
    training(LARGE_4K, "compiled, fp8", 45),
    training(LARGE_8K, "compiled", 30),
    training(SMALL_8K, "compiled", 30),
    *(training(shape, "compiled", 40) for shape in OTHERS),
    calibrating(SMALL_4K, 37),
    proving(BF16, EAGER, "layout.zero=2"),
    proving(BF16, EAGER, "layout.recompute=selective"),
    proving(BF16, EAGER, PACKED),
    proving(FP32, EAGER, PACKED),
    proving(BF16, EAGER, "layout.recompute=full"),
    proving(FP32, EAGER, "layout.offload=optimizer"),
    proving(BF16, EAGER, "layout.zero=3", "layout.offload=params"),
    proving(BF16, COMPILED, "layout.zero=3"),
    proving(BF16, COMPILED, PACKED),
    proving(FP32, COMPILED, PACKED),
    proving(BF16, COMPILED, *EXPERTS, "layout.recompute=selective"),
    proving(BF16, EAGER, *CAPPED),
    proving(BF16, COMPILED, PACKED, *CAPPED),
    proving(FP32, COMPILED, PACKED, *SINKS),
    proving(BF16, COMPILED, FP8),
    Row("tests", "checks", "tests", 45),
    training(LARGE_4K, "compiled, offload-activations", 30),
    training(SMALL_8K, "compiled, recompute-selective", 30),
    training(SMALL_8K, "compiled, recompute-full", 30),
    training(SMALL_8K, "eager", 15),
    training(LARGE_8K, "eager", 15),
)
TINY_ROWS: Final = (
    training(TINY, "eager", 10),
    calibrating(TINY, 30),
    proving(FP32, EAGER),
    proving(BF16, EAGER, "layout.zero=3"),
)


def rows(only: Collection[str] = PARTS, *, tiny: bool = False, compiles: bool = True) -> list[Row]:
    """Return the rows of some parts, in the order of their worth; without a compiler, eager ones.

    Where a compiled row would have told what a shape does, its eager one takes its place.
    """
    every = TINY_ROWS if tiny else ROWS
    asked = [row for row in every if row.part in only and is_there(row.needs)]
    if compiles:
        return asked
    by_shape = {row.shape: row for row in asked if row.work == "train" and not row.compiles}
    found: dict[str, Row] = {}
    for row in asked:
        instead = by_shape.get(row.shape) if row.compiles and row.work == "train" else None
        taken = row if not row.compiles else instead
        if taken is not None:
            found.setdefault(taken.key, taken)
    return list(found.values())


def is_there(package: str) -> bool:
    """Whether a package that a row needs, if any, is installed."""
    return not package or importlib.util.find_spec(package) is not None


def next_row(left: Sequence[Row], seconds: float) -> Row | None:
    """Return the first row that so many seconds are enough for, None where it is none."""
    return next((row for row in left if row.seconds <= seconds), None)


class Planned(NamedTuple):
    """A row, and so many seconds after the start it should begin."""

    begins: float
    row: Row


def plan(seconds: float, asked: Sequence[Row], done: Collection[str] = ()) -> Iterator[Planned]:
    """Yield which rows a time is enough for, in their order, if each takes what it should.

    `done` are the keys of those that an earlier call has measured.
    """
    left, begins = [row for row in asked if row.key not in done], LOOK_S
    while (row := next_row(left, seconds - MARGIN_S - begins)) is not None:
        yield Planned(begins, row)
        begins += row.seconds
        left.remove(row)
