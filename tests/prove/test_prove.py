"""The table of layouts, a part of it proven on ranks, and the `prove` command."""

import importlib.util
import json
import subprocess
import sys
from collections import Counter
from itertools import combinations
from pathlib import Path

import pytest

from meshwright.cli import main
from meshwright.errors import ConfigError
from meshwright.layout import Layout, broken
from meshwright.layout.rules import RULES
from meshwright.layout.schedules import SCHEDULES
from meshwright.program.actions import Action
from meshwright.program.lower import lower
from meshwright.prove.case import Case
from meshwright.prove.kinds import NEWER_KINDS
from meshwright.prove.matrix import WORLDS, matrix
from meshwright.prove.order import prove_order
from meshwright.prove.outcome import Outcome
from meshwright.prove.refused import refuse
from meshwright.prove.shrink import MOST_RANKS, shrink
from meshwright.prove.verdict import Divergence, Verdict
from meshwright.runtime.proofs import proof
from meshwright.spec.families import FAMILIES
from meshwright.spec.presets import PRESETS
from meshwright.spec.resolve import model_spec
from meshwright.spec.training import TrainSpec

ROOT = Path(__file__).parents[2]
SMALL = (2, 4, 8)


def legal(world):
    return [case for case in matrix(world) if case.refused is None]


def axes(layout):
    """The parallelisms of a layout, ZeRO apart from replicas."""
    degrees = {"dp": layout.dp_replicate, "zero": layout.shard_ranks, "tp": layout.tp}
    degrees |= {"cp": layout.cp, "pp": layout.pp}
    return {axis for axis, degree in degrees.items() if degree > 1}


NEWER = {kind.family for kind in NEWER_KINDS}


def newer(case):
    """Return a case's family where it is one of those with a part of the table of their own."""
    return case.model.family if case.model.family in NEWER else None


@pytest.mark.parametrize("family", sorted(NEWER))
def test_newer_families_are_in_each_axis_alone_and_in_pairs(family):
    all_layouts = [case.layout for n in (2, 4) for case in legal(n) if case.model.family == family]
    assert any(layout.sp for layout in all_layouts)
    for world, pairs in ((2, 1), (4, 2)):
        own = [case.layout for case in legal(world) if case.model.family == family]
        met = [{axis for axis in ("dp", "tp", "cp", "pp") if getattr(one, axis) > 1} for one in own]
        assert set().union(*met) == {"dp", "tp", "cp", "pp"}
        assert {len(axes) for axes in met} == {pairs}
        assert any(one.zero == 3 for one in own)


def test_the_table_is_large_legal_and_the_same_each_time():
    for world in WORLDS:
        cases = legal(world)
        # A layout comes again for models with experts, for adapters, for FSDP2, newer families and
        # optimizers.
        kinds = {
            (
                *(c.layout, c.model.experts > 0, c.model.lora is None, c.fsdp2, newer(c)),
                *((c.optimizer, c.train.master) if c.optimizer_words else ()),
            )
            for c in cases
        }
        assert len(kinds) == len(cases)
        by_fsdp2 = [case.layout for case in cases if case.fsdp2]
        assert {layout.zero for layout in by_fsdp2} == ({1, 2, 3} if world < 8 else set())
        assert all(case.layout.world == world for case in cases)
        assert all(broken(c.model, c.train, c.layout) is None for c in cases)
        assert matrix.__wrapped__(world) == matrix(world)
    assert len(legal(8)) >= 150


@pytest.mark.parametrize("world", SMALL)
def test_the_table_has_each_parallelism_alone_and_each_pair(world):
    cases = legal(world)
    layouts = [case.layout for case in cases]
    alone = [layout for layout in layouts if len(axes(layout)) == 1]
    assert {layout.zero for layout in alone if layout.dp_shard > 1} == {1, 2, 3}
    assert {layout.sp for layout in alone if layout.tp > 1} == {False, True}
    assert {layout.cp_kind for layout in alone if layout.cp > 1} == {"ring", "ulysses"}
    assert {layout.schedule for layout in alone if layout.pp > 1} >= set(SCHEDULES)
    assert any(layout.dp_replicate > 1 for layout in alone)
    names = ("dp", "zero", "tp", "cp", "pp")
    if world > 2:
        met = Counter(pair for layout in layouts for pair in combinations(sorted(axes(layout)), 2))
        assert all(met[tuple(sorted(pair))] for pair in combinations(names, 2))
        assert any(layout.dp_replicate > 1 and layout.dp_shard > 1 for layout in layouts)
    if world > 4:
        sets = [axes(layout) for layout in layouts]
        assert all(any(set(three) <= found for found in sets) for three in combinations(names, 3))


@pytest.mark.parametrize("world", SMALL)
def test_the_table_mixes_what_the_axes_leave_open(world):
    cases = legal(world)
    pipelined = [case.layout for case in cases if case.layout.pp > 1]
    assert len({(layout.schedule, layout.recompute) for layout in pipelined}) == 24
    assert {case.train.precision for case in cases} == {"fp32", "bf16", "fp16"}
    assert {case.layout.offload for case in cases} == {"none", "optimizer", "params", "activations"}
    assert {case.model.family for case in cases} >= set(FAMILIES) - NEWER
    assert any(case.model.n_layers % case.layout.stages for case in cases)
    assert any(case.packed for case in cases)
    assert any(case.model.dropout for case in cases)
    assert any(case.model.tie_embeddings and case.layout.pp > 1 for case in cases)
    counts = {c.layout.microbatches(c.train.batch) for c in cases}
    assert counts >= {2, 4, 8}


def test_each_family_has_its_layouts_in_the_table():
    cases = [case for world in (2, 4, 8, 16) for case in legal(world)]
    counts = Counter(case.model.family for case in cases)
    assert all(counts[family] >= 12 for family in FAMILIES if family not in NEWER)
    for family in FAMILIES:
        if family in NEWER:
            continue
        own = [case.layout for case in cases if case.model.family == family]
        for axis in ("dp", "tp", "sp", "cp", "pp", "zero"):
            assert any(getattr(layout, axis) > (axis not in ("sp", "zero")) for layout in own), axis
        assert any(sum(degree > 1 for degree in layout.mesh.shape) >= 3 for layout in own)
        assert {layout.recompute for layout in own} == {"none", "full", "selective"}
        alike = [case for case in cases if case.model.family == family]
        assert {case.train.precision for case in alike} == {"fp32", "bf16", "fp16"}
        assert {case.packed for case in alike} == {False, True}


OPTIMIZED = {
    *(("muon",), ("muon", "no masters"), ("no masters",)),
    *(("bf16 states",), ("bf16 states", "stochastic"), ("bf16 states", "no masters", "stochastic")),
    *(("int8 states",), ("int8 states", "no masters")),
}


@pytest.mark.parametrize("words", sorted(OPTIMIZED), ids=", ".join)
def test_each_optimizer_is_in_each_way_to_shard_weights(words):
    cases = [case for n in (2, 4) for case in legal(n) if case.optimizer_words == words]
    layouts = [case.layout for case in cases]
    assert {layout.zero for layout in layouts if layout.dp_shard > 1} == {1, 2, 3}
    assert {layout.offload for layout in layouts} == {"none", "optimizer", "params"}
    assert all(any(getattr(each, axis) > 1 for each in layouts) for axis in ("tp", "pp", "ep"))
    assert any(layout.dp_replicate > 1 and not layout.zero for layout in layouts)
    hybrid = [case for case in cases if case.layout.dp_replicate > 1 and case.layout.zero == 3]
    assert {case.fsdp2 for case in hybrid} == {False, True}
    assert {case.layout.dp_replicate for case in cases if case.fsdp2} == {1, 2}
    # And on shards that rows do not divide evenly.
    assert any(case.model.dim == 60 for case in cases)


def test_the_rows_by_optimizer_are_all_of_them():
    for world in WORLDS:
        counts = Counter(case.optimizer_words for case in legal(world) if case.optimizer_words)
        assert set(counts) == (OPTIMIZED if world < 8 else set())


def test_the_table_has_the_layouts_that_are_asked_for():
    labels = {case.layout.label for case in legal(8)}
    assert {
        "shard2 zero2 tp2 pp2 1f1b mb2",
        "tp2 pp4 1f1b mb2",
        "tp2 sp cp2-ring pp2 1f1b mb2",
        "dp2 shard2 zero3 tp2 sp mb2",
    } <= labels
    axes_of = Counter(len([d for d in case.layout.mesh.shape if d > 1]) for case in legal(16))
    assert axes_of.pop(2) == 1  # the case with long rows
    assert set(axes_of) == {4}


@pytest.mark.parametrize("world", SMALL)
def test_each_rule_refuses_a_layout(world):
    refusals = [refuse(case) for case in matrix(world) if case.refused is not None]
    for refusal in refusals:
        assert refusal.rule == refusal.case.refused
        assert refusal.nearest
    checks = []
    # No model of the table has mixers, which are planned only: test_layout has their rule.
    for rule in (rule for rule in RULES if rule.check.__name__ != "_mixers"):
        cases = (refusal.case for refusal in refusals)
        checks.append(any(rule.check(c.model, c.train, c.layout) == c.refused for c in cases))
    assert all(checks)


def test_there_is_no_table_for_three_ranks():
    with pytest.raises(ConfigError, match="no table for 3 ranks; nearest legal: 2, 4, 8 or 16"):
        matrix(3)


def test_a_case_survives_json():
    for case in (*matrix(4), *shrunk("llama-3.2-1b", "tp2 sp pp4 1f1b mb1")):
        assert Case.from_json(case.as_json()) == case


@pytest.mark.parametrize("world", WORLDS)
def test_no_order_of_the_table_can_deadlock(world):
    for case in legal(world):
        if case.layout.is_pipelined:
            verdict = prove_order(lower(case.model, case.train, case.optimizer, case.layout))
            assert verdict.passed, (case.label, verdict.observed)


def test_an_order_that_hangs_is_told():
    case = next(c for c in legal(2) if c.layout.is_pipelined and c.layout.schedule == "1f1b")
    program = lower(case.model, case.train, case.optimizer, case.layout)
    first, second = program.tables
    at = first.index(Action("RECV_B", 0, 0))
    swapped = (*first[:at], *first[at + 1 :], first[at])
    vars(program)["tables"] = (swapped, second)
    verdict = prove_order(program)
    assert not verdict.passed
    assert "rank 0" in verdict.observed


def shrunk(preset, label, batch=1536, **train):
    model = model_spec(preset=preset, **({"vocab_size": 50304} if preset == "gpt3-175b" else {}))
    sized = TrainSpec(batch=batch, seq_len=2048, **train)
    layout = Layout.parse(label)
    assert broken(model, sized, layout) is None
    return shrink(model, sized, layout)


@pytest.mark.parametrize(
    ("preset", "label"),
    [
        ("gpt3-175b", "dp6 tp8 pp8 1f1b mb1"),
        ("llama-3-405b", "shard64 zero2 tp8 sp cp4-ring pp16 interleaved_1f1b v7 mb1"),
        ("llama-3-70b", "dp2 shard8 zero3 cp8-ulysses mb2"),
        ("pythia-12b", "dp3 zero3 shard2 pp4 zbv v2 mb4 recompute-full"),
        ("smollm2-135m", "tp3 dp8 mb4"),
        ("gpt-neox-20b", "tp8 sp pp4 dualpipev v2 mb1 recompute-selective"),
        ("pythia-14m", "mb8"),
    ],
)
def test_what_is_shrunk_stays_of_its_kind(preset, label):
    asked, whole = Layout.parse(label), PRESETS[preset]
    cases = shrunk(preset, label)
    seen = set()
    for case in cases:
        layout, model = case.layout, case.model
        assert layout.world <= MOST_RANKS
        assert broken(model, case.train, layout) is None
        split = {
            a for a in ("pp", "dp_replicate", "dp_shard", "cp", "tp") if getattr(layout, a) > 1
        }
        seen |= set(combinations(sorted(split), min(2, len(split))))
        assert layout.zero == asked.zero
        assert layout.recompute == asked.recompute
        assert layout.sp == (asked.sp and "tp" in split)
        assert not layout.is_pipelined or layout.schedule == asked.schedule
        assert model.family == whole["family"]
        assert model.tie_embeddings == whole.get("tie_embeddings", False)
        assert (model.n_kv_heads < model.n_heads) == (
            whole.get("n_kv_heads", whole["n_heads"]) < whole["n_heads"]
        )
        assert case.steps == 6
    wanted = {a for a in ("pp", "dp_replicate", "dp_shard", "cp", "tp") if getattr(asked, a) > 1}
    assert seen == set(combinations(sorted(wanted), min(2, len(wanted))))


def check(outcomes):
    for outcome in outcomes:
        assert outcome.passed, "\n".join(outcome.lines())


def quiet(outcome):
    pass


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    "only", ["zero3 mb1, ", pytest.param("", marks=pytest.mark.slow, id="whole")]
)
def test_two_ranks_and_json(only, capsys):
    words = ["prove", "--matrix", "--world", "2", "--json", *(["--only", only] if only else [])]
    assert main(words) == 0
    shown = capsys.readouterr()
    found = json.loads(shown.out)
    assert set(found) == {
        *("world", "layouts", "passed", "failed", "refused", "seconds", "verdicts")
    }
    cases = [case for case in matrix(2) if only in case.label]
    asked = [case for case in cases if case.refused is None]
    assert found["layouts"] == found["passed"] == len(asked)
    assert found["failed"] == 0
    assert len(found["refused"]) == len(cases) - len(asked)
    assert {"layout", "rule", "nearest"} <= set(found["refused"][0])
    claims = Counter(verdict["claim"] for verdict in found["verdicts"])
    for claim in ("loss", "gradients", "gradient norm", "evaluation"):
        assert claims[claim] == found["layouts"]
        assert claims[f"in fp32: {claim}"] == sum(c.train.precision != "fp32" for c in asked)
    for optimizer, name in (("adamw", "AdamW"), ("sgd", "SGD")):
        count = sum(case.optimizer.name == optimizer for case in asked)
        assert claims[f"updates of 3 {name} steps"] == count
        assert claims[f"optimizer state after 3 {name} steps"] == count
    assert claims["order cannot deadlock"] == sum(c.layout.is_pipelined for c in asked)
    assert f"{found['passed']} of {found['layouts']} layouts passed" in shown.err


@pytest.mark.slow
def test_a_config_is_proven_small(capsys):
    words = ["prove", "model.preset=llama-3.2-1b", "layout.tp=8", "layout.sp=true"]
    words += ["layout.dp_shard=64", "layout.zero=3", "train.batch=512"]
    assert main(words) == 0
    out = capsys.readouterr().out
    assert "asked: shard64 zero3 tp8 sp" in out
    assert "on 512 ranks, 1.24B parameters" in out
    assert "run:   shard2 zero3 tp4 sp" in out
    assert "updates of 6 AdamW steps" in out
    assert "1 of 1 layouts passed" in out
    assert "; (%): the error as a share of what is tolerated" in out


def test_the_order_of_a_huge_layout_is_checked_without_ranks(capsys, monkeypatch):
    monkeypatch.setattr(proof, "prove_cases", None)
    words = ["prove", "model.preset=gpt3-175b", "model.vocab_size=50304", "train.seq_len=2048"]
    words += ["layout.tp=8", "layout.pp=8", "layout.dp_replicate=6", "train.batch=1536"]
    assert main([*words, "--check-order"]) == 0
    assert "order cannot deadlock" in capsys.readouterr().out
    assert main([*words, "--check-order", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["world"] == 384
    assert found["asked"]["layout"].startswith("dp6 tp8 pp8 1f1b")
    assert found["verdicts"][0]["passed"]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--matrix", "--world", "3"], "no table for 3 ranks"),
        (["--matrix", "--only", "tp7"], "has 'tp7' in its label"),
        (["--world", "4"], "--world and --only need --matrix, or --random N"),
        (["--matrix", "layout.tp=2"], "leave out layout.tp=2"),
        (["--minutes", "2"], "--minutes needs --matrix, or --random N"),
        (["--matrix", "--minutes", "0"], "--minutes 0 is not enough time to prove in"),
        (["--random", "9", "--minutes", "2", "--check-order"], "leave out --minutes"),
        (["--matrix", "--seed", "2"], "--seed needs --random N, --matrix --draw N, or --minutes M"),
        (["layout.tp=3"], "layout.tp = 3 must divide model.n_heads = 4"),
    ],
)
def test_what_the_command_refuses(words, told, capsys):
    assert main(["prove", *words]) == 2
    assert told in capsys.readouterr().err


def test_a_failed_verdict_is_shown_with_its_place(capsys, monkeypatch):
    where = Divergence("layers.1.mlp.up.weight", 3, 1, 2, 0.5, data_rank=1)
    verdict = Verdict("gradients", {}, 0.0, float("nan"), 2e-6, False, where)

    def prove(cases, environ, show, device, seconds):
        outcomes = [Outcome(case, (verdict,), 0.1) for case in cases]
        for outcome in outcomes:
            show(outcome)
        return outcomes

    monkeypatch.setattr(proof, "prove_cases", prove)
    assert main(["prove", "--matrix", "--world", "2", "--only", "naive mb4"]) == 1
    out = capsys.readouterr().out
    assert "FAIL pp2 naive mb4" in out
    place = "rank 3, stage 1, microbatch 2, rows of data rank 1"
    assert f"first: gradient of layers.1.mlp.up.weight on {place} (off by 5.0e-01)" in out
    assert "1 FAILED" in out
    assert main(["prove", "--matrix", "--world", "2", "--only", "naive mb4", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["failed"] == 1
    assert found["verdicts"][0]["first_divergence"]["microbatch"] == 2
    assert found["verdicts"][0]["observed"] == "nan"


def test_verdicts_survive_json():
    where = Divergence("norm.weight", 0, 0, None, float("inf"))
    for verdict in (
        Verdict("loss", {"tp": 2}, [1.0, 2.0], [1.0, 2.5], 0.1, False, where),
        Verdict("order cannot deadlock", {}, "ends", "ends", None, True),
    ):
        again = Verdict.from_dict(json.loads(json.dumps(verdict.as_dict())))
        assert again == verdict
    assert verdict.error is None


def test_a_number_that_is_not_finite_is_shown():
    verdict = Verdict("gradients", {}, 0.0, float("inf"), 2e-6, False)
    outcome = Outcome(legal(2)[0], (Verdict.from_dict(verdict.as_dict()),), 0.1)
    assert any("gradients inf" in line for line in outcome.lines())


def test_a_tolerance_that_is_not_finite_is_shown():
    # as where one device's own gradients overflow fp16: there is no noise to compare with
    verdict = Verdict("gradients", {}, 0.0, float("inf"), float("nan"), False)
    outcome = Outcome(legal(2)[0], (Verdict.from_dict(verdict.as_dict()),), 0.1)
    assert any("gradients inf (nan%)" in line for line in outcome.lines())


def test_no_proof_is_no_pass():
    assert not Outcome(legal(2)[0], (), 0.0).passed


def test_the_command_does_not_load_torch():
    code = "import sys, meshwright.cli.prove\nprint('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_the_support_matrix_is_current():
    spec = importlib.util.spec_from_file_location("draw_matrix", ROOT / "docs/draw_matrix.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.PAGE.read_text(encoding="utf-8") == module.draw(), "run docs/draw_matrix.py"
    drawn = module.picture(module.legal_cases())
    assert module.PICTURE.read_text(encoding="utf-8") == drawn, "run docs/draw_matrix.py"
