"""What was predicted of the steps that `benchmarks.gpu` has measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from benchmarks.gpu_rows import Shape
from meshwright.cost.calibration import (
    Calibration,
    blocks_of,
    over_shipped,
    parse_calibration,
)
from meshwright.cost.inputs import CostInputs
from meshwright.cost.price import price
from meshwright.cost.timeline import timeline
from meshwright.kernels.processor import processor
from meshwright.layout import Layout
from meshwright.planner.plan import cost_inputs_of, on_cluster
from meshwright.program.lower import lower
from meshwright.program.model_flops import flops_per_token
from meshwright.spec.loading import Config, load_config


def setting(config: Config, layout: Layout, calibration: Calibration | None = None) -> CostInputs:
    """Return what a layout of one rank is priced for."""
    return on_cluster(cost_inputs_of(config, calibration, layout.world, processor()), layout)


def peak(config: Config, layout: Layout) -> int:
    """Return the predicted bytes of the one rank at its peak."""
    of = setting(config, layout)
    return timeline(lower(of.model, of.train, of.optimizer, layout, of.target), 0).peak.total


def layers_within(room: float, shape: Shape, words: Sequence[str], layout: Layout) -> int:
    """Return with how many layers, at least one, a shape should stay within so many bytes."""
    least, most = 1, shape.layers
    while least < most:
        layers = (least + most + 1) // 2
        config = load_config(None, [*shape.words(layers), *words])
        if peak(config, layout) <= room:
            least = layers
        else:
            most = layers - 1
    return least


class Trained(NamedTuple):
    """Steps of a shape beside what was predicted of them: seconds, bytes, FLOP/s of the model.

    `calibrated` is the step's prediction from what was measured of the device: of the same blocks
    where there is that, None where nothing is. `causal` counts half of attention's square.
    """

    shape: str
    layers: int
    of: int
    length: int
    mode: str
    step: float
    predicted: float
    calibrated: float | None
    tokens_per_s: float
    flops_per_s: float
    causal_flops_per_s: float
    peak: int
    predicted_peak: int

    @classmethod
    def of_found(cls, found: Mapping[str, Any], calibrations: Sequence[str]) -> Trained:
        """Return the row of what was found; `calibrations` are TOML."""
        config, layout = load_config(None, found["config"]), Layout.parse(found["layout"])
        model, length = config.model, config.train.seq_len
        step = found["step_time_s"]
        tokens = config.train.batch * length / step
        square = flops_per_token(model, length)
        half = square - 6 * model.n_layers * model.n_heads * model.head_dim * length
        measured = [over_shipped(parse_calibration(text)) for text in calibrations]
        blocks = blocks_of(model, length)
        own = [one for one in measured if one.blocks == blocks] or measured
        fresh = price(setting(config, layout, own[0]), layout).time.total if own else None
        mode = " ".join(
            (
                "compiled" if config.train.is_compiled else "eager",
                *(["fp8"] if config.train.fp8 else []),
                *found["layout"].split()[1:],
            )
        )
        return cls(
            *(found["shape"], model.n_layers, found["of"], length, mode, step),
            price(setting(config, layout), layout).time.total,
            *(fresh, tokens, square * tokens, half * tokens),
            *(max(found["peak_bytes"], default=0), peak(config, layout)),
        )

    def line(self, best: float) -> str:
        """Return it in a line; MFU is of `best` FLOP/s."""
        layers = f"{self.layers} of {self.of} layers"
        return (
            f"{layers}, {self.tokens_per_s:,.0f} tokens/s, MFU {self.flops_per_s / best:.1%}, "
            f"step {beside(self.step, self.predicted, '{:.3f} s')}, "
            f"peak {beside(self.peak / 2**30, self.predicted_peak / 2**30, '{:.2f} GiB')}"
        )


def beside(measured: float, predicted: float, form: str) -> str:
    """Return a measured value, what was predicted, and how far that is off."""
    off = f", {predicted / measured - 1:+.1%}" if measured else ""
    return f"{form.format(measured)} ({form.format(predicted)} predicted{off})"
