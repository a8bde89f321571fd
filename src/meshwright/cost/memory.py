"""Bytes of one rank at the peak of a step in closed form, by category, each with its formula.

For Meshwright's engine, they only preselect layouts in a search; the final price comes from
`cost.peak`, see `cost.price.memory`. For other systems, they are the only estimate.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, get_args

from meshwright.cost.calibration import Calibration
from meshwright.cost.catalogue import Device
from meshwright.cost.elements import elements_of, gathered_elements, gathered_weights, weights
from meshwright.cost.inputs import CostInputs, layers_of_ranks, work_of
from meshwright.cost.modules import kept_without
from meshwright.cost.optimizer import updates
from meshwright.cost.pipeline import held_together, in_flight
from meshwright.cost.systems import CAUSAL, OURS, System
from meshwright.cost.work import LayoutWork, RankLayers, Work
from meshwright.layout import Layout
from meshwright.layout.schedules import SCHEDULES, microbatch_rule
from meshwright.program.saved import Kind
from meshwright.program.shards import cuts_frozen
from meshwright.program.sizes import Sizes, fuses_loss, loss_element, loss_rows, loss_workspace
from meshwright.spec.lora import NF4_BLOCK, nf4_bytes

# What of a peak is model states.
STATES = ("weights", "gathered", "gradients", "optimizer", "communication buffers")
_FP32 = 4
# Of an element in 16 bits, what is left where it is kept as products in few bits take it: MX has a
# scale for every 32 elements, NVFP4 for every 16.
_QUANTISED: Mapping[str, float] = {
    "fp8": 1 / 2,
    "fp8-rowwise": 1 / 2,
    "fp8-mx": 33 / 64,
    "fp4": 9 / 32,
}
_GATED_PRODUCTS = 7  # q, k, v, o and the three of a gated MLP
_KINDS = (*get_args(Kind), "scores", "copies")
_ACTIVATIONS = {kind: f"activations: {kind}" for kind in _KINDS}
_NOTHING_AGAIN = Layout()


class Term(NamedTuple):
    """A part of a rank's memory: its category, bytes, and the formula with its numbers.

    The formula is built on request, because a search makes hundreds of thousands of terms.
    """

    category: str
    bytes: float
    template: str
    numbers: tuple[object, ...] = ()

    @property
    def formula(self) -> str:
        """The formula with its numbers filled in."""
        return self.template.format(*self.numbers)


def model_states(setting: CostInputs, layout: Layout, held_layers: RankLayers) -> list[Term]:
    """Return the weights, gradients and optimizer states of a rank with these layers, as terms.

    ZeRO stage 1 divides the optimizer states over the sharding ranks, stage 2 also gradients, stage
    3 also weights (arXiv:1910.02054, section 3.1 and figure 1). In a system that keeps shards, the
    weights that the optimizer updates are sharded: stage 1 shards them and gathers a compute copy.
    On CPUs, they stay whole where matmuls take them in their own dtype, see `Target.uses_fsdp2`.
    """
    model, system, element = setting.model, setting.system, setting.element
    ranks, zero = layout.shard_ranks, layout.zero
    whole_elements = elements_of(model, layout, held_layers, is_padded=False, which="trained").total
    part = elements_of(model, layout, held_layers, which="trained").share(layout)
    terms = []

    def add(category: str, count: int, size: int, label: str) -> None:
        terms.append(_counted(category, count, size, label))

    if model.lora is not None:
        all_elements = elements_of(model, layout, held_layers, is_padded=False)
        share = ranks if cuts_frozen(layout) else 1
        packed = elements_of(model, layout, held_layers, is_padded=False, which="four bits").total
        add("weights", (all_elements.total - whole_elements) // share - packed, element, "frozen")
        if packed:
            blocks, size = packed // NF4_BLOCK, nf4_bytes(NF4_BLOCK)
            template = "{:,} blocks of 64 elements x {} B: frozen in four bits"
            terms.append(Term("weights", blocks * size, template, (blocks, size)))
    in_place = system.keeps == "shards" and not setting.target.uses_fsdp2(layout)
    takes_as_kept = in_place and element == setting.weight_bytes
    if zero < 3 and (system.keeps != "shards" or takes_as_kept):
        add("weights", whole_elements, element, "whole")
    else:
        size = setting.weight_bytes if system.keeps == "shards" else element
        label = "fp32 shards" if system.keeps == "shards" and size == _FP32 else "shards"
        add("weights", part, size, label)
        if zero == 3:
            terms.append(_gathered(setting, layout, held_layers, in_place=in_place))
        elif ranks > 1 or element != setting.weight_bytes:
            copy = gathered_elements(setting, layout, held_layers, is_padded=False).total
            add("gathered", copy, element, "compute copy, kept through the step")
    terms += _gradients(setting, layout, held_layers, whole_elements, part)
    if not layout.states_on_host:
        terms += _optimizer_states(setting, layout, held_layers)
    if layout.offload == "params":
        # Shards lie on the host; what is gathered or accumulated whole does not.
        terms = [term for term in terms if term.category != "weights"]
    return terms


def _optimizer_states(
    setting: CostInputs, layout: Layout, held_layers: RankLayers
) -> Iterator[Term]:
    """Yield one term with the optimizer states of a rank's parameters, summed over the update
    rules.

    A system that keeps whole weights in half precision also has fp32 master weights there.
    """
    spec, keeps_shards = setting.optimizer, setting.system.keeps == "shards"
    has_masters = not keeps_shards and setting.element != setting.weight_bytes
    merged: dict[tuple[str, int], list[int]] = {}
    scales, total, templates, numbers = 0, 0, [], list[object]()
    for share in updates(setting, layout, held_layers):
        states = share.rule.element_bytes(spec)
        called = [share.rule.called] * (states > 0) + ["fp32 weights"] * has_masters
        if not called or not share.elements:
            continue
        # How others keep the number of updates is not known.
        number = share.rule.number_bytes(spec) * keeps_shards
        counts = merged.setdefault((" and ".join(called), states + _FP32 * has_masters), [0, 0])
        counts[0] += share.elements
        counts[1] += share.parameters * number
        scales += share.blocks * share.rule.block_bytes(spec)
    for (label, size), (elements, number_bytes) in merged.items():
        total += elements * size + number_bytes
        templates.append("{:,} elements x {} B: " + label)
        numbers += [elements, size]
        if number_bytes:
            templates[-1] += ", {:,} x {} B: numbers of updates"
            numbers += [number_bytes // _FP32, _FP32]
    if scales:
        total += scales
        templates.append("{:,} blocks x {} B: scales of moments in int8")
        numbers += [scales // _FP32, _FP32]
    if templates:
        yield Term("optimizer", total, "; ".join(templates), tuple(numbers))


def _gathered(
    setting: CostInputs, layout: Layout, held_layers: RankLayers, *, in_place: bool
) -> Term:
    """Return the weights that ZeRO-3 has gathered at one time."""
    unit = gathered_weights(setting, layout)
    if in_place:
        all_elements = elements_of(setting.model, layout, held_layers, is_padded=False).total
        count = all_elements - max(held_layers.layers - 2, 0) * unit.layer
        label = "two blocks, and what is in none of them"
    else:
        count = 2 * unit.largest(held_layers)
        label = "the unit at work and the one gathered ahead"
    return _counted("gathered", count, setting.element, label)


def _gradients(
    setting: CostInputs, layout: Layout, held_layers: RankLayers, whole_elements: int, part: int
) -> list[Term]:
    """Return the terms of a rank's gradients: `whole_elements` are trained, `part` of them in its
    shard."""
    model, system, reduced = setting.model, setting.system, setting.reduced_bytes
    microbatches = layout.microbatches(setting.train.batch)
    is_split = SCHEDULES[layout.schedule].splits_backward and layout.is_pipelined
    is_fsdp2 = system.keeps == "shards" and setting.target.uses_fsdp2(layout)
    # FSDP2 reduces a stage's gradients in its last backward: none accumulate if that is the only.
    is_reduced = is_fsdp2 and layout.zero > 0 and microbatches == 1 and not is_split
    if layout.zero < 2 and not is_reduced:
        gradient = setting.reduced_bytes if system.name == OURS else setting.gradient_bytes
        return [_counted("gradients", whole_elements, gradient, "accumulated whole")]
    unit = weights(model, layout.tp, layout.shard_ranks, layout.ep, layout.etp, which="trained")
    label = "of the unit at work, and being reduced"
    terms = [_counted("gradients", 2 * unit.largest(held_layers), reduced, label)]
    meets_once = is_split or microbatches == 1  # then each is reduced by itself
    if layout.offload != "params":
        terms.insert(0, _counted("gradients", part, setting.gradient_bytes, "sums, in shards"))
    elif system.keeps == "shards" and layout.dp_replicate > 1 and not meets_once:
        # FSDP2 keeps a shard group's sums on the device until its replicas meet, for the last.
        terms.append(_counted("gradients", part, reduced, "sums of a shard group"))
    further = layout.virtual_stages - 1
    if is_fsdp2 and further and not is_reduced:
        # FSDP2 keeps the input of its last reduction, of each of a rank's stages.
        label = "reduced last, of each further stage"
        terms.append(_counted("communication buffers", further * unit.layer, reduced, label))
    return terms


def _counted(category: str, count: int, size: int, label: str) -> Term:
    """Return the term of `count` elements of `size` bytes."""
    return Term(category, count * size, "{:,} elements x {} B: " + label, (count, size))


class KeptBytes(NamedTuple):
    """The activation bytes of a microbatch, the same for all pipeline ranks; see `kept_of`.

    `saved` has, by kind of operation, what each kind of layer saves on the device; `deferred` what
    its deferred weight gradients hold; `at_work` the workspace of a layer's backward, and `loss`
    that of the head. `moving` is what the largest layer copies to the host, `last` what the last
    norm, the head and the loss save.
    """

    saved: Mapping[str, tuple[float, ...]]
    deferred: tuple[float, ...]
    at_work: Term
    loss: Term
    moving: float = 0.0
    last: float = 0.0


def kept_of(setting: CostInputs, layout: Layout) -> KeptBytes:
    """Return the activation bytes of a layout's microbatch; they depend on neither schedule nor
    data ranks."""
    system, calibration = setting.system, setting.calibration
    layout_work, plain = work_of(setting, layout), work_of(setting, layout, "none")
    kept_bytes = calibration.find("kept_bytes", system.name)
    quantised = _QUANTISED.get(setting.products, 1.0) if system.keeps_quantised else 1.0
    quantised += setting.unquantised * (1 - quantised)
    per_layer: list[dict[str, float]] = [
        kept_per_layer(layout, system, layout_work.sizes, work, kept_bytes, quantised)
        for work in layout_work.layers
    ]
    moving = 0.0
    for by_kind, work in zip(per_layer, layout_work.layers, strict=True):
        for kind, size in work.leaves if layout.offload == "activations" else ():
            by_kind[kind] = max(0.0, by_kind[kind] - size)
        moving = max(moving, sum(size for _, size in work.leaves))
    names = dict.fromkeys(name for by_kind in per_layer for name in by_kind)
    last = sum(size for _, size in layout_work.last.kept) if system.name == OURS else 0.0
    return KeptBytes(
        {name: tuple(by_kind.get(name, 0.0) for by_kind in per_layer) for name in names},
        tuple(work.deferred for work in layout_work.layers),
        _at_work(setting, layout, layout_work, plain, quantised),
        _loss_of(setting, layout, layout_work, last),
        moving if layout.offload == "activations" else 0.0,
        last,
    )


def activations(
    setting: CostInputs, layout: Layout, rank: int, kept_bytes: KeptBytes | None = None
) -> list[Term]:
    """Return the bytes that a pipeline rank saves for the backward, and those of the loss, as
    terms.

    These are the saved bytes of a microbatch times the microbatches in flight on this rank: 1F1B
    holds `pp - rank` (arXiv:2006.09503). `kept_bytes` is the layout's `kept_of`, if the caller has
    it.
    """
    held_layers = layers_of_ranks(setting, layout)[rank]
    kept_bytes = kept_bytes or kept_of(setting, layout)
    microbatches = layout.microbatches(setting.train.batch)
    average = held_layers.layers / max(layout.virtual_stages, 1)
    sizes = {
        kind: size
        for kind, per_kind in kept_bytes.saved.items()
        if (size := _average(held_layers, per_kind))
    }
    deferred = _average(held_layers, kept_bytes.deferred)
    flight, times = _held_together(layout, rank, microbatches, sizes, deferred)
    terms = [
        Term(
            _ACTIVATIONS[kind],
            size * average * flight,
            "{:,.0f} B x {:g} layers x {:g} in flight",
            (size, average, flight),
        )
        for kind, size in sizes.items()
    ]
    # The loss and the first layer of the backward follow each other: the larger one counts. But
    # blocks as large as scores stay with the allocator, of no use to logits.
    loss = [kept_bytes.loss] if held_layers.has_head else []
    if held_layers.has_head and layout.is_pipelined and SCHEDULES[layout.schedule].holds_all:
        # Other schedules take the backward of the last stage right after its forward.
        count, template = microbatches - 1, "{:,.0f} B x {} more in flight"
        size = kept_bytes.last * count
        terms.append(Term("activations: head", size, template, (kept_bytes.last, count)))
    found_terms = [kept_bytes.at_work, *loss] if kept_bytes.at_work.bytes else loss
    if kept_bytes.moving:
        template = "{:,.0f} B x 2 layers on their way"
        terms.append(
            Term("activations: moving", 2 * kept_bytes.moving, template, (kept_bytes.moving,))
        )
    if times:
        template, numbers = "{:,.0f} B x {:g} layers x {} that wait", (deferred, average, times)
        terms.append(Term("deferred gradients", deferred * average * times, template, numbers))
    if CAUSAL[setting.system.attention] and len(found_terms) > 1:
        found_terms = [max(found_terms, key=lambda term: term.bytes)]
    return with_measured(setting, terms + found_terms)


def least_activations(
    setting: CostInputs, held_layers: RankLayers, share: float, kept_bytes: KeptBytes
) -> float:
    """Return a lower bound of the bytes of `activations` on a rank with these layers.

    `share` is a lower bound of the microbatches in flight, over all its layers.
    """
    saved = sum(_average(held_layers, per_kind) for per_kind in kept_bytes.saved.values())
    ends = [kept_bytes.at_work.bytes, kept_bytes.loss.bytes * held_layers.has_head]
    at_once = max(ends) if CAUSAL[setting.system.attention] else sum(ends)
    at_once += 2 * kept_bytes.moving
    return setting.memory_factor * (saved * held_layers.layers * share + at_once)


def _held_together(
    layout: Layout, rank: int, microbatches: int, sizes: Mapping[str, float], deferred: float
) -> tuple[float, int]:
    """Return the activations in flight and the deferred weight gradients of a rank, each of one
    stage and microbatch, at the moment at which both together take most bytes.

    `sizes` are a layer's saved bytes by kind, `deferred` what its deferred gradients hold; the
    input gradients release the rest.
    """
    pipeline = layout.schedule, layout.pp, layout.virtual_stages
    is_split = layout.is_pipelined and SCHEDULES[layout.schedule].splits_backward
    # Of another system's microbatches there may be no table.
    if not is_split or microbatch_rule(*pipeline, microbatches) is not None:
        return in_flight(layout, rank, microbatches), 0
    of_flight = sum(sizes.values())
    return max(
        held_together(*pipeline, rank, microbatches),
        key=lambda pair: pair[0] * of_flight + pair[1] * deferred,
    )


def _loss_of(setting: CostInputs, layout: Layout, layout_work: LayoutWork, last: float) -> Term:
    """Return the bytes of logits and loss on a rank that has the head, with the `last` bytes that
    last norm and head saved."""
    if not setting.system.fuses_loss:
        return _loss(setting.system, layout_work, layout.tp, setting.calibration)
    sizes = layout_work.sizes
    rows = loss_rows(sizes.tokens, sizes.element, setting.target)
    is_capped = setting.model.logits_softcap is not None
    is_fused = fuses_loss(sizes.element, layout.tp, setting.target)
    size = rows * sizes.vocab
    element_bytes = loss_element(sizes.element, capped=is_capped, fused=is_fused)
    is_frozen = setting.model.lora is not None
    room = loss_workspace(sizes, rows, setting.target.products, is_frozen=is_frozen)
    template = "{:,} logits of {:,} tokens x {} B" + " + {:,} B for a matmul" * (room > 0)
    numbers = (size, rows, element_bytes, room)
    return Term("logits and loss", size * element_bytes + room + last, template, numbers)


def with_measured(setting: CostInputs, terms: list[Term]) -> list[Term]:
    """Return the terms with one more, the measured correction for this system on this machine.

    It is a share of everything except model states, which are exact.
    """
    factor = setting.memory_factor
    if factor == 1:
        return terms
    other_bytes = sum(term.bytes for term in terms if term.category not in STATES)
    template = "{:,.0f} B that are not model states x {:+.3f}, measured"
    return [
        *terms,
        Term("measured", (factor - 1) * other_bytes, template, (other_bytes, factor - 1)),
    ]


def _average(held_layers: RankLayers, per_kind: Sequence[float]) -> float:
    """Return the mean over a rank's layers of a number given for each kind of layer."""
    return (
        per_kind[0]
        if len(per_kind) == 1
        else held_layers.total(per_kind) / max(held_layers.layers, 1)
    )


def _at_work(
    setting: CostInputs,
    layout: Layout,
    layout_work: LayoutWork,
    plain: LayoutWork,
    quantised: float,
) -> Term:
    """Return the bytes of one layer during its backward, beside what it saved.

    For Meshwright's engine, by the rows of the walk. For other systems, what is recomputed, and
    scores that are not saved.
    """
    system, calibration = setting.system, setting.calibration
    category, size, template = "activations: layer at work", 0.0, ""
    numbers: tuple[object, ...] = ()
    if system.name == OURS:
        size = max(work.at_work for work in layout_work.layers)
        # A weight from four bits is as large for any number of sequences.
        is_fixed = setting.model.lora is not None and setting.model.lora.is_nf4
        size /= layout.microbatch if is_fixed else 1
        return Term(category, size, "one layer's backward: {:,.0f} B", (size,))
    if layout.recompute != "none":
        kept_bytes = calibration.find("kept_bytes", system.name)
        sizes = plain.sizes
        size = max(
            sum(
                kept_per_layer(
                    _NOTHING_AGAIN, system, sizes, work, kept_bytes, quantised, recomputed=True
                ).values()
            )
            for work in plain.layers
        )
        template, numbers = "one layer anew: {:,.0f} B ", (size,)
    if not CAUSAL[system.attention]:
        count = max(work.scores for work in layout_work.layers)
        score_bytes = calibration.find("score_bytes", system.name)
        size += count * score_bytes
        template += "{:,} scores x {:g} B, measured"
        numbers = (*numbers, count, score_bytes)
    return Term(category, size, template, numbers)


def kept_per_layer(
    layout: Layout,
    system: System,
    sizes: Sizes,
    work: Work,
    kept_bytes: float,
    quantised: float = 1.0,
    *,
    recomputed: bool = False,
) -> dict[str, float]:
    """Return the bytes that a layer saves of one microbatch, by kind of operation.

    `kept_bytes` is the measured factor of further copies in unfused kernels. `quantised` is the
    remaining share of matmul inputs that are saved in few bits. `recomputed` asks for a recomputed
    layer during its backward, with a `layout` that recomputes nothing. Includes what the kernels of
    other systems save more or less than the program's.
    """
    saved = dict(work.kept)
    if layout.recompute == "full" or (
        layout.recompute == "selective" and system.selective == "blocks"
    ):
        return saved
    # Gathered anew in the backward, arXiv:2205.05198, section 4.2.2; our program has it already
    # where nothing is recomputed.
    gathered = 2 * (sizes.whole_bytes - sizes.stream_bytes)
    if layout.recompute != "none" and system.selective != "modules":
        saved["product"] -= gathered * (system.gathers_again == "always")
    elif system.gathers_again == "never" or (recomputed and system.gathers_again != "always"):
        saved["product"] += gathered
    # Copies that unfused kernels widen and scale, dropout's masks: by system, measured.
    saved["copies"] = kept_bytes * sizes.tokens * sizes.dim
    is_gated = len(work.products) == _GATED_PRODUCTS
    if is_gated and "activation" in saved and not system.fused_activation:
        saved["activation"] *= 3 / 2  # ours is made again from the two products
    if not CAUSAL[system.attention]:
        # The softmax, dropout's mask and its result: arXiv:2205.05198, section 4.1.
        saved["scores"] = float(work.scores * (2 * sizes.element + 1))
    if layout.recompute == "selective":
        if system.selective == "attention":
            saved.pop("scores", None)
        elif system.selective == "modules":
            saved = kept_without(system.modules, sizes, work, saved)
        else:
            saved["product"] /= 2
    if "product" in saved:
        saved["product"] *= quantised
    return saved


def _loss(system: System, layout_work: LayoutWork, tp: int, calibration: Calibration) -> Term:
    """Return the bytes of logits, softmax and gradients at the loss, for a system that does not
    fuse it.

    Bytes per logit are measured: they depend on how many copies a system makes in which dtype.
    """
    sizes = layout_work.sizes
    count = sizes.tokens * sizes.vocab * (1 if system.splits_loss else tp)
    size, gathered = calibration.find("loss_bytes", system.name), ""
    count = -(-count // system.loss_chunks)
    if not system.splits_loss and tp > 1:
        size += calibration.find("gathered_loss_bytes", system.name)
        gathered = ", gathered over tp"
    return Term(
        "logits and loss",
        count * size,
        "{:,} logits x {:g} B" + gathered + ", measured",
        (count, size),
    )


def outside(
    device: Device, layout: Layout, system: System, calibration: Calibration, allocated: float
) -> list[Term]:
    """Return the bytes outside of the program as measured: CUDA context, communicators, allocator
    overhead.

    `allocated` are the bytes of tensors.
    """
    kinds = (system.name, device.kind)
    context = calibration.find("context_bytes", *kinds)
    axes = sum(n > 1 for n in (layout.pp, layout.dp, layout.cp, layout.tp))
    per_axis = calibration.find("communicator_bytes", *kinds)
    reserve = calibration.find("reserve", *kinds)
    return [
        Term("context", context, "CUDA context and kernels, measured"),
        Term("communicators", per_axis * axes, "{:,.0f} B x {} axes, measured", (per_axis, axes)),
        Term("allocator", reserve * allocated, "{:.1%} of what is allocated, measured", (reserve,)),
    ]
