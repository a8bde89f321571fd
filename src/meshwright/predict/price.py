"""`price`: memory and time of a layout on a cluster, the worst rank first."""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.layout import Layout
from meshwright.predict.memory import Term, activations, model_states, outside
from meshwright.predict.setting import Setting, held_by
from meshwright.predict.step import StepTime, step_time
from meshwright.program.model_flops import flops_per_token


@dataclass(frozen=True)
class RankMemory:
    """Terms of one rank's peak; `rank` is its place in the pipeline."""

    rank: int
    terms: tuple[Term, ...]
    limit: int

    @property
    def total(self) -> float:
        """Bytes at the peak, with what is not the program's."""
        return sum(term.bytes for term in self.terms)

    @property
    def allocated(self) -> float:
        """Bytes of tensors at the peak."""
        return sum(term.bytes for term in self.terms if term.category not in _OUTSIDE)

    @property
    def fits(self) -> bool:
        """Whether it is within the device."""
        return self.total <= self.limit

    def by_category(self) -> dict[str, float]:
        """Return the bytes of each category."""
        sums: dict[str, float] = {}
        for term in self.terms:
            sums[term.category] = sums.get(term.category, 0.0) + term.bytes
        return sums


_OUTSIDE = ("context", "communicators", "allocator")


def memory(setting: Setting, layout: Layout, rank: int) -> RankMemory:
    """Return the peak of the ranks at one place in the pipeline."""
    held = held_by(setting, layout)[rank]
    terms = model_states(setting, layout, held) + activations(setting, layout, rank)
    allocated = sum(term.bytes for term in terms)
    device = setting.cluster.device
    terms += outside(device, layout, setting.system, setting.calibration, allocated)
    return RankMemory(rank, tuple(terms), device.memory)


def worst_memory(setting: Setting, layout: Layout) -> RankMemory:
    """Return the memory of the pipeline rank that needs most: the first, the last or between."""
    ranks = sorted({0, 1, layout.pp - 2, layout.pp - 1} & set(range(layout.pp)))
    return max((memory(setting, layout, rank) for rank in ranks), key=lambda found: found.total)


@dataclass(frozen=True)
class Prediction:
    """What a layout costs: the worst rank's memory, the time of a step, and the rates."""

    layout: Layout
    memory: RankMemory
    time: StepTime
    tokens: int
    flops_per_token: float
    devices: int
    peak: float

    @property
    def tokens_per_s(self) -> float:
        """Tokens a second over all devices."""
        return self.tokens / self.time.total

    @property
    def tflops_per_device(self) -> float:
        """Model TFLOP/s of a device, attention over the whole square: arXiv:2204.02311."""
        return self.tokens_per_s * self.flops_per_token / self.devices / 1e12

    @property
    def mfu(self) -> float:
        """Share of the device's peak that the model's FLOPs are."""
        return self.tflops_per_device * 1e12 / self.peak


def price(setting: Setting, layout: Layout, *, events: bool = True) -> Prediction:
    """Return what a layout costs; see `step_time` and `worst_memory`."""
    return Prediction(
        layout,
        worst_memory(setting, layout),
        step_time(setting, setting.kernels(), layout, events=events),
        setting.train.batch * setting.train.seq_len,
        flops_per_token(setting.model, setting.train.seq_len),
        layout.world,
        setting.cluster.device.peaks[setting.products.split("-")[0]],
    )
