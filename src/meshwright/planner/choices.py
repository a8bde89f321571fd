"""Automatic choices: what was chosen, its measured gain, and the key that changes it.

The gains come from `meshwright bench device`, measured on the config's own blocks. Blocks are
compiled on GPUs by default, elsewhere if the measured gain pays for it: on a GPU, between its
matmuls a block reads and writes the memory once an operation, and the compiler joins them. What a
compiler cannot take stays outside of the graphs, see `kernels.uncompiled`. The microbatch is the
fastest or the largest that fits.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final, NamedTuple

from meshwright.cost.inputs import CostInputs
from meshwright.cost.price import price, worst_memory
from meshwright.layout import Layout, broken
from meshwright.layout.rules import divisors
from meshwright.planner.prices import Fits, preference
from meshwright.planner.rank import MARGIN
from meshwright.planner.space import is_worth
from meshwright.spec.dump import FASTEST, LARGEST
from meshwright.spec.loading import Config
from meshwright.spec.model import OF_PADDING
from meshwright.spec.training import TrainSpec
from meshwright.spec.words import vocabulary_padding
from meshwright.units import format_bytes, format_seconds

_UNMEASURED: Final = (
    "its gain is not measured: `meshwright bench device --out FILE` does it, "
    "cluster.calibration = FILE reads it"
)
_ON_GPUS: Final = (
    "on GPUs it fuses the operations between matmuls; it takes about a minute at the start, and "
    "train.compile = false turns it off"
)


class CompileChoice(NamedTuple):
    """Whether blocks are compiled, and why."""

    compiled: bool
    reason: str


NOTHING_FITS: Final = CompileChoice(False, "no layout fits")


def choose(setting: CostInputs, layout: Layout, lacks: str | None = None) -> CompileChoice:
    """Return the resolved `train.compile` of a layout; `lacks` is what its compiler is missing.

    "auto" compiles if all steps together are predicted to save more seconds than compiling takes.
    Without a measurement, it compiles on GPUs only.
    """
    train, gain = setting.train, setting.compile_gain
    if gain is None:
        return unmeasured(train, lacks, on_gpus=setting.traits.compiles_unmeasured)
    if (choice := _settled(train, lacks)) is not None:
        return choice
    plain, compiled = (
        price(with_compile(setting, compiles=compiles), layout).time.total
        for compiles in (False, True)
    )
    saved, needed = train.steps * (plain - compiled), setting.compile_seconds
    reason = f"blocks were measured at {gain:.2f} x their speed: {train.steps} steps "
    if saved > 0:
        reason += f"of {format_seconds(compiled)} instead of {format_seconds(plain)} save "
        reason += f"{format_seconds(saved)}, compiling takes {format_seconds(needed)}"
    else:
        reason += "would save nothing"
    return CompileChoice(saved > needed, reason)


def unmeasured(train: TrainSpec, lacks: str | None, *, on_gpus: bool) -> CompileChoice:
    """Return the resolved `train.compile` where the gain of compiling was not measured."""
    choice = CompileChoice(on_gpus, _ON_GPUS if on_gpus else _UNMEASURED)
    return _settled(train, lacks) or choice


def _settled(train: TrainSpec, lacks: str | None) -> CompileChoice | None:
    """Return the choice where it does not depend on the measured gain; None where it does."""
    if train.compile != "auto":
        return CompileChoice(train.compile, "as asked for")
    if train.engine != "native":
        return CompileChoice(False, f'train.engine = "{train.engine}" does not compile blocks')
    return None if lacks is None else CompileChoice(False, lacks)


def with_compile(setting: CostInputs, *, compiles: bool) -> CostInputs:
    """Return a setting with compiled or uncompiled blocks."""
    return replace(setting, train=setting.train.model_copy(update={"compile": compiles}))


def decided(config: Config, choice: CompileChoice) -> Config:
    """Return a config with its `train.compile` resolved, and the reason as its origin."""
    if config.train.compile != "auto":
        return config
    train = config.train.model_copy(update={"compile": choice.compiled})
    origins = {**config.origins, "train.compile": f"auto: {choice.reason}"}
    return config.model_copy(update={"train": train, "origins": origins})


class Microbatch(NamedTuple):
    """A layout with its microbatch, and the reason for this size."""

    layout: Layout
    reason: str


def largest(setting: CostInputs, layout: Layout, memory: int) -> Microbatch | None:
    """Return a layout with its own microbatch, or the largest smaller one that fits such a memory.

    It is for a device of which only the memory is known. None where none fits.
    """
    train, limit = setting.train, memory * (1 - MARGIN)
    sizes = [n for n in divisors(train.batch // layout.dp) if n <= layout.microbatch]
    for size in sorted(sizes, reverse=True):
        sized = layout.model_copy(update={"microbatch": size})
        if broken(setting.model, train, sized) is None:
            needed_bytes = worst_memory(setting, sized).total
            if needed_bytes <= limit:
                reason = f"{LARGEST}, with {format_bytes(needed_bytes)} of {format_bytes(memory)}"
                return Microbatch(sized, f"{reason}, as predicted")
    return None


def fastest(setting: CostInputs, layout: Layout) -> Microbatch | None:
    """Return a layout with the planner's choice of microbatch; None where none fits."""
    device, train = setting.cluster.device, setting.train
    fits = Fits(setting, device.memory * (1 - MARGIN))
    sizes = [size for size in divisors(train.batch // layout.dp) if is_worth(size, train, layout)]
    tried = [layout.model_copy(update={"microbatch": size}) for size in sizes]
    legal = [candidate for candidate in tried if broken(setting.model, train, candidate) is None]
    light = [candidate for candidate in legal if fits.estimate(candidate).total <= fits.limit]
    for timed in sorted(map(fits.timed, light), key=preference):
        prediction = fits.priced(timed)
        if prediction.memory.total <= fits.limit:
            needed = format_bytes(prediction.memory.total)
            reason = f"{FASTEST}, with {needed} of {format_bytes(device.memory)}"
            return Microbatch(prediction.layout, f"{reason}, as predicted")
    return None


class Chosen(NamedTuple):
    """One automatic choice: its subject, its value, its measured gain if any, and its key."""

    subject: str
    text: str
    gain: float | None
    key: str


def choices(
    config: Config, setting: CostInputs, layout: Layout, compiled: CompileChoice
) -> list[Chosen]:
    """Return the automatic choices of a layout: the measured ones, and compiling.

    `compiled` is the resolved value of `train.compile`.
    """
    asked = "auto" if compiled.reason != "as asked for" else str(compiled.compiled).lower()
    blocks = f"{'compiled' if compiled.compiled else 'not compiled'} (train.compile = {asked})"
    candidates = [
        _products(setting),
        Chosen("blocks", f"{blocks}: {compiled.reason}", setting.compile_gain, "train.compile"),
        None if config.cluster.memory else _allocator(setting),
        _microbatch(setting, layout.microbatch),
        _vocabulary(setting, layout),
        _channels(setting) if layout.tp > 1 else None,
        _routing(setting, layout) if layout.ep > 1 else None,
    ]
    return [choice for choice in candidates if choice is not None]


def _products(setting: CostInputs) -> Chosen | None:
    gain, matmul = setting.measured("matmul.gain"), setting.train.matmul
    if gain is None or setting.train.precision != "fp32":
        return None
    text = f"{gain:.2f} x torch's speed, as measured (train.matmul = {matmul})"
    if matmul == "torch":
        gain = 1 / gain
        text = f"torch's, {gain:.2f} x the speed of auto's, as measured (train.matmul = torch)"
    return Chosen("products", text, gain, "train.matmul")


def _allocator(setting: CostInputs) -> Chosen | None:
    gain = setting.measured(f"blocks.allocator.{setting.train.precision}")
    if gain is None:
        return None
    text = f"kept by glibc when it is freed, {gain:.2f} x the measured speed of blocks without"
    text += " (GLIBC_TUNABLES, cluster.memory)"
    return Chosen("memory", text, gain, "GLIBC_TUNABLES, cluster.memory")


def rows_of(setting: CostInputs) -> dict[int, float]:
    """Return measured seconds of a block per token, by the number of sequences in a microbatch."""
    start, end = f"{setting.cluster.device.kind}.blocks.rows.", f".{setting.train.precision}"
    return {
        int(name.removeprefix(start).removesuffix(end)): value
        for name, value in setting.calibration.constants.items()
        if name.startswith(start) and name.endswith(end)
    }


def _microbatch(setting: CostInputs, count: int) -> Chosen | None:
    seconds_by_size = rows_of(setting)
    if len(seconds_by_size) < 2 or count not in seconds_by_size:
        return None
    smallest, best = min(seconds_by_size), min(seconds_by_size, key=seconds_by_size.__getitem__)
    gain = seconds_by_size[smallest] / seconds_by_size[count]
    text = f"{count} rows, {gain:.2f} x the speed of blocks with {smallest}, as measured; fastest "
    text += f"are {best} of {', '.join(map(str, sorted(seconds_by_size)))} (layout.microbatch)"
    return Chosen("microbatch", text, gain, "layout.microbatch")


def _vocabulary(setting: CostInputs, layout: Layout) -> Chosen | None:
    text = vocabulary_padding(setting.model, layout.tp)
    return None if text is None else Chosen("vocabulary", text, None, f"model.{OF_PADDING}")


def _routing(setting: CostInputs, layout: Layout) -> Chosen | None:
    train, busiest_share = setting.train, setting.imbalance
    if train.routing == "balanced":
        return None
    text = f"the busiest of {layout.ep} ranks gets {busiest_share:g} x the mean of tokens, "
    text += "as given" if train.imbalance else "by runs of others"
    if train.expert_capacity == busiest_share:
        text = f"the busiest of {layout.ep} ranks gets at most its capacity, "
        text += f"{busiest_share:g} x the mean"
    return Chosen("experts", f"{text} (train.imbalance)", None, "train.imbalance")


def _channels(setting: CostInputs) -> Chosen | None:
    by_gloo, by_channel, message_bytes = map(
        setting.measured, ("blocks.sum.gloo", "blocks.sum.channel", "blocks.message")
    )
    if by_gloo is None or by_channel is None or message_bytes is None:
        return None
    text = f"sums of {format_bytes(message_bytes)} take {by_channel * 1e3:.1f} ms "
    text += f"through shared memory, {by_gloo * 1e3:.1f} ms by gloo, as measured"
    return Chosen("messages", text, by_gloo / by_channel, "between CPU ranks of one machine")
