"""FSDP2, which GPUs take for ZeRO: proven on gloo, its units, what they gather ahead, its peak."""

from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest
from torch.distributed.fsdp import FSDPModule

from conformance_cases import make
from meshwright.bench.memory_breakdown import measure
from meshwright.comm.groups import open_groups
from meshwright.comm.wire import Wire
from meshwright.cost.timeline import timeline
from meshwright.layout import Layout
from meshwright.parallel.build import build, describe, seeded
from meshwright.parallel.data_parallel.sharded import _state
from meshwright.parallel.tensor_parallel.deferred import Deferral
from meshwright.program.collectives import collectives
from meshwright.program.lower import lower
from meshwright.program.target import Target
from meshwright.prove.batches import make_batch
from meshwright.prove.case import Case
from meshwright.prove.compare import mine, program_of
from meshwright.prove.conformance import prove_conformance
from meshwright.prove.suite import Suite
from meshwright.spec.parts import parts
from meshwright.spec.resolve import model_spec
from meshwright.spec.training import OptimizerSpec, TrainSpec
from ranks import on_ranks


def by_fsdp2(label, *kind):
    """A case in which FSDP2 shards on CPUs, too."""
    return replace(make(label, *kind), fsdp2=True)


CASES = [by_fsdp2("shard2 zero3 mb2")]
SLOW = [
    by_fsdp2("shard2 zero3 mb1", "tied", "bf16"),
    by_fsdp2("shard2 zero1 mb2 recompute-selective", "biased", "bf16"),
    by_fsdp2("zero3 pp2 1f1b mb1", "tied", "bf16"),
    by_fsdp2("zero3 tp2 sp mb2 recompute-selective", "llama", "bf16"),
    by_fsdp2("zero3 pp2 interleaved_zero_bubble v2 mb1", "biased"),
    by_fsdp2("shard2 zero2 ep2 tp2 sp mb2", "qwen2_moe"),
]


def proven(world, case):
    return Suite(world).prove(case)


@pytest.mark.parametrize(
    "case",
    [*CASES, *(pytest.param(case, marks=pytest.mark.slow) for case in SLOW)],
    ids=lambda c: c.label,
)
def test_fsdp2_computes_and_sends_what_the_program_says(case):
    for verdicts in on_ranks(case.layout.world, proven, case=case):
        assert [verdict for verdict in verdicts if not verdict.passed] == []
        assert "collectives" in [verdict.claim for verdict in verdicts]


@pytest.mark.parametrize("is_tied", [False, True])
def test_an_end_is_gathered_for_the_pass_that_uses_it_alone(is_tied):
    model = model_spec(dim=64, n_layers=2, n_heads=2, vocab_size=256, tie_embeddings=is_tied)
    train = TrainSpec(batch=4, seq_len=32)
    program = lower(model, train, OptimizerSpec(), Layout.parse("shard2 zero3 mb1"), Target("gpu"))
    sizes = {part.name: part.numel * 4 for part in parts(model)}
    gathered = {"forward": 0, "backward": 0}
    for one in collectives(program, 0):
        if one.kind == "all_gather" and one.phase in gathered:
            gathered[one.phase] += one.bytes * one.count
    every = sum(sizes.values())
    times = program.microbatches
    embed, head = (0, 0) if is_tied else (sizes["embed.weight"], sizes["head.weight"])
    assert gathered["forward"] == times * (every - head)
    assert gathered["backward"] == times * (every - embed)


def chain_of(world, label, model):
    """The units that each gathers ahead in forwards and in backwards, by name."""
    program = program_of(by_fsdp2(label, model), world)
    (stage,) = describe(program, open_groups(program.layout, world), Deferral()).values()
    names = {id(_state(module)): name for name, module in stage.named_modules() if _is_unit(module)}
    found = {}
    for name, module in stage.named_modules():
        if _is_unit(module):
            state = _state(module)
            ahead = state._states_to_forward_prefetch, state._states_to_backward_prefetch
            found[name] = [[names[id(one)] for one in some] for some in ahead]
    return found


def _is_unit(module):
    return isinstance(module, FSDPModule)


@pytest.mark.parametrize("model", ["llama", "tied"])
def test_units_gather_ahead_both_ways(model):
    (found, _) = on_ranks(2, chain_of, label="shard2 zero3 mb2", model=model)
    layers = [f"layers.{layer}" for layer in range(4)]
    embed, head = ([], []) if model == "tied" else (["embed"], ["head"])
    forward, backward = ["", *embed, *layers], ["", *reversed(layers)]
    assert set(found) == {*forward, *head}
    for unit, after in pairwise(forward):
        assert found[unit][0] == [after]
    assert found[forward[-1]][0] == []
    for unit, after in pairwise(backward):
        assert found[unit][1] == ([*head, after] if unit == "" else [after])
    # By itself torch would take what it thinks comes next: gathering themselves is nothing.
    for unit in (*embed, backward[-1]):
        assert found[unit][1] == [unit]


def gathers_of_evaluation(world, case):
    """The bytes of gathers while held-out rows are scored, and the losses before and after."""
    program = program_of(case, world)
    groups = open_groups(program.layout, world)
    parallel = build(program, groups, world.device, seeded(case.model, 0))
    batch = mine(make_batch(case, 0), program, world)
    losses = [parallel.evaluate([batch])[0]]
    parallel.backward(batch)
    with Wire(groups) as wire:
        losses.append(parallel.evaluate([batch])[0])
    shards = [held.shard.shape for held in parallel.held]
    return losses, Counter({m.bytes: n for m, n in wire.messages.items()}), shards


def test_an_evaluation_gathers_the_head_once_and_leaves_shards():
    case = by_fsdp2("shard2 zero3 mb2")
    size = 4 * case.model.vocab_size * case.model.dim
    for (before, after), messages, shards in on_ranks(2, gathers_of_evaluation, case=case):
        assert before == after > 0
        # The embedding, which is as large, for each microbatch.
        assert messages[size] == 1 + case.train.batch // 2 // 2
        assert (case.model.vocab_size // 2, case.model.dim) in shards


def peak(world, case):
    program = program_of(case, world)
    return measure(world, case).peak.total, timeline(program, world.rank).peak.total


WIDE = model_spec(
    dim=64, n_layers=4, n_heads=2, n_kv_heads=2, ffn_dim=128, vocab_size=4096, context=32
)


@pytest.mark.slow
@pytest.mark.parametrize("label", ["shard2 zero3 mb1", "shard2 zero2 mb1"])
def test_the_peak_is_that_of_its_units(label):
    case = Case(WIDE, TrainSpec(batch=4, seq_len=32), Layout.parse(label), fsdp2=True)
    for measured, predicted in on_ranks(2, peak, case=case):
        assert predicted == pytest.approx(measured, rel=0.01)


def conforming(world, case):
    return prove_conformance(case, open_groups(case.layout, world), world)


@pytest.mark.often(1)
@pytest.mark.parametrize(
    "label",
    [
        "shard2 zero2 ep2 mb2 recompute-full",
        "shard2 zero2 ep2 mb2 recompute-selective",
        "shard2 zero3 ep2 mb2 recompute-selective offload-params",
    ],
)
def test_a_second_forward_gathers_no_block_again(label):
    """Dropout follows the experts, so that it ends after them; docs/records/log.md.

    Selective recomputation refuses operations that the first forward lacked.
    """
    case = make(label, "qwen2_moe")
    case = replace(case, model=case.model.model_copy(update={"dropout": 0.1}), fsdp2=True)
    failed = [one.observed for one in on_ranks(2, conforming, case=case)[0] if not one.passed]
    assert failed == []
