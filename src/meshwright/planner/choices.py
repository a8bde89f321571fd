"""Automatic choices: what was chosen, its measured gain, and the key that changes it.

The gains were measured by `meshwright bench device` on blocks of the config's size. Blocks are
compiled by default on GPUs, where the compiler fuses the operations between matmuls, each of which
would otherwise read and write device memory. Elsewhere they are compiled if the time saved exceeds
the time of compiling. `kernels.uncompiled` has what stays outside of the graphs. The microbatch is
the fastest or the largest that fits.
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
from meshwright.planner.space import most_sequences
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
    """Whether the model's blocks are compiled with `torch.compile`, and why."""

    compiled: bool
    reason: str


NOTHING_FITS: Final = CompileChoice(False, "no layout fits")


def choose(setting: CostInputs, layout: Layout, lacks: str | None = None) -> CompileChoice:
    """Return whether to compile the blocks of a layout (`train.compile` with "auto" resolved).

    "auto" compiles if the predicted time saved over all steps exceeds the time of compiling.
    Without a measured gain, it compiles on GPUs only. `lacks` says what the compiler misses on this
    machine (such as a C++ compiler); None if nothing.
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
    """Return whether to compile where the gain of compiling was not measured: with "auto", on GPUs
    only.

    `lacks` says what the compiler misses on this machine; None if nothing.
    """
    choice = CompileChoice(on_gpus, _ON_GPUS if on_gpus else _UNMEASURED)
    return _settled(train, lacks) or choice


def _settled(train: TrainSpec, lacks: str | None) -> CompileChoice | None:
    """Return the compile choice if the config, the engine or a missing compiler decides it, else
    None."""
    if train.compile != "auto":
        return CompileChoice(train.compile, "as asked for")
    if train.engine != "native":
        return CompileChoice(False, f'train.engine = "{train.engine}" does not compile blocks')
    return None if lacks is None else CompileChoice(False, lacks)


def with_compile(setting: CostInputs, *, compiles: bool) -> CostInputs:
    """Return the cost inputs with `train.compile` set to `compiles`."""
    return replace(setting, train=setting.train.model_copy(update={"compile": compiles}))


def decided(config: Config, choice: CompileChoice) -> Config:
    """Return the config with `train.compile` = "auto" replaced by the choice, its reason as the
    origin."""
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
    """Return the layout with the largest microbatch, up to its present one, that fits in `memory`
    bytes.

    It is for a device of which only the memory is known. None if no microbatch is legal and fits.
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
    """Return the layout with the fastest microbatch that fits on the cluster's device; None if none
    fits."""
    device, train = setting.cluster.device, setting.train
    fits = Fits(setting, device.memory * (1 - MARGIN))
    largest = most_sequences(train, layout.cp)
    sizes = [size for size in divisors(train.batch // layout.dp) if size <= largest]
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
    """One automatic choice for a report: its subject, a sentence, the measured gain, and its config
    key.

    `gain` is a factor of speed, None where it was not measured.
    """

    subject: str
    text: str
    gain: float | None
    key: str


def choices(
    config: Config, setting: CostInputs, layout: Layout, compiled: CompileChoice
) -> list[Chosen]:
    """Return the automatic choices to report for a layout, such as compiling, microbatch and
    messages.

    Choices that rest on a measurement are left out where it is missing. `compiled` is the resolved
    `train.compile`.
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
    """Return the measured seconds of a block per token, by the number of sequences in a
    microbatch."""
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
