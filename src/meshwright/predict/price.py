"""`price`: memory and time of a layout on a cluster, the worst rank first."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from meshwright.layout import Layout
from meshwright.predict.calibration import Calibration
from meshwright.predict.catalogue import Cluster
from meshwright.predict.kernels import Kernels, Seconds
from meshwright.predict.memory import Held, Term, activations, model_states, outside
from meshwright.predict.network import Network
from meshwright.predict.pipeline import by_events, closed_form
from meshwright.predict.stacks import Stack
from meshwright.predict.work import LayoutWork, layout_work, weights
from meshwright.program.lower import Program
from meshwright.program.operations import ELEMENT_BYTES
from meshwright.program.parts import flops_per_token
from meshwright.program.schedule import stage_ranks
from meshwright.program.stages import Stage, split_stages
from meshwright.spec.model import ModelSpec
from meshwright.spec.training import TrainSpec

# An AdamW step reads gradient, moments and weight in fp32 and writes all but the gradient.
_OPTIMIZER_BYTES = 28


@dataclass(frozen=True)
class Memory:
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


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step on the dearest rank, by cause; they add up to `total`."""

    causes: dict[str, float]

    @property
    def total(self) -> float:
        """Seconds of a step."""
        return sum(self.causes.values())


@dataclass(frozen=True)
class Setting:
    """What is the same for all layouts: model, training, cluster, system, calibration.

    `products` is the dtype in which products are computed, such as "fp8".
    """

    model: ModelSpec
    train: TrainSpec
    cluster: Cluster
    stack: Stack
    calibration: Calibration
    products: str

    @property
    def element(self) -> int:
        """Bytes of an element of activations."""
        return ELEMENT_BYTES[self.train.precision]

    def kernels(self) -> Kernels:
        """Return what prices work on the cluster's device."""
        network = Network(self.cluster, self.calibration)
        return Kernels(
            self.cluster.device,
            self.stack,
            self.calibration,
            network,
            self.train.precision,
            self.products,
        )


@lru_cache(maxsize=4096)
def stages_of(model: ModelSpec, count: int, seq_len: int, is_even: bool) -> tuple[Stage, ...]:
    """Return the stages: as the program splits them by cost, or by number alone."""
    if not is_even:
        return split_stages(model, count, seq_len)
    size, more = divmod(model.n_layers, count)
    bounds = [0]
    for index in range(count):
        bounds.append(bounds[-1] + size + (0 < index <= more if more < count - 1 else index < more))
    return tuple(Stage(i, bounds[i], bounds[i + 1], i == 0, i == count - 1) for i in range(count))


@lru_cache(maxsize=4096)
def _held(
    model: ModelSpec, schedule: str, pp: int, virtual: int, seq_len: int, is_even: bool
) -> tuple[Held, ...]:
    stages = stages_of(model, pp * virtual, seq_len, is_even)
    ranks = stage_ranks(schedule, pp, virtual)
    found = []
    for rank in range(pp):
        own = [stage for stage in stages if ranks[stage.index] == rank]
        found.append(
            Held(
                sum(len(stage.layers) for stage in own),
                any(stage.is_first for stage in own),
                any(stage.is_last for stage in own),
            )
        )
    return tuple(found)


def held_by(setting: Setting, layout: Layout) -> tuple[Held, ...]:
    """Return what each pipeline rank holds."""
    return _held(
        setting.model,
        layout.schedule,
        layout.pp,
        layout.virtual_stages,
        setting.train.seq_len,
        setting.stack.even_stages,
    )


def work_of(setting: Setting, layout: Layout, recompute: str | None = None) -> LayoutWork:
    """Return the work of a microbatch of a layout."""
    return layout_work(
        setting.model,
        setting.train.seq_len,
        setting.train.precision,
        layout.tp,
        layout.sp,
        layout.cp,
        layout.cp_kind,
        layout.microbatch,
        recompute or layout.recompute,
    )


def memory(setting: Setting, layout: Layout, rank: int) -> Memory:
    """Return the peak of the ranks at one place in the pipeline."""
    held = held_by(setting, layout)[rank]
    count = setting.train.batch // layout.dp // layout.microbatch
    terms = model_states(setting.model, layout, setting.stack, held, setting.element)
    terms += activations(
        layout,
        setting.stack,
        work_of(setting, layout),
        work_of(setting, layout, "none"),
        held,
        rank,
        count,
        setting.calibration,
    )
    allocated = sum(term.bytes for term in terms)
    device = setting.cluster.device
    terms += outside(device, layout, setting.stack, setting.calibration, allocated)
    return Memory(rank, tuple(terms), device.memory)


def worst_memory(setting: Setting, layout: Layout) -> Memory:
    """Return the memory of the pipeline rank that needs most: the first, the last or between."""
    ranks = sorted({0, 1, layout.pp - 2, layout.pp - 1} & set(range(layout.pp)))
    return max((memory(setting, layout, rank) for rank in ranks), key=lambda found: found.total)


@dataclass(frozen=True)
class Parts:
    """Seconds of a microbatch in a layer and in the ends."""

    layer: Seconds
    first: Seconds
    last: Seconds

    def of(self, held: Held, cause: str) -> float:
        """Return a cause's seconds of one microbatch on a pipeline rank."""
        seconds: float = held.layers * getattr(self.layer, cause)
        if held.has_embedding:
            seconds += getattr(self.first, cause)
        if held.has_head:
            seconds += getattr(self.last, cause)
        return seconds

    def room(self, held: Held) -> float:
        """Return the seconds of a microbatch that messages of data parallelism may hide behind."""
        return sum(self.of(held, cause) for cause in ("forward", "backward", "recompute"))


def parts_of(setting: Setting, kernels: Kernels, layout: Layout) -> Parts:
    """Return the seconds of a microbatch in a layer and in the ends of a layout."""
    found = work_of(setting, layout)
    first, last = kernels.ends(found, layout.tp)
    layer = kernels.layer(found, layout.cp, layout.tp, layout.cp_kind, layout.recompute)
    return Parts(layer, first, last)


def step_time(
    setting: Setting, kernels: Kernels, layout: Layout, *, events: bool = True
) -> StepTime:
    """Return the time of a step; without `events` the pipeline is priced in closed form."""
    found = work_of(setting, layout)
    parts = parts_of(setting, kernels, layout)
    ranks = held_by(setting, layout)
    count = setting.train.batch // layout.dp // layout.microbatch
    gathers = gather_waits(setting, kernels, layout, parts)
    whole = [
        sum(parts.of(held, cause) for cause in Seconds._fields) + held.layers * gathers
        for held in ranks
    ]
    dearest = max(range(layout.pp), key=whole.__getitem__)
    transfer = transfer_seconds(kernels, layout, found)
    pipeline = _pipeline(setting, layout, parts, gathers, whole, transfer, kernels, events)
    held = ranks[dearest]
    per_step = {cause: count * parts.of(held, cause) for cause in Seconds._fields}
    causes = {
        "compute": per_step["forward"] + per_step["backward"],
        "recompute": per_step["recompute"],
        "tp": per_step["tp_forward"] + per_step["tp_backward"] + per_step["tp_recompute"],
        "cp": per_step["cp"],
        "gathers": count * held.layers * gathers,
        "bubble": pipeline - count * whole[dearest],
        "data": data_wait(
            setting, kernels, data_messages(setting, kernels, layout, held), parts.room(held)
        ),
        "optimizer": optimizer_seconds(setting, kernels, layout, held),
        "host": kernels.fixed,
    }
    return StepTime(causes)


def _pipeline(
    setting: Setting,
    layout: Layout,
    parts: Parts,
    gathers: float,
    whole: list[float],
    transfer: float,
    kernels: Kernels,
    events: bool,
) -> float:
    count = setting.train.batch // layout.dp // layout.microbatch
    if layout.pp == 1 or not events:
        return closed_form(
            layout.schedule,
            layout.pp,
            layout.virtual_stages,
            count,
            max(whole),
            sum(whole),
            transfer,
            kernels.exposed_pp,
        )
    stages = stages_of(
        setting.model, layout.stages, setting.train.seq_len, setting.stack.even_stages
    )
    forward, backward = [], []
    for stage in stages:
        held = Held(len(stage.layers), stage.is_first, stage.is_last)
        forward.append(
            parts.of(held, "forward")
            + parts.of(held, "tp_forward")
            + (parts.of(held, "cp") + held.layers * gathers) / 3
        )
        backward.append(
            sum(parts.of(held, cause) for cause in ("backward", "recompute", "tp_backward"))
            + parts.of(held, "tp_recompute")
            + (parts.of(held, "cp") + held.layers * gathers) * 2 / 3
        )
    exposed = 2 * layout.virtual_stages * count * transfer * kernels.exposed_pp
    program = Program(setting.model, setting.train, layout, stages)
    return by_events(program, forward, backward, transfer) + exposed


def transfer_seconds(kernels: Kernels, layout: Layout, found: LayoutWork) -> float:
    if layout.pp == 1:
        return 0.0
    stride = layout.dp * layout.cp * layout.tp
    return kernels.network.seconds("send", found.sizes.stream_bytes, 2, stride)


def unit_messages(setting: Setting, kernels: Kernels, layout: Layout) -> tuple[float, float]:
    """Return the seconds of ZeRO's messages of a layer and microbatch: a gather, a sum."""
    ranks, zero = layout.shard_ranks, layout.zero
    if ranks == 1 or zero < 2:
        return 0.0, 0.0
    network, elements = kernels.network, weights(setting.model, layout.tp, ranks).layer
    gather = 0.0
    if zero == 3:
        gather = network.seconds("all_gather", elements * setting.element, ranks, layout.tp)
    size = elements * setting.stack.reduced_bytes
    return gather, network.seconds("reduce_scatter", size, ranks, layout.tp)


def gather_waits(setting: Setting, kernels: Kernels, layout: Layout, parts: Parts) -> float:
    """Return what a layer of a microbatch waits for ZeRO: gathers, and sums of gradients.

    A unit is gathered while the one before it computes, and reduced behind it, so the longer of
    the two counts: FSDP2's prefetch, arXiv:2304.11277, section 3.3.
    """
    gather, reduce = unit_messages(setting, kernels, layout)
    if not gather and not reduce:
        return 0.0
    layer = parts.layer
    forward = layer.forward + layer.tp_forward
    backward = layer.backward + layer.recompute + layer.tp_backward + layer.tp_recompute
    hidden = min(gather, forward) + min(gather + reduce, backward)
    return 2 * gather + reduce - kernels.overlap * hidden


def data_messages(setting: Setting, kernels: Kernels, layout: Layout, held: Held) -> float:
    """Return the seconds of what data parallelism sends once a step: sums, ZeRO 1 and 2's gathers.

    A ring takes a turn for each of its ranks and each message, of which a layer has its share.
    """
    found = weights(setting.model, layout.tp, layout.shard_ranks)
    elements = held.layers * found.layer + (found.embedding if held.has_embedding else 0)
    elements += found.head if held.has_head else 0
    network, reduced = kernels.network, setting.stack.reduced_bytes
    ranks = layout.shard_ranks
    seconds = 0.0
    if ranks > 1 and layout.zero <= 2:
        if layout.zero == 1:
            seconds += network.seconds("reduce_scatter", elements * reduced, ranks, layout.tp)
        seconds += network.seconds("all_gather", elements * setting.element, ranks, layout.tp)
    replicas = layout.dp_replicate * (1 if layout.zero else layout.cp)
    if replicas > 1:
        size = elements * reduced / ranks
        stride = layout.tp * (layout.dp_shard * layout.cp if layout.zero else 1)
        seconds += network.seconds("all_reduce", size, replicas, stride)
    return seconds + held.layers * (ranks * replicas - 1) * kernels.data_latency


def data_wait(setting: Setting, kernels: Kernels, seconds: float, room: float) -> float:
    """Return what a step waits for these messages.

    They overlap with the backward of the last microbatch and the first forward, `room` seconds.
    """
    if not setting.stack.overlaps_data:
        return seconds
    return max(seconds - kernels.overlap * min(seconds, room), 0.0)


def optimizer_seconds(setting: Setting, kernels: Kernels, layout: Layout, held: Held) -> float:
    """Return the seconds of the update: memory-bound, or with offload bound by the host's link."""
    found = weights(setting.model, layout.tp, layout.shard_ranks)
    whole = held.layers * found.layer + (found.embedding if held.has_embedding else 0)
    elements = (whole + (found.head if held.has_head else 0)) / layout.shard_ranks
    if layout.offload == "none":
        return elements * _OPTIMIZER_BYTES / kernels.bandwidth
    host = setting.cluster.host.bandwidth
    moved = elements * 2 * 4  # gradients down, weights up, in fp32
    if layout.offload == "params":
        count = setting.train.batch // layout.dp // layout.microbatch
        moved += elements * 4 * 2 * count  # shards up for each forward and backward
    return moved / host + elements * _OPTIMIZER_BYTES / kernels.host_bandwidth


@dataclass(frozen=True)
class Prediction:
    """What a layout costs: the worst rank's memory, the time of a step, and the rates."""

    layout: Layout
    memory: Memory
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
