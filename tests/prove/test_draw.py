"""Random layouts: what is drawn, some of them on ranks, and how a failure is made small."""

import json
import math
import shlex
from collections import Counter
from dataclasses import replace

import pytest

from meshwright.cli import main
from meshwright.errors import ConfigError
from meshwright.layout import AXES, Layout, broken
from meshwright.layout.schedules import SCHEDULES
from meshwright.prove.case import SGD, Case
from meshwright.prove.draw import WORLDS, draw
from meshwright.prove.outcome import Outcome
from meshwright.prove.smallest import smallest
from meshwright.prove.verdict import Verdict
from meshwright.runtime.proofs import proof
from meshwright.spec.model import ModelSpec

pytestmark = pytest.mark.early

HUNDRED = draw(0, 100)


def test_a_seed_draws_the_same_legal_layouts_each_time():
    assert draw(0, 100) == HUNDRED
    assert draw(0, 7) == HUNDRED[:7]
    assert draw(1, 100) != HUNDRED
    for seed in range(20):
        for case in draw(seed, 50, (*WORLDS, 8, 12)):
            assert broken(case.model, case.train, case.layout) is None
            ModelSpec.model_validate(case.model.model_dump())


@pytest.mark.parametrize("world", range(2, 17))
def test_of_one_number_of_ranks_each_mesh_comes_before_any_comes_again(world):
    cases = draw(3, 200, (world,))
    assert {case.layout.world for case in cases} == {world}
    times = Counter(case.layout.mesh for case in cases)
    assert max(times.values()) - min(times.values()) <= 1


# What each hundred has some of.
HAS = {
    **{f"{axis} of {n}": {axis: n} for axis in AXES for n in (2, 3, 4, 5, 6)},
    **{f"{n} ranks": {"world": n} for n in WORLDS},
    **{f"schedule {name}": {"schedule": name} for name in SCHEDULES},
    **{f"zero {stage}": {"zero": stage} for stage in range(4)},
    **{f"recompute {name}": {"recompute": name} for name in ("none", "full", "selective")},
    **{
        f"offload {name}": {"offload": name}
        for name in ("none", "optimizer", "params", "activations")
    },
    **{f"cp {kind}": {"cp_kind": kind} for kind in ("ring", "ulysses")},
    **{f"microbatch of {n}": {"microbatch": n} for n in (1, 2, 3)},
    **{f"{n} virtual stages": {"virtual_stages": n} for n in (1, 2, 3)},
    "sp": {"sp": True},
    **{f"steps of {name}": {"optimizer": name} for name in ("adamw", "sgd")},
    **{f"in {name}": {"precision": name} for name in ("fp32", "bf16", "fp16")},
    **{f"products of {name}": {"matmul": name} for name in ("torch", "onednn")},
    **{f"clipped at {norm}": {"clip_norm": norm} for norm in (0.0, 0.1, 1.0)},
    **{f"summed in {name}": {"reduce_dtype": name} for name in ("fp32", "same")},
    **{f"{name}": {"family": name} for name in ("llama", "neox")},
    **{
        f"{name} {flag}": {name: flag}
        for name in ("tie_embeddings", "parallel_residual", "attention_bias", "mlp_bias")
        for flag in (False, True)
    },
    **{f"rotated {part}": {"rotary_pct": part} for part in (0.0, 0.25, 0.5, 1.0)},
    **{f"dropout {share}": {"dropout": share} for share in (0.0, 0.1)},
    **{f"packed {flag}": {"packed": flag} for flag in (False, True)},
    **{f"{name}": {"family": name} for name in ("mixtral", "gpt_oss", "deepseek_v3", "qwen2_moe")},
    **{f"experts of {n} ranks": {"ep": n, "has_experts": True} for n in (1, 2, 3)},
    "folded": {"etp": 1},
    "experts with a limit": {"expert_capacity": 1.1},
    **{f"{n} experts of a token": {"top_k": n} for n in (1, 2, 3)},
    "loss of uneven routers": {"router_aux_loss": 1.0},
    **{f"by FSDP2 {flag}": {"fsdp2": flag} for flag in (False, True)},
    "by FSDP2, with experts": {"fsdp2": True, "has_experts": True},
    "trained in some turns": {"chat": True},
    **{f"adapters on experts {flag}": {"adapts_experts": flag} for flag in (False, True)},
}


def facts(case):
    """All values of a case by their names."""
    found = {"world": case.layout.world, "packed": case.packed, "optimizer": case.optimizer.name}
    found |= {"has_experts": case.model.experts > 0, "chat": case.chat, "fsdp2": case.fsdp2}
    if case.model.lora is not None:
        found["adapts_experts"] = any(one.startswith("mlp.experts") for one in case.model.adapted)
    for section in (case.layout, case.model, case.train):
        found |= dict(section)
    if not case.layout.is_pipelined:
        del found["schedule"]
    if case.layout.cp == 1:
        del found["cp_kind"]
    return found


@pytest.mark.parametrize("seed", range(8))
def test_a_hundred_have_everything(seed):
    found = [facts(case) for case in draw(seed, 100)]
    missing = [
        name
        for name, wanted in HAS.items()
        if not any(wanted.items() <= one.items() for one in found)
    ]
    assert not missing


@pytest.mark.parametrize("seed", range(8))
def test_a_hundred_mix_what_is_odd(seed):
    cases = draw(seed, 100)
    layouts = [case.layout for case in cases]
    sharded = [layout for layout in layouts if layout.shard_ranks > 1]
    assert {layout.zero for layout in sharded if layout.shard_ranks in (3, 5, 6)} == {1, 2, 3}
    assert any(layout.dp_replicate > 1 for layout in sharded)
    assert any(layout.sp and layout.tp in (3, 5, 6) for layout in layouts)
    for kind in ("ring", "ulysses"):
        assert any(layout.cp in (3, 5, 6) and layout.cp_kind == kind for layout in layouts)
    pipelined = [case for case in cases if case.layout.is_pipelined]
    assert {case.layout.pp for case in pipelined} == {2, 3, 4, 5, 6}
    assert any(case.model.tie_embeddings for case in pipelined)
    assert any(case.model.n_layers % case.layout.stages for case in pipelined)
    counts = {c.layout.microbatches(c.train.batch) for c in cases}
    assert counts >= {1, 2, 3, 4, 5, 6}
    assert max(counts) >= 7
    assert any(case.model.dim % case.layout.shard_ranks for case in cases)
    assert any(case.model.vocab_size % 2 for case in cases)
    assert any(case.train.seq_len % 2 for case in cases)
    assert {case.model.n_heads // case.model.n_kv_heads for case in cases} == {1, 2, 3}


@pytest.mark.parametrize(
    ("count", "worlds", "told"),
    [
        (5, (1,), "random layouts have 2 to 16 ranks, not 1; nearest legal: 2"),
        (5, (2, 17), "random layouts have 2 to 16 ranks, not 17; nearest legal: 16"),
        (0, WORLDS, "0 random layouts prove nothing; nearest legal: 1"),
    ],
)
def test_what_cannot_be_drawn(count, worlds, told):
    with pytest.raises(ConfigError, match=told):
        draw(0, count, worlds)


def test_a_drawn_case_survives_json():
    for case in HUNDRED:
        text = case.as_json()
        assert Case.from_json(text) == case
        assert "rope_theta" not in json.loads(text)["model"] or case.model.rope_theta != 10000.0


# A failure made small.


def needs_tp_and_ties(case):
    return case.layout.tp > 1 and case.model.tie_embeddings


@pytest.mark.parametrize("case", [case for case in HUNDRED if needs_tp_and_ties(case)][:8])
def test_what_a_failure_needs_stays_and_all_else_goes(case):
    tried = []

    def fails(smaller):
        assert broken(smaller.model, smaller.train, smaller.layout) is None
        ModelSpec.model_validate(smaller.model.model_dump())
        tried.append(smaller)
        return needs_tp_and_ties(smaller)

    found = smallest(case, fails)
    assert needs_tp_and_ties(found)
    layout, model = found.layout, found.model
    assert layout == Layout(tp=layout.tp)
    assert layout.tp == 2 or case.layout.tp % 2
    assert found.train.batch == 1
    assert (model.n_layers, model.family, model.dropout) == (1, "llama", 0.0)
    assert not model.attention_bias
    assert (found.packed, found.optimizer, found.steps) == (False, SGD, 1)
    assert found.train.precision == "fp32"
    assert len(set(tried)) == len(tried) <= 80


def test_a_pipeline_keeps_what_fails_of_its_schedule():
    case = next(
        c
        for c in HUNDRED
        if c.layout.schedule == "zbv" and c.layout.zero and c.layout.microbatches(c.train.batch) > 1
    )

    def fails(smaller):
        return smaller.layout.schedule == "zbv" and smaller.train.batch >= 2

    found = smallest(case, fails).layout
    assert (found.label, found.virtual_stages) == ("pp2 zbv v2 mb1", 2)


def test_what_only_fails_as_it_is_stays():
    assert smallest(HUNDRED[0], lambda case: False) == HUNDRED[0]


def test_so_many_tries_at_most():
    tried = []
    assert smallest(HUNDRED[0], lambda case: bool(tried.append(case)), 3) == HUNDRED[0]
    assert len(tried) == 3


# The command.


def verdicts(*failed):
    names = ("loss", "gradients")
    return tuple(Verdict(name, {}, 0.0, 1.0, 0.1, name not in failed) for name in names)


@pytest.fixture
def fail(monkeypatch):
    """Have cases fail in what a function says of them, without ranks; returns what was proven."""

    def arrange(claims_of):
        proven = []

        def prove(cases, environ, show, device, seconds=math.inf):
            proven.extend(cases)
            outcomes = [Outcome(case, verdicts(*claims_of(case)), 0.1) for case in cases]
            for outcome in outcomes:
                show(outcome)
            return outcomes

        monkeypatch.setattr(proof, "prove_cases", prove)
        monkeypatch.setattr(proof, "prove_cases", prove)
        return proven

    return arrange


def test_the_command_draws_and_groups_by_world(capsys, fail):
    proven = fail(lambda case: ())
    assert main(["prove", "--random", "100"]) == 0
    assert sorted(map(hash, proven)) == sorted(map(hash, HUNDRED))
    worlds = [case.layout.world for case in proven]
    assert worlds == sorted(worlds)
    out = capsys.readouterr().out
    assert "100 random layouts, seed 0, of 2, 3, 4, 5, 6 ranks" in out
    assert "100 of 100 layouts passed" in out
    assert "repeat" not in out


def test_the_command_shows_the_smallest_failure_and_how_to_repeat_it(capsys, fail):
    fail(lambda case: ("gradients",) if needs_tp_and_ties(case) else ())
    words = ["prove", "--random", "20", "--seed", "3", "--world", "6"]
    assert main(words) == 1
    out = capsys.readouterr().out
    assert "smallest: tp" in out
    repeats = [line for line in out.splitlines() if line.startswith("  repeat: ")]
    assert len(repeats) == out.count("FAIL ") + out.count("smallest: ")
    assert main([*words, "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["seed"] == 3
    assert len(found["smallest"]) <= 3
    of_shell = shlex.split(found["smallest"][0]["repeat"])
    assert of_shell[:3] == ["meshwright", "prove", "--case"]
    proven = fail(lambda case: ("gradients",))
    assert main(of_shell[1:]) == 1
    (again,) = proven
    assert again.label == found["smallest"][0]["case"]


def test_what_fails_otherwise_is_another_failure(fail):
    case = HUNDRED[0]
    fail(lambda tried: ("gradients",) if tried == case else ("loss",))
    fails = proof.fails_alike(Outcome(case, verdicts("gradients"), 0.1), {}, "cpu")
    assert fails(case)
    assert not fails(replace(case, steps=1))


def test_what_fails_after_others_only_is_told_so(capsys, fail):
    proven = []

    def claims_of(case):
        proven.append(case)
        return ("loss",) if len(proven) == 2 else ()

    fail(claims_of)
    assert main(["prove", "--random", "3"]) == 1
    assert "it does not fail alone" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--random", "5", "layout.tp=2"], "--random has its own layouts; leave out layout.tp=2"),
        (["--random", "5", "--world", "1"], "have 2 to 16 ranks, not 1"),
        (["--random", "5", "--only", "tp7"], "no layout of these 5 has 'tp7'"),
        (["--random", "5", "--resume"], "leave out --random"),
        (["--random", "0"], "prove nothing"),
        (["--seed", "3"], "--seed needs --random N, --matrix --draw N, or --minutes M"),
        (["--matrix", "--seed", "3"], "--seed needs --random N"),
        (["--case", "{}", "--world", "2"], "--world and --only need --matrix, or --random N"),
        (["--case", "{}"], "--case lacks 'model': it takes what a failure of --random has printed"),
        (["--case", "tp2"], "--case takes what a failure of --random has printed"),
    ],
)
def test_what_the_command_refuses(words, told, capsys):
    assert main(["prove", *words]) == 2
    assert told in capsys.readouterr().err


def test_two_sources_at_once_are_refused(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["prove", "--random", "5", "--matrix"])
    assert ended.value.code == 2
    assert "not allowed with argument" in capsys.readouterr().err


def test_an_illegal_case_is_refused_with_the_nearest_legal(capsys):
    case = replace(HUNDRED[0], layout=Layout(tp=7))
    assert main(["prove", "--case", case.as_json()]) == 2
    assert "layout.tp = 7 must divide model.n_heads" in capsys.readouterr().err


# How many layouts, seed, ranks: a pipeline under ZeRO 2, and experts shared out over ranks of tp.
SOON = ("2", "1993", "2")
# Every axis alone; folded experts; ZeRO 1 to 3, all precisions, offloaded params and activations.
ALL_AXES = ("5", "642", "3")


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("count", "seed", "world"), [SOON, pytest.param(*ALL_AXES, marks=pytest.mark.slow)]
)
def test_some_on_their_ranks(capsys, count, seed, world):
    code = main(["prove", "--random", count, "--seed", seed, "--world", world])
    out = capsys.readouterr().out
    assert code == 0, out
    assert f"{count} of {count} layouts passed" in out
