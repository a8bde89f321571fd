"""Frozen weights in four bits: numbers, parity, memory, checkpoints, what is refused."""

import json
from dataclasses import replace
from pathlib import Path
from statistics import NormalDist

import pytest
import torch
from benchmarks.fine_tuning import tables

from meshwright.bench.memory_breakdown import measure
from meshwright.comm.groups import open_groups
from meshwright.cost.timeline import timeline
from meshwright.errors import ConfigError
from meshwright.layout import Layout, broken, nearest_legal
from meshwright.models.nf4 import LEVELS, dequantise, quantise
from meshwright.parallel.apply import Parallel
from meshwright.parallel.build import build, fill, seeded
from meshwright.program.lower import lower
from meshwright.prove.case import Case
from meshwright.prove.compare import program_of
from meshwright.prove.conformance import prove_conformance
from meshwright.prove.locate import locate
from meshwright.prove.nf4_reference import in_nf4
from meshwright.prove.parity import check, prove_parity
from meshwright.prove.shrink import shrink
from meshwright.simulate.simulation import simulate
from meshwright.spec.dump import to_toml
from meshwright.spec.loading import load_config
from meshwright.spec.lora import NF4_PIECE, Lora
from meshwright.spec.parts import parts
from meshwright.spec.resolve import model_spec
from meshwright.spec.training import OptimizerSpec, TrainSpec
from ranks import on_ranks

SMALL = {"dim": 64, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "head_dim": 32}
SMALL |= {"vocab_size": 96, "ffn_dim": 128}
TRAIN = TrainSpec(batch=8, seq_len=16, seed=3)


def model(family="llama", targets=("all-linear",), dropout=0.0, base="nf4", **sizes):
    """A small model with adapters, whose other linear layers are in four bits."""
    lora = Lora(rank=4, alpha=6.0, targets=targets, dropout=dropout, base=base)
    return model_spec(**{**SMALL, "family": family, **sizes}).model_copy(update={"lora": lora})


def case_of(label, precision="fp32", **more):
    train = TRAIN.model_copy(update={"precision": precision})
    return Case(model(**more), train, Layout.parse(label))


def proven(world, case):
    groups = open_groups(case.layout, world)
    return (*prove_parity(case, groups, world), *prove_conformance(case, groups, world))


# The numbers.


def test_levels_are_the_quantiles_of_the_paper():
    """QLoRA, arXiv:2305.14314, appendix E, as bitsandbytes makes them."""
    offset, normal = 0.9677083, NormalDist()
    above = [normal.inv_cdf(offset + (0.5 - offset) * i / 8) for i in range(8)]
    below = [-normal.inv_cdf(offset + (0.5 - offset) * i / 7) for i in range(7)]
    made = [one / max(above) for one in sorted([*above, 0.0, *below])]
    assert list(LEVELS) == pytest.approx(made, abs=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_four_bits_are_the_nearest_levels_and_are_found_again(dtype):
    torch.manual_seed(0)
    weight = torch.randn(70, 192).to(dtype)
    weight[3, :64] = 0
    packed = quantise(weight)
    assert packed.dtype == torch.uint8
    assert packed.shape == (70, 108)  # 4.5 bits each
    made = dequantise(packed, dtype)
    torch.testing.assert_close(made, in_nf4(weight), rtol=0, atol=0)
    assert torch.equal(quantise(made), packed)
    # Outputs, and inputs in whole blocks, are quantised apart: as ranks of tp have them.
    assert torch.equal(quantise(weight[35:]), packed[35:])
    assert torch.equal(dequantise(quantise(weight[:, 64:]), dtype), made[:, 64:])


def test_more_rows_than_are_dequantised_at_once():
    rows = NF4_PIECE // 64 + 3
    packed = quantise(torch.randn(rows, 64, generator=torch.Generator().manual_seed(1)))
    some = [dequantise(packed[at : at + 1], torch.float32) for at in (0, rows - 1)]
    assert torch.equal(dequantise(packed, torch.float32)[[0, -1]], torch.cat(some))


# Parity.

MIXTURE = {"family": "mixtral", "experts": 4, "top_k": 2}

DROPS, FOUR = {"dropout": 0.2}, {"n_layers": 4}
CASES = [
    case_of("dp2", targets=("up_proj",)),
    case_of("dp1 mb4 recompute-full", "bf16"),
    case_of("dp1 recompute-full", targets=("q_proj",)),
    case_of("shard2 zero1", "bf16"),
    case_of("shard2 zero2", **DROPS),
    case_of("shard2 zero1 offload-optimizer", "fp16"),
    case_of("tp2", "bf16", targets=("q_proj", "down_proj")),
    case_of("tp2 sp recompute-selective", **DROPS),
    case_of("tp2 sp", family="neox", n_kv_heads=4, targets=("dense*",)),
    case_of("cp2-ring"),
    case_of("pp2 v2 zbv", tie_embeddings=True, **FOUR),
    case_of("shard2 tp2 sp zero2"),
    case_of("pp2 tp2 sp", "bf16"),
]


@pytest.mark.often(1)
@pytest.mark.parametrize("case", CASES, ids=lambda one: one.label)
def test_layouts_train_adapters_on_the_same_four_bits(case):
    for verdicts in on_ranks(case.layout.world, proven, case=case):
        assert [verdict for verdict in verdicts if not verdict.passed] == []
        assert "frozen weights, bit for bit" in [verdict.claim for verdict in verdicts]


@pytest.mark.slow  # test_lora has it for bf16 weights
@pytest.mark.often(1)
@pytest.mark.parametrize("label", ["shard2 zero1", "shard2 zero2 recompute-full"])
def test_fsdp2_leaves_four_bits_alone(label):
    case = replace(case_of(label, "bf16", targets=("q_proj", "down_proj")), fsdp2=True)
    for verdicts in on_ranks(2, proven, case=case):
        assert [verdict for verdict in verdicts if not verdict.passed] == []


def another_level(parallel: Parallel) -> None:
    """Change one number of one weight by a level."""
    held = next(one for one in parallel.held if one.sharding.part.is_nf4)
    held.shard[0, 0] ^= 0x10


def faulty(world, case):
    groups = open_groups(case.layout, world)
    found = locate(case, groups, world, another_level)
    return check(case, groups, world, fault=another_level), found


@pytest.mark.slow
def test_a_changed_level_is_caught_and_found():
    ((verdicts, found),) = on_ranks(1, faulty, case=case_of("dp1 mb8"))
    assert (found.tensor, found.quantity) == ("layers.0.attn.q.weight", "initial weight")
    failed = [one for one in verdicts if not one.passed]
    assert {"loss", "gradients"} <= {one.claim for one in failed}


# Memory.


@pytest.mark.slow
@pytest.mark.parametrize(
    "label", ["shard2 zero1 mb2", "tp2 sp mb2", "pp2 1f1b mb1", "cp2-ring mb2 recompute-full"]
)
def test_a_rehearsal_does_what_the_program_says(label):
    case = case_of(label, "bf16")
    config = load_config(None, []).model_copy(update={"model": case.model, "train": case.train})
    (one,) = simulate(config, case.layout, [1]).ranks
    assert one.differences == []


WIDE = {"dim": 256, "n_layers": 2, "n_heads": 8, "n_kv_heads": 4, "ffn_dim": 512}
MEASURED = TrainSpec(batch=4, seq_len=64, matmul="torch")


def peaks(world, label, spec):
    return measure(world, Case(spec, MEASURED, Layout.parse(label))).peak.total


@pytest.mark.slow
@pytest.mark.parametrize("label", ["shard2 zero1 mb2", "tp2 mb2"])
def test_memory_is_predicted_and_less_than_of_frozen_weights(label):
    found = {}
    for base in ("nf4", "precision"):
        spec = model(base=base, **WIDE)
        found[base] = on_ranks(2, peaks, label=label, spec=spec)[0]
        said = timeline(lower(spec, MEASURED, OptimizerSpec(), Layout.parse(label)), 0).peak.total
        assert said == pytest.approx(found[base], rel=0.08)
    assert found["nf4"] < 0.75 * found["precision"]


def test_a_weight_takes_four_and_a_half_bits():
    for layout in (Layout(), Layout.parse("tp2 mb2")):
        (packed, plain) = (
            lower(model(base=base), TRAIN, OptimizerSpec(), layout).shardings[
                "layers.0.mlp.down.weight"
            ]
            for base in ("nf4", "precision")
        )
        assert packed.stored_bytes(2) * 8 == 4.5 * plain.stored_bytes(1)
    packed = {one.name.split(".", 2)[-1] for one in parts(model()) if one.is_nf4}
    names = ("attn.q", "attn.k", "attn.v", "attn.o", "mlp.gate", "mlp.up", "mlp.down")
    assert packed == {f"{one}.weight" for one in names}


# Checkpoints: in the precision of products, so that any run reads them.


def kept(world, case):
    program = program_of(case, world)
    groups = open_groups(case.layout, world)
    parallel = build(program, groups, world.device, seeded(case.model, 0))
    before = [held.shard.clone() for held in parallel.held]
    stored = {held.name: held.weights(torch.bfloat16) for held in parallel.held}
    fill(parallel, lambda name, shape, region: stored[name])
    return [torch.equal(held.shard, one) for held, one in zip(parallel.held, before, strict=True)]


def test_what_is_saved_becomes_the_same_four_bits():
    (same,) = on_ranks(1, kept, case=case_of("dp1 mb8", "bf16"))
    assert all(same)


# Configs.


def test_a_config_says_how_frozen_weights_are_kept(tmp_path):
    config = load_config(None, ["lora.rank=4", "lora.base=nf4"])
    assert config.model.lora.is_nf4
    file = tmp_path / "run.toml"
    file.write_text(to_toml(config))
    assert load_config(file).model == config.model
    assert "base" not in Lora(rank=4, alpha=4.0).model_dump()  # as earlier versions wrote it


@pytest.mark.parametrize(
    ("label", "sizes", "told", "legal"),
    [
        ("shard2 zero3", {}, "layout.zero = 3 cuts frozen", ["layout.zero = 2"]),
        ("shard2 zero1 offload-params", {}, "offload = params cuts", ["layout.offload = optim"]),
        ("tp4", {"n_kv_heads": 4}, "layout.tp = 4: 32 must be a multiple of 64", ["layout.tp = 2"]),
        ("tp2", {"ffn_dim": 192}, "model.ffn_dim / layout.tp = 2: 96", ["layout.tp = 1"]),
        ("dp1", MIXTURE, "model.experts = 4 are not kept in four", ["lora.base = precision"]),
        ("dp1", {"dim": 96}, "model.dim = 96 must be a multiple", ["lora.base = precision"]),
    ],
)
def test_layouts_that_cut_blocks_are_refused(label, sizes, told, legal):
    case = model(**sizes), TRAIN, Layout.parse(label)
    assert told in broken(*case)
    proposed = nearest_legal(*case)
    assert all(any(one.startswith(start) for one in proposed) for start in legal)


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_a_small_case_of_a_config_keeps_whole_blocks(tp):
    (case,) = shrink(model(n_heads=8, n_kv_heads=4, head_dim=64, ffn_dim=256), TRAIN, Layout(tp=tp))
    assert case.model.lora.is_nf4
    assert broken(case.model, case.train, case.layout) is None


def test_four_bits_need_adapters():
    with pytest.raises(ConfigError, match=r"lora\.base = nf4 needs lora\.rank above 0"):
        load_config(None, ["lora.base=nf4"])


def test_the_guide_has_the_measured_tables():
    root = Path(__file__).parents[2] / "docs"
    content = json.loads((root / "benchmarks/fine-tuning.json").read_text())
    page = (root / "guides/lora.md").read_text(encoding="utf-8")
    shown = page.partition("<!-- fine-tuning: begin -->\n")[2].partition("\n<!-- fine-tuning: end")[
        0
    ]
    assert shown == tables(content), "see python -m benchmarks.fine_tuning"
    for one in content["rows"]:
        assert one["predicted"] == pytest.approx(one["measured"], rel=0.05)
    for label in {one["layout"] for one in content["rows"]}:
        peaks = [one["measured"] for one in content["rows"] if one["layout"] == label]
        assert peaks == sorted(peaks, reverse=True)  # all weights, adapters, on four bits
