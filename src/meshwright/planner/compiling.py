"""Whether to compile blocks: on GPUs by default, elsewhere if the measured gain pays for it.

On a GPU that is not measured it is the choice of whoever knows them: between its products a block
reads and writes the memory once an operation, and the compiler joins them. What a compiler cannot
take stays outside of the graphs, see `kernels.uncompiled`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final, NamedTuple

from meshwright.cost.inputs import CostInputs
from meshwright.cost.price import price
from meshwright.layout import Layout
from meshwright.spec.loading import Config
from meshwright.spec.training import TrainSpec
from meshwright.units import format_seconds

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
