"""`CostInputs`: what all layouts of a pricing share, and values derived from it for a layout."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial

from meshwright.cost.calibration import Calibration
from meshwright.cost.catalogue import Cluster
from meshwright.cost.kernels import Kernels
from meshwright.cost.network import Network, Picks
from meshwright.cost.systems import System
from meshwright.cost.work import LayoutWork, RankLayers, layout_work
from meshwright.layout import Layout
from meshwright.program.schedule import stage_ranks
from meshwright.program.sizes import ELEMENT_BYTES
from meshwright.program.stages import Stage, split_stages
from meshwright.program.target import TRAITS, Device, DeviceTraits, Target, route, takes_tf32
from meshwright.program.zero_collectives import reduced_bytes
from meshwright.spec.model import ModelSpec
from meshwright.spec.training import OptimizerSpec, TrainSpec


@dataclass(frozen=True)
class CostInputs:
    """What pricing needs besides the layout: model, training, optimizer, cluster, system and
    constants.

    `products` is the dtype of matmuls, such as "fp8". `packed` says that sequences hold several
    documents. `imbalance` is the tokens of the busiest expert-parallel rank over the mean.
    `unquantised` is the share of layers whose matmuls stay in the training's precision.
    """

    model: ModelSpec
    train: TrainSpec
    optimizer: OptimizerSpec
    cluster: Cluster
    system: System
    calibration: Calibration
    products: str
    packed: bool = False
    imbalance: float = 1.0
    unquantised: float = 0.0

    @property
    def element(self) -> int:
        """Bytes per element of activations."""
        return ELEMENT_BYTES[self.train.precision]

    @property
    def weight_bytes(self) -> int:
        """Bytes of an element of the weights that the optimizer trains."""
        return ELEMENT_BYTES[self.train.weight_dtype]

    @property
    def gradient_bytes(self) -> int:
        """Bytes of an element of accumulated gradients."""
        is_pure = self.train.master == "none" and self.system.keeps == "shards"
        return ELEMENT_BYTES[self.train.gradient_dtype] if is_pure else self.system.gradient_bytes

    @property
    def reduced_bytes(self) -> int:
        """Bytes per element of gradients while they are reduced."""
        return self.system.reduced_bytes or reduced_bytes(self.train)

    @cached_property
    def device(self) -> Device:
        """Whether the ranks compute on a "cpu" or a "gpu"."""
        return "cpu" if self.cluster.device.kind == "cpu" else "gpu"

    @property
    def traits(self) -> DeviceTraits:
        """The differences in execution between CPU and GPU."""
        return TRAITS[self.device]

    @cached_property
    def target(self) -> Target:
        """The `Target` for which programs of the cluster's ranks are lowered."""
        if self.device == "gpu":
            tf32 = takes_tf32(self.train.matmul)
            target = Target("gpu", packed=self.packed, tf32=tf32, imbalance=self.imbalance)
            return target._replace(compiled=self.compiles)
        products = route(self.train.matmul, self.cluster.device.processor)
        return Target("cpu", products, self.packed, imbalance=self.imbalance)

    @property
    def peak(self) -> float:
        """Peak FLOP/s of the device in the dtype of matmuls."""
        return self.cluster.device.peak(self.products, tf32=self.target.tf32)

    @property
    def compile_gain(self) -> float | None:
        """The speedup of this model's compiled blocks as measured on this kind of device; None if
        not measured."""
        return self.measured(f"compile.gain.{self.train.precision}")

    @property
    def compiles(self) -> bool:
        """Whether blocks are priced as compiled.

        With `train.compile` = "auto", they are if the device compiles by default and the gain is
        not measured.
        """
        if self.train.compile != "auto":
            return self.train.is_compiled
        is_usual = self.traits.compiles_unmeasured and self.compile_gain is None
        return is_usual and self.train.engine == "native"

    def compile_saves(self, constant: str) -> float:
        """Return a calibration constant of what compiling saves: see `saves` and `loss_saves` of
        `Kernels`."""
        kind = self.cluster.device.kind
        return self.calibration.find(f"{constant}.{self.train.precision}", kind)

    @property
    def compile_seconds(self) -> float:
        """The measured seconds of compiling at the start of a run; 0 if not measured."""
        return self.measured(f"compile.seconds.{self.train.precision}") or 0.0

    def measured(self, constant: str) -> float | None:
        """Return a constant that was measured on the cluster's kind of device, or None."""
        return self.calibration.constants.get(f"{self.cluster.device.kind}.{constant}")

    @cached_property
    def memory_factor(self) -> float:
        """The measured correction of predicted memory, without model states; 1 if not measured."""
        device, system = self.cluster.device, self.system.name
        names = f"{system}.{device.kind}", system, device.kind
        return self.calibration.find("measured.memory", *names)

    @cached_property
    def held(self) -> dict[tuple[str, int, int], tuple[RankLayers, ...]]:
        """The cache of `layers_of_ranks`, by schedule, pipeline ranks and stages per rank."""
        return {}

    @cached_property
    def works(self) -> Callable[..., LayoutWork]:
        """`layout_work` for this model and sequence length, cached without hashing the model at
        each call."""
        train = self.train
        given = (self.model, train.seq_len, train.precision)
        target = self.target._replace(imbalance=1.0)  # each call says its own
        known = partial(layout_work, *given, fp8=train.fp8, target=target)
        return lru_cache(maxsize=8192)(known)

    def kernels(self) -> Kernels:
        """Return the `Kernels`, which compute seconds of work on the cluster's device."""
        kind, system = self.cluster.device.kind, self.system.name
        slower = self.calibration.find("measured.links", f"{system}.{kind}", system, kind)
        network = Network(self.cluster, self.calibration, slower)
        gain, saves = 1.0, 0.0
        if self.compiles and self.compile_gain is not None:
            gain = self.compile_gain
        elif self.compiles:
            saves = self.compile_saves("saves")
        loss_saves = self.compile_saves("saves.loss") if self.compiles else 0.0
        return Kernels(
            self.cluster.device,
            self.system,
            self.calibration,
            network,
            self.train.precision,
            self.products,
            gain,
            self.train.matmul,
            self.target,
            Picks(self.model.experts, self.model.top_k) if self.model.experts else None,
            saves,
            loss_saves,
            self.unquantised,
        )


def imbalance_of(train: TrainSpec, calibration: Calibration, kind: str) -> float:
    """Return the tokens of the busiest expert-parallel rank over the mean: as configured, or the
    calibration's.

    Balanced routing gives 1; an expert capacity is an upper bound.
    """
    if train.routing == "balanced":
        return 1.0
    imbalance = train.imbalance or calibration.find("experts.imbalance", kind)
    return min(imbalance, train.expert_capacity or imbalance)


def as_measured(cluster: Cluster, calibration: Calibration) -> Cluster:
    """Return the cluster with the measured peak FLOP/s and bandwidth of its device, where there are
    any."""
    device, known = cluster.device, calibration.constants
    peaks = {
        dtype: known.get(f"{device.kind}.peak.{dtype}", peak)
        for dtype, peak in device.peaks.items()
    }
    bandwidth = known.get(f"{device.kind}.bandwidth", device.bandwidth)
    return replace(cluster, device=replace(device, peaks=peaks, bandwidth=bandwidth))


@lru_cache(maxsize=4096)
def stages_of(model: ModelSpec, count: int, seq_len: int, is_even: bool) -> tuple[Stage, ...]:
    """Return `count` pipeline stages, split by cost, or by the number of layers if `is_even`."""
    if not is_even:
        return split_stages(model, count, seq_len)
    size, remainder = divmod(model.n_layers, count)
    bounds = [0]
    for index in range(count):
        bounds.append(
            bounds[-1]
            + size
            + (0 < index <= remainder if remainder < count - 1 else index < remainder)
        )
    return tuple(Stage(i, bounds[i], bounds[i + 1], i == 0, i == count - 1) for i in range(count))


@lru_cache(maxsize=4096)
def _held(
    model: ModelSpec, schedule: str, pp: int, virtual: int, seq_len: int, is_even: bool
) -> tuple[RankLayers, ...]:
    stages = stages_of(model, pp * virtual, seq_len, is_even)
    ranks = stage_ranks(schedule, pp, virtual)
    held_layers = []
    for rank in range(pp):
        rank_stages = [stage for stage in stages if ranks[stage.index] == rank]
        held_layers.append(RankLayers.of(model, rank_stages))
    return tuple(held_layers)


def layers_of_ranks(setting: CostInputs, layout: Layout) -> tuple[RankLayers, ...]:
    """Return the layers of each kind, and the ends of the model, that each pipeline rank holds."""
    # A search asks thousands of times: `_held` alone would hash the model each time.
    key = layout.schedule, layout.pp, layout.virtual_stages
    if key not in setting.held:
        seq_len, is_even = setting.train.seq_len, setting.system.even_stages
        setting.held[key] = _held(setting.model, *key, seq_len, is_even)
    return setting.held[key]


def may_hold_most(setting: CostInputs, layout: Layout) -> list[int]:
    """Return the pipeline ranks among which is the one that needs most memory.

    Of ranks with the same layers, these are the first and the last: see `price.worst_memory`.
    """
    ends: dict[RankLayers, list[int]] = {}
    for rank, held_layers in enumerate(layers_of_ranks(setting, layout)):
        ends[held_layers] = [*ends.get(held_layers, [])[:1], rank]
    return sorted(rank for ranks in ends.values() for rank in ranks)


def work_of(setting: CostInputs, layout: Layout, recompute: str | None = None) -> LayoutWork:
    """Return the work of a microbatch of a layout; `recompute` replaces the layout's policy.

    For a system that recomputes named modules, returns the work without recomputation, to which
    `cost.modules` adds.
    """
    if recompute is None and layout.recompute == "selective":
        recompute = "none" if setting.system.selective == "modules" else None
    return setting.works(
        layout.tp,
        layout.sp,
        layout.cp,
        layout.cp_kind,
        layout.microbatch,
        recompute or layout.recompute,
        layout.ep,
        layout.etp,
        setting.imbalance if layout.ep > 1 else 1.0,
    )
