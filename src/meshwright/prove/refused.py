"""Layouts that must be refused: each breaks one rule, and has the message that is expected."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from meshwright.layout import Layout, broken, nearest_legal
from meshwright.prove.case import Case
from meshwright.spec.lora import Lora
from meshwright.spec.resolve import model_spec
from meshwright.spec.training import TrainSpec


class Refusal(NamedTuple):
    """The result of checking a layout that must be refused: the rule it broke (None if legal), and
    the nearest legal layouts.
    """

    case: Case
    rule: str | None
    nearest: tuple[str, ...]

    @property
    def passed(self) -> bool:
        """Whether it broke the rule that it was expected to break."""
        return self.rule == self.case.refused


def refuse(case: Case) -> Refusal:
    """Check a case that must be refused against the layout rules."""
    specs = case.model, case.train, case.layout
    return Refusal(case, broken(*specs), tuple(nearest_legal(*specs)))


def refused(world: int) -> Iterator[Case]:
    """Yield a case for each layout rule, on `world` ranks (2, 4 or 8)."""
    yield from _tensor(world)
    yield from _pipeline(world)
    yield from _data(world)
    yield from _experts(world)
    yield from _context(world)
    yield _case(
        f"layout.tp = {world} cuts linear layers, which train.fp8 = true needs whole",
        f"tp{world} mb1",
        {"precision": "bf16", "fp8": True},
    )
    yield _case(
        "layout.zero = 3 cuts frozen weights, which four bits keep whole (lora.base = nf4)",
        f"shard{world} zero3 mb1",
        lora=Lora(rank=4, alpha=4.0, base="nf4"),
    )
    yield _case(
        "train.master = none requires train.precision = bf16, but it is fp32",
        f"dp{world} mb1",
        {"master": "none"},
    )
    yield _case(
        "train.async_tp = true is for sequence parallelism: layout.sp = true, layout.tp above 1",
        f"tp{world} mb1",
        {"async_tp": True},
    )


def _case(
    rule: str,
    layout: str,
    train: dict[str, Any] | None = None,
    lora: Lora | None = None,
    **model: Any,
) -> Case:
    sizes = {"dim": 64, "n_layers": 4, "n_heads": 16, "n_kv_heads": 8, "head_dim": 8}
    spec = model_spec(**{**sizes, "ffn_dim": 128, "vocab_size": 128, **model})
    spec = spec.model_copy(update={"lora": lora})
    sized = TrainSpec(**{"batch": 16, "seq_len": 32, **(train or {})})
    return Case(spec, sized, Layout.parse(layout), refused=rule)


def _tensor(world: int) -> Iterator[Case]:
    """Yield cases that break the rules of tensor and sequence parallelism."""
    label = f"tp{world} mb1"
    rule = f"layout.tp = {world} must divide model."
    heads = world + 1
    yield _case(f"{rule}n_heads = {heads}", label, n_heads=heads, n_kv_heads=heads)
    yield _case(f"{rule}n_kv_heads = {world // 2}", label, n_kv_heads=world // 2)
    yield _case(f"{rule}ffn_dim = 129", label, ffn_dim=129)
    for key in ("expert_ffn_dim", "shared_ffn_dim"):
        mixture: dict[str, Any] = {"family": "qwen2_moe", "experts": 4, "top_k": 2, key: 129}
        yield _case(f"{rule}{key} = 129", label, **mixture)
    seq_len = 3 * world + 1
    yield _case(
        f"train.seq_len / layout.cp = {seq_len} must be a multiple of layout.tp = {world} "
        f"(layout.sp = true)",
        f"tp{world} sp mb1",
        {"seq_len": seq_len},
    )


def _pipeline(world: int) -> Iterator[Case]:
    """Yield cases that break the rules of pipelines and their schedules."""
    yield _case(
        f"layout.pp = {world} x layout.virtual_stages = 4 gives {4 * world} stages, more than "
        f"model.n_layers = 4, the embedding and the head",
        f"pp{world} interleaved_1f1b v4 mb1",
    )
    yield _case(
        "layout.virtual_stages = 2 needs a pipeline, but layout.pp = 1",
        f"dp{world} v2 interleaved_1f1b mb1",
    )
    for name, needs, stages in (
        ("interleaved_1f1b", "at least 2 virtual stages", 1),
        ("zbv", "exactly 2 virtual stages", 1),
        ("1f1b", "exactly 1 virtual stage", 2),
    ):
        yield _case(
            f"schedule {name} needs {needs} on each of the {world} ranks of the pipeline, but "
            f"layout.virtual_stages = {stages}",
            f"pp{world} {name} v{stages} mb1",
            n_layers=2 * world,
        )
    for name, stages in (("1f1b", world), ("dualpipev", 2 * world)):
        yield _case(
            f"schedule {name} needs at least as many microbatches as the pipeline has stages: "
            f"1 microbatch, {stages} stages",
            f"pp{world} {name} v{stages // world} mb16",
            n_layers=2 * world,
        )
    many = 2 * world + 1
    for name in ("interleaved_1f1b", "interleaved_zero_bubble"):
        yield _case(
            f"schedule {name} runs {many} microbatches on {world} ranks in 2 rounds, and 2 must "
            f"divide {many}",
            f"pp{world} {name} v2 mb1",
            {"batch": many},
            n_layers=2 * world,
        )


def _experts(world: int) -> Iterator[Case]:
    """Yield cases that break the rules of expert parallelism."""
    mixture: dict[str, Any] = {"family": "qwen3_moe", "experts": 4 * world, "top_k": 2}
    rule = f"layout.ep = {world} divides experts over ranks, but model.experts = 0"
    yield _case(rule, f"dp{world} ep{world} mb1")
    odd = {**mixture, "experts": world + 1}
    rule = f"layout.ep = {world} must divide model.experts = {world + 1}"
    yield _case(rule, f"dp{world} ep{world} mb1", **odd)
    yield _case(
        f"layout.ep = {2 * world} must divide the dp_replicate x cp ranks with the same weights "
        f"= {world}",
        f"dp{world} ep{2 * world} mb1",
        **mixture,
    )
    for rule, label in (
        (f"etp = 3 must be 1 or layout.tp = {world}", f"sp ep{world} etp3"),
        ("etp = 1 requires layout.sp = true", f"ep{world} etp1"),
        (f"ep = 1 must be a multiple of layout.tp = {world} (layout.etp = 1)", "sp etp1"),
        (
            f"ep = {2 * world} must divide the dp_replicate x cp x tp ranks of a stage = {world}",
            f"sp ep{2 * world} etp1",
        ),
    ):
        yield _case(f"layout.{rule}", f"tp{world} {label} mb1", **mixture)


def _data(world: int) -> Iterator[Case]:
    """Yield cases that break the rules of data parallelism, ZeRO and offload."""
    batch = 2 * world + 1
    yield _case(
        f"train.batch = {batch} must be a multiple of the data-parallel degree {world} "
        f"(dp_replicate {world} x dp_shard 1)",
        f"dp{world} mb1",
        {"batch": batch},
    )
    yield _case(
        "layout.microbatch = 3 must divide train.batch per data rank = 4",
        f"dp{world} mb3",
        {"batch": 4 * world},
    )
    yield _case(
        f"layout.dp_shard = {world} requires layout.zero = 1, 2 or 3, but it is 0",
        f"shard{world} mb1",
    )
    yield _case(
        "train.router_aux_loss = 0.5 is of models with experts, but model.experts = 0",
        f"dp{world} mb1",
        {"router_aux_loss": 0.5},
    )
    yield _case(
        "layout.offload = params requires layout.zero = 1, 2 or 3, but it is 0",
        f"dp{world} mb1 offload-params",
    )
    yield _case(
        "layout.offload = activations leaves those of two layers on the device, but "
        "model.n_layers = 2",
        f"dp{world} mb1 offload-activations",
        n_layers=2,
    )


def _context(world: int) -> Iterator[Case]:
    """Yield cases that break the rules of context parallelism."""
    yield _case(
        f"train.seq_len = {3 * world} must be a multiple of {2 * world} = 2 x layout.cp "
        f"(layout.cp_kind = ring gives each rank two chunks)",
        f"cp{world}-ring mb1",
        {"seq_len": 3 * world},
    )
    yield _case(
        f"train.seq_len = {3 * world + 1} must be a multiple of layout.cp = {world}",
        f"cp{world}-ulysses mb1",
        {"seq_len": 3 * world + 1},
    )
    yield _case(
        f"layout.tp = 1 x layout.cp = {world} gives {world}, which must divide "
        f"model.n_kv_heads = {world // 2} (layout.cp_kind = ulysses)",
        f"cp{world}-ulysses mb1",
        n_kv_heads=world // 2,
    )
