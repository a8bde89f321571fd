"""`matrix`: the table of layouts that are proven, and of those that must be refused. No torch.

`prove --matrix`, the tests and the support matrix in the docs use it. It has all meshes of a number
of ranks (degrees that are powers of 2), each with some of the possible choices. Other properties
(model, precision, offload, ...) are assigned in turn: the numbers of their values have no common
divisor, so that over the table each value is combined with every other.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import count, product
from random import Random
from typing import Any, Final, TypeVar

from meshwright.errors import ConfigError, refusal
from meshwright.layout import AXES, Layout, broken
from meshwright.layout.schedules import SCHEDULES
from meshwright.prove.case import ADAMW, GROUPED, SGD, Case
from meshwright.prove.kinds import ADAPTED_KINDS, EXPERT_KINDS, KINDS, NEWER_KINDS, Kind
from meshwright.prove.refused import refused
from meshwright.spec.families import FAMILIES
from meshwright.spec.model import ModelSpec
from meshwright.spec.resolve import model_spec
from meshwright.spec.training import Offload, OptimizerSpec, Precision, Recompute, TrainSpec

T = TypeVar("T")

WORLDS: Final = (2, 4, 8, 16)
# Layers of a model, but for a pipeline of 8 ranks with 2 stages each.
MOST_LAYERS: Final = 8
# Layouts of a mesh with several axes and no pipeline; with one it is a layout for each schedule.
PER_MESH: Final = 4
# How often the layouts of a table are dealt, each time with other kinds, sizes and recomputation:
# a layout of 8 ranks takes the time of several of 2 or 4, which have few meshes.
_ROUNDS: Final = {2: 2, 4: 2, 8: 1, 16: 2}


_RECOMPUTES: Final[tuple[Recompute, ...]] = ("none", "full", "selective")
_PRECISIONS: Final[tuple[Precision, ...]] = (
    *("fp32", "fp32", "bf16", "fp32", "fp32", "fp16"),
    *("fp32", "fp32", "bf16", "fp32", "fp32"),
)
_OFFLOADS: Final[tuple[Offload, ...]] = (
    *("none", "none", "optimizer", "none", "params", "none", "activations"),
    *("none", "optimizer", "params", "none", "params", "activations"),
)
_OPTIMIZERS: Final = (ADAMW, GROUPED, ADAMW, SGD)
# Microbatches of 640 tokens, three of them: the head takes a part of them at a time.
_LONG: Final = {
    2: "tp2 mb5",
    4: "dp2 tp2 sp mb5",
    8: "dp2 tp2 pp2 1f1b mb5",
    16: "dp2 shard2 zero2 tp2 sp pp2 1f1b mb5",
}
# With an embedding of 8.5 MiB: the rows of one rank travel in several messages.
_BIG: Final = {
    2: "shard2 zero2 mb1",
    4: "dp2 shard2 zero3 mb1",
    8: "dp4 shard2 zero1 mb1",
    16: "dp8 shard2 zero2 mb1",
}
_BIG_VOCAB: Final = 34768
# Sequences of a batch: more ranks need more microbatches, and each costs time.
_BATCHES: Final = {2: (4, 8), 4: (4, 8), 8: (8, 16), 16: (8, 16)}
# How many layouts of each table are also dealt to models with experts.
_OF_EXPERTS: Final = {2: 28, 4: 42, 8: 42, 16: 7}
# How many of them share out the experts, at least: where they are fewer, more layouts are dealt.
_SHARED_OUT: Final = {2: 0, 4: 45, 8: 50, 16: 0}
# And to models of which adapters are trained: of few, since test_lora.py has more of their layouts.
_OF_ADAPTERS: Final = {2: 12, 4: 18, 8: 0, 16: 0}
# Layouts that each newer family is proven in, by itself and combined.
_OF_NEWER: Final = {
    2: ("dp2 mb1", "tp2 sp mb1", "pp2 1f1b mb1", "cp2-ring mb1", "shard2 zero3 mb1"),
    4: ("dp2 tp2 mb1", "shard2 zero3 pp2 1f1b mb1", "cp2-ulysses tp2 sp mb1"),
    8: ("dp2 tp2 sp pp2 1f1b mb1",),
    16: (),
}
# And how many with ZeRO to FSDP2, which GPUs take for it: the others sum by themselves on CPUs.
_OF_FSDP2: Final = {2: 12, 4: 14, 8: 0, 16: 0}
# Each way to shard weights, by our own ZeRO and by FSDP2; those of `ep` have models with experts.
_SHARDED: Final = {
    2: (
        "dp2 mb2",
        "shard2 zero1 mb2",
        "shard2 zero2 mb2",
        "shard2 zero3 mb2",
        "tp2 sp mb2",
        "pp2 1f1b mb2",
        "shard2 zero2 ep2 mb2",
        "shard2 zero1 mb2 offload-optimizer",
    ),
    4: (
        "dp2 shard2 zero3 mb1",
        "shard2 zero2 tp2 sp mb1",
        "shard2 zero1 pp2 1f1b mb1",
        "shard2 zero3 ep2 tp2 sp mb1",
        "shard4 zero3 mb1 offload-params",
    ),
    8: (),
    16: (),
}
_SHARDED_BY_FSDP2: Final = {
    2: ("shard2 zero3 mb2",),
    4: ("dp2 shard2 zero3 mb1",),
    8: (),
    16: (),
}
_MUON: Final = OptimizerSpec(name="muon", ns_precision="fp32", warmup_steps=2)
_NO_MASTERS: Final = TrainSpec(batch=8, seq_len=32, precision="bf16", master="none")
_MASTERS: Final = TrainSpec(batch=8, seq_len=32)
# Each optimizer, and each dtype of what it keeps, in all of them. AdamW and SGD in fp32 are what
# the rest of the table is trained by. Lion is not among them: it takes the sign of sums that may be
# zero but for rounding (docs/decisions/0135).
_OPTIMIZED: Final = (
    (_MUON, _MASTERS),
    (ADAMW.model_copy(update={"state_dtype": "bf16"}), _MASTERS),
    (ADAMW.model_copy(update={"state_dtype": "int8"}), _MASTERS),
    (ADAMW.model_copy(update={"state_dtype": "bf16", "rounding": "stochastic"}), _MASTERS),
    (ADAMW, _NO_MASTERS),
    (ADAMW.model_copy(update={"state_dtype": "bf16", "rounding": "stochastic"}), _NO_MASTERS),
    (ADAMW.model_copy(update={"state_dtype": "int8"}), _NO_MASTERS),
    (_MUON, _NO_MASTERS),
)
# They have the first so many kinds, as an update depends on shapes alone. Odd and tied ones are
# among them.
_PLAIN: Final = 7
# Layouts of their own fame, which must stay in whatever the spread picks.
_NAMED: Final = {
    2: ("dp2 mb2",),
    4: ("dp2 tp2 sp mb2", "pp2 1f1b tp2 mb2"),
    8: (
        "shard2 zero2 tp2 pp2 1f1b mb2",  # DP2 x PP2 x TP2 with ZeRO-2
        "dp2 tp2 pp2 1f1b mb2",
        "tp2 pp4 1f1b mb2",  # GPT-3's DP x PP4 x TP2, with one data rank left
        "cp2-ring tp2 sp pp2 1f1b mb2",
        "dp2 shard2 zero3 tp2 sp mb2",  # HSDP 2 x 2 under TP2
    ),
    16: ("dp2 cp2-ring tp2 sp pp2 1f1b mb2",),
}


@functools.cache
def matrix(world: int) -> tuple[Case, ...]:
    """Return the table for `world` ranks: distinct legal layouts with their models, then the
    refused ones.

    16 ranks have only layouts with four axes at once, and no refused ones. Raises `ConfigError` if
    there is no table for so many ranks.
    """
    if world not in WORLDS:
        raise ConfigError(refusal(f"there is no table for {world} ranks", legal=WORLDS))
    cases = {case.layout: case for case in _large(world)}
    for turn, layout in enumerate(map(Layout.parse, _NAMED[world])):
        cases[layout] = _case(layout, TrainSpec(batch=16, seq_len=32), turn, KINDS)
    turns = count(25 * world)  # each table deals from another place, so that more of them meet
    for round_number in range(_ROUNDS[world]):
        for layout in _layouts(world, round_number):
            case = _dealt(layout, next(turns), KINDS)
            if case is not None:
                cases.setdefault(case.layout, case)
    of_experts = _of(EXPERT_KINDS, world, _OF_EXPERTS[world], _SHARED_OUT[world])
    of_adapters = _of(ADAPTED_KINDS, world, _OF_ADAPTERS[world])
    special = (*of_experts, *of_adapters, *_of_fsdp2(world), *_of_newer(world))
    special += tuple(_of_optimizers(world))
    return (*cases.values(), *special, *(refused(world) if world < 16 else ()))


def _of(kinds: Sequence[Kind], world: int, number: int, sharing: int = 0) -> Iterator[Case]:
    """Yield at least `number` cases with models of these kinds, and more until `sharing` of them
    have expert parallelism.
    """
    turns = count(25 * world)
    layouts = [
        layout for round_number in range(_ROUNDS[world]) for layout in _layouts(world, round_number)
    ]
    cases: dict[Layout, Case] = {}
    for layout in _spread(layouts, len(layouts)):
        if len(cases) >= number and sum(layout.ep > 1 for layout in cases) >= sharing:
            break
        case = _dealt(layout, next(turns), kinds)
        if case is not None and (len(cases) < number or case.layout.ep > 1):
            cases.setdefault(case.layout, case)
    yield from cases.values()


def _of_newer(world: int) -> Iterator[Case]:
    """Yield a case for each newer family in each of the layouts that all newer families are proven
    in.
    """
    turns = count()
    for place, layout in product(range(len(NEWER_KINDS)), map(Layout.parse, _OF_NEWER[world])):
        case = _dealt(layout, next(turns), NEWER_KINDS[place : place + 1])
        if case is not None:
            yield case


def _of_optimizers(world: int) -> Iterator[Case]:
    """Yield a case for each optimizer and each dtype of what it keeps in each way to shard."""
    ways = [(label, False) for label in _SHARDED[world]]
    ways += [(label, True) for label in _SHARDED_BY_FSDP2[world]]
    for turn, ((spec, train), (label, fsdp2)) in enumerate(product(_OPTIMIZED, ways)):
        layout = Layout.parse(label)
        mixtures = [kind for kind in EXPERT_KINDS if kind.flags["experts"] % layout.ep == 0]
        case = _case(layout, train, turn, mixtures if layout.ep > 1 else KINDS[:_PLAIN])
        yield replace(case, layout=layout, optimizer=spec, fsdp2=fsdp2)


def _of_fsdp2(world: int) -> Iterator[Case]:
    """Yield the cases in which FSDP2 shards on CPUs; one in four has experts."""
    turns = count(25 * world + 1)
    layouts = [
        layout
        for round_number in range(_ROUNDS[world])
        for layout in _layouts(world, round_number)
        if layout.zero
    ]
    cases: dict[Layout, Case] = {}
    for layout in _spread(layouts, len(layouts)):
        if len(cases) == _OF_FSDP2[world]:
            break
        turn = next(turns)
        case = _dealt(layout, turn, KINDS if turn % 4 else EXPERT_KINDS)
        if case is not None and case.layout.offload != "params":  # which FSDP2 shards anyway
            cases.setdefault(case.layout, replace(case, fsdp2=True))
    yield from cases.values()


def _folded(layout: Layout, model: ModelSpec, turn: int) -> Layout:
    """Return two of three layouts with `etp = 1`, where legal: expert parallelism then includes the
    tp ranks.
    """
    if not layout.sp or turn % 3 == 2:
        return layout
    divisor = math.gcd(model.experts, layout.alike_ranks * layout.tp)
    legal = [ep for ep in (2, 4, 8) if divisor % ep == 0 and ep % layout.tp == 0]
    legal = [ep for ep in legal if layout.alike_ranks % (ep // layout.tp) == 0]
    if not legal:
        return layout
    return layout.model_copy(update={"ep": _turned(legal, turn), "etp": 1})


def _large(world: int) -> Iterator[Case]:
    """Yield one case with long sequences, whose head is computed in parts, and one with a large
    embedding, whose rows travel in several messages.
    """
    long, big = Layout.parse(_LONG[world]), Layout.parse(_BIG[world])
    train = TrainSpec(batch=3 * long.dp * long.microbatch, seq_len=128)
    yield _case(long, train, 0, KINDS)
    case = _case(big, TrainSpec(batch=3 * big.dp, seq_len=16), 2, KINDS)  # tied: one such tensor
    model = case.model.model_copy(update={"vocab_size": _BIG_VOCAB, "n_layers": 2})
    yield replace(case, model=model)


def drawn(cases: Sequence[Case], number: int, seed: int) -> list[Case]:
    """Return `number` of the cases in random order; the same ones for the same seed.

    Raises `ConfigError` if there are fewer cases, or if `number` is below 1.
    """
    if not 1 <= number <= len(cases):
        nearest = min(max(number, 1), len(cases))
        raise ConfigError(
            refusal(f"{number} layouts of a table of {len(cases)} cannot be drawn", legal=[nearest])
        )
    return Random(seed).sample(list(cases), number)


def _layouts(world: int, first: int) -> Iterator[Layout]:
    """Yield the table's layouts, without microbatch and offload, which `_dealt` assigns.

    `first` is where the assignment of recomputation policies begins.
    """
    turns = count(first)
    for mesh in _meshes(world):
        degrees = dict(zip(AXES, mesh, strict=True))
        choices: list[dict[str, Any]] = [
            {**degrees, "zero": zero, "sp": sp, "cp_kind": kind}
            for zero in _zeros(degrees)
            for sp in ((False, True) if degrees["tp"] > 1 else (False,))
            for kind in (("ring", "ulysses") if degrees["cp"] > 1 else ("ring",))
        ]
        if degrees["pp"] > 1:
            # Few meshes have a pipeline in a small world: each schedule is to meet each recompute.
            for _ in range(3 if world == 2 else 1):
                yield from _scheduled(choices, next(turns), world)
        else:
            is_alone = sum(degree > 1 for degree in mesh) == 1
            for choice in choices if is_alone else _spread(choices, PER_MESH):
                yield Layout(**choice, recompute=_turned(_RECOMPUTES, next(turns)))


def _meshes(world: int) -> Iterator[tuple[int, ...]]:
    """Yield the degrees of all meshes with `world` ranks, in the order of `AXES`."""
    powers = [2**exponent for exponent in range(world.bit_length())]
    for mesh in product(powers, repeat=len(AXES)):
        if math.prod(mesh) == world and (world < 16 or max(mesh) == 2):
            yield mesh


def _scheduled(choices: Sequence[dict[str, Any]], turn: int, world: int) -> Iterator[Layout]:
    """Yield a layout for each pipeline schedule; on 16 ranks for half of them."""
    for place, (name, traits) in enumerate(SCHEDULES.items()):
        if world == 16 and (place // 2 + turn) % 2:
            continue
        choice, recompute = _turned(choices, 5 * place + turn), _turned(_RECOMPUTES, place + turn)
        virtual = traits.min_virtual
        if traits.max_virtual is None and turn % 2 and choice["pp"] * (virtual + 1) <= MOST_LAYERS:
            virtual += 1
        pipeline: dict[str, Any] = {"schedule": name, "virtual_stages": virtual}
        yield Layout(**choice, **pipeline, recompute=recompute)


def _zeros(degrees: dict[str, int]) -> tuple[int, ...]:
    """Return the ZeRO stages to try: those that have something to shard, and 0 where it is
    legal.
    """
    if degrees["dp_shard"] > 1:
        return (1, 2, 3)
    return (0, 1, 2, 3) if degrees["cp"] > 1 else (0,)


def _turned(choices: Sequence[T], turn: int) -> T:
    return choices[turn % len(choices)]


def _spread(choices: Sequence[T], number: int) -> list[T]:
    """Return `number` of the choices, far apart in their order."""
    total = len(choices)
    step = next(s for s in count(round(0.618 * total)) if math.gcd(s, total) == 1)
    return [choices[turn * step % total] for turn in range(min(number, total))]


def _dealt(layout: Layout, turn: int, kinds: Sequence[Kind]) -> Case | None:
    """Return the case of a layout with the properties that number `turn` assigns; None if no batch
    makes it legal.
    """
    offload = _turned(_OFFLOADS, turn)
    if offload == "params" and not layout.zero:
        offload = "optimizer"
    seq_len = 64 if turn % 6 == 5 else 32
    cases = []
    for batch, microbatch in product(_BATCHES[layout.world], (1, 2, 4)):
        update = {"microbatch": microbatch, "offload": offload}
        precision = _turned(_PRECISIONS, turn)
        train = TrainSpec(batch=batch, seq_len=seq_len, precision=precision)
        case = _case(layout.model_copy(update=update), train, turn, kinds)
        if broken(case.model, case.train, case.layout) is None:
            cases.append(case)
    # One microbatch alone adds up nothing.
    several = [case for case in cases if case.layout.microbatches(case.train.batch) > 1]
    return _turned(several or cases, turn) if cases else None


def _case(layout: Layout, train: TrainSpec, turn: int, kinds: Sequence[Kind]) -> Case:
    """Return the case of a layout with a small model of a kind, chosen by `turn`, that the layout
    divides.
    """
    kind = _turned(kinds, turn)
    layers = max(4, layout.stages)
    if layout.is_pipelined and layers < MOST_LAYERS:
        layers += turn % 2  # stages of different sizes
    if layout.stages >= MOST_LAYERS and turn % 3 == 0:
        layers = layout.stages - 1 - turn % 2  # the head has its own stage, and the embedding
    ranks_of_heads = layout.tp * (layout.cp if layout.cp_kind == "ulysses" else 1)
    kv_heads = 4 if ranks_of_heads <= 4 else 8
    model = model_spec(
        family=kind.family,
        n_layers=layers,
        n_heads=2 * kv_heads if FAMILIES[kind.family].grouped else kv_heads,
        n_kv_heads=kv_heads,
        **{"head_dim": 8, "dim": 64, "ffn_dim": 128, "vocab_size": 128, **kind.flags},
    )
    model = model.model_copy(update={"lora": kind.lora})
    optimizer, train = _turned(_OPTIMIZERS, turn), train.model_copy(update=dict(kind.asked))
    if model.experts:
        divisor = math.gcd(model.experts, layout.alike_ranks)
        legal = [ep for ep in (2, 4, 8) if divisor % ep == 0]
        layout = layout.model_copy(update={"ep": _turned((*legal, *legal, 1), turn)})
        layout = _folded(layout, model, turn)
    return Case(model, train, layout, packed=kind.packed, optimizer=optimizer)
