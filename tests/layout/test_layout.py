"""Layouts: every rule with its words, the nearest legal values, what is filled in."""

import re
import sys
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.errors import ConfigError
from meshwright.layout import AXES, Layout, Machine, broken, nearest_legal, resolve_layout
from meshwright.layout.rules import RULES, divisors
from meshwright.layout.schedules import SCHEDULES, microbatch_rule
from meshwright.spec.loading import load_config
from meshwright.spec.lora import Lora
from meshwright.spec.mixers import Matrix, Mixer, Planned
from meshwright.spec.model import LayerSpec
from meshwright.spec.resolve import model_spec
from meshwright.spec.training import Schedule, TrainSpec

CPU = Machine("cpu", 2, 2, "CPU", is_fixed=False)
GPUS = Machine("cuda", 8, 64, "GPU", is_fixed=True)
MODEL = {"n_heads": 8, "n_kv_heads": 8, "dim": 256, "n_layers": 8, "ffn_dim": 768}
MODEL["vocab_size"] = 320
MIXTURE = {"model.family": "qwen2_moe", "model.experts": 4, "model.top_k": 2}


def case(changes):
    """Return model, train and layout with `section.key` changed."""
    parts = {"model": dict(MODEL), "train": {}, "layout": {}}
    for key, value in changes.items():
        section, name = key.split(".")
        parts[section][name] = value
    lora = parts["model"].pop("lora", None)
    model = model_spec(**parts["model"]).model_copy(update={"lora": lora})
    return model, TrainSpec(**parts["train"]), Layout(**parts["layout"])


def written(proposal):
    """Return the keys and values of a proposal such as `layout.tp = 2 with layout.pp = 4`."""
    return dict(re.findall(r"(\w+\.\w+) = (\w+)", proposal))


def applied(parts, proposal):
    """Return model, train and layout after following a proposal; all types are checked again."""
    found = dict(zip(("model", "train", "layout"), parts, strict=True))
    for key, text in written(proposal).items():
        section, name = key.split(".")
        value = {"true": True, "false": False}.get(text, int(text) if text.isdigit() else text)
        if section == "lora":
            section, name, value = "model", "lora", {**parts[0].lora.model_dump(), name: text}
        content = found[section].model_dump() | {name: value}
        found[section] = type(found[section])(**content)
    return tuple(found.values())


_GATE = Matrix(name="mixer.gate", outer=256, inner=256, cut="outer")
HYBRID = {
    "model.planned": Planned(model_type="hybrid"),
    "model.layer_pattern": (LayerSpec(mixer=Mixer(attends=True, heads=2, matrices=(_GATE,))),),
}
# keys, the rule's sentence, the proposals
BROKEN = [
    (
        {"train.precision": "fp32", "train.master": "none"},
        "train.master = none requires train.precision = bf16, but it is fp32",
        ["train.precision = bf16", "train.master = fp32"],
    ),
    (
        {"layout.dp_shard": 2, "layout.zero": 3, "model.lora": Lora(rank=4, alpha=4.0, base="nf4")},
        "layout.zero = 3 cuts frozen weights, which four bits keep whole (lora.base = nf4)",
        ["layout.zero = 2", "lora.base = precision", "layout.zero = 1"],
    ),
    (
        {**HYBRID, "layout.tp": 4},
        "layout.tp = 4 must divide the heads of hybrid's mixers = 2",
        ["layout.tp = 2"],
    ),
    (
        {**HYBRID, "layout.cp": 2},
        "layout.cp = 2 is not planned for the mixers of hybrid",
        ["layout.cp = 1"],
    ),
    (
        {"train.router_z_loss": 1.0},
        "train.router_z_loss = 1.0 is of models with experts, but model.experts = 0",
        ["train.router_z_loss = 0.0"],
    ),
    (
        {"layout.tp": 3},
        "layout.tp = 3 must divide model.n_heads = 8",
        ["layout.tp = 2", "layout.tp = 4"],
    ),
    (
        {"layout.tp": 4, "model.n_kv_heads": 2},
        "layout.tp = 4 must divide model.n_kv_heads = 2",
        ["layout.tp = 2"],
    ),
    (
        {"layout.tp": 8, "model.ffn_dim": 772},
        "layout.tp = 8 must divide model.ffn_dim = 772",
        ["layout.tp = 4"],
    ),
    (
        {"layout.tp": 8, **MIXTURE, "model.expert_ffn_dim": 92},
        "layout.tp = 8 must divide model.expert_ffn_dim = 92",
        ["layout.tp = 4"],
    ),
    (
        {"layout.tp": 8, **MIXTURE, "model.shared_ffn_dim": 90},
        "layout.tp = 8 must divide model.shared_ffn_dim = 90",
        ["layout.tp = 2"],
    ),
    (
        {"layout.dp_replicate": 4, "layout.ep": 2},
        "layout.ep = 2 divides experts over ranks, but model.experts = 0",
        ["layout.ep = 1"],
    ),
    (
        {"layout.dp_shard": 8, "layout.zero": 2, "layout.ep": 8, **MIXTURE},
        "layout.ep = 8 must divide model.experts = 4",
        ["layout.ep = 4"],
    ),
    (
        {
            "layout.dp_replicate": 4,
            "layout.dp_shard": 2,
            "layout.zero": 2,
            "layout.ep": 4,
            **MIXTURE,
        },
        "layout.ep = 4 must divide the dp_shard x cp ranks with the same weights = 2",
        ["layout.ep = 2"],
    ),
    (
        {"layout.pp": 4, "layout.virtual_stages": 3, "layout.schedule": "looped_bfs"},
        "layout.pp = 4 x layout.virtual_stages = 3 gives 12 stages, more than model.n_layers = 8, "
        "the embedding and the head",
        ["layout.virtual_stages = 2", "layout.pp = 3"],
    ),
    (
        {"layout.pp": 11},
        "layout.pp = 11 x layout.virtual_stages = 1 gives 11 stages, more than model.n_layers = 8, "
        "the embedding and the head",
        ["layout.pp = 10"],
    ),
    (
        {"layout.virtual_stages": 2},
        "layout.virtual_stages = 2 needs a pipeline, but layout.pp = 1",
        ["layout.virtual_stages = 1"],
    ),
    (
        {"layout.dp_replicate": 3, "layout.dp_shard": 2, "layout.zero": 2},
        "train.batch = 16 must be a multiple of the data-parallel degree 6 "
        "(dp_replicate 3 x dp_shard 2)",
        ["train.batch = 18", "train.batch = 12", "layout.dp_replicate = 2"],
    ),
    (
        {"layout.microbatch": 3, "layout.dp_replicate": 2},
        "layout.microbatch = 3 must divide train.batch per data rank = 8",
        ["layout.microbatch = 2", "layout.microbatch = 4"],
    ),
    (
        {"layout.dp_shard": 2},
        "layout.dp_shard = 2 requires layout.zero = 1, 2 or 3, but it is 0",
        ["layout.zero = 1", "layout.zero = 2", "layout.zero = 3"],
    ),
    (
        {"layout.offload": "params"},
        "layout.offload = params requires layout.zero = 1, 2 or 3, but it is 0",
        ["layout.zero = 1", "layout.offload = optimizer", "layout.zero = 2"],
    ),
    (
        {"layout.cp": 4, "train.seq_len": 252},
        "train.seq_len = 252 must be a multiple of 8 = 2 x layout.cp "
        "(layout.cp_kind = ring gives each rank two chunks)",
        ["train.seq_len = 248", "layout.cp_kind = ulysses", "train.seq_len = 256"],
    ),
    (
        {"layout.cp": 4, "layout.cp_kind": "ulysses", "train.seq_len": 250},
        "train.seq_len = 250 must be a multiple of layout.cp = 4",
        ["train.seq_len = 248", "train.seq_len = 252", "layout.cp = 2"],
    ),
    (
        {"layout.tp": 4, "layout.sp": True, "layout.cp": 2, "train.seq_len": 252},
        "train.seq_len / layout.cp = 126 must be a multiple of layout.tp = 4 (layout.sp = true)",
        ["train.seq_len = 248", "layout.sp = false", "train.seq_len = 256"],
    ),
    (
        {"layout.tp": 4, "layout.cp": 4, "layout.cp_kind": "ulysses"},
        "layout.tp = 4 x layout.cp = 4 gives 16, which must divide model.n_kv_heads = 8 "
        "(layout.cp_kind = ulysses)",
        ["layout.cp_kind = ring", "layout.cp = 2", "layout.tp = 2"],
    ),
    (
        {"layout.pp": 4, "layout.microbatch": 8},
        microbatch_rule("1f1b", 4, 1, 2),
        ["layout.microbatch = 4 (4 microbatches)", "layout.schedule = gpipe", "train.batch = 32"],
    ),
    (
        {"layout.pp": 4, "layout.schedule": "zbv"},
        microbatch_rule("zbv", 4, 1, 16),
        ["layout.schedule = 1f1b", "layout.virtual_stages = 2", "layout.schedule = gpipe"],
    ),
    (
        {"layout.tp": 2, "train.async_tp": True},
        "train.async_tp = true is for sequence parallelism: layout.sp = true, layout.tp above 1",
        ["layout.sp = true", "train.async_tp = false"],
    ),
    (
        {"layout.tp": 2, "train.precision": "bf16", "train.fp8": True},
        "layout.tp = 2 cuts linear layers, which train.fp8 = true needs whole",
        ["train.fp8 = false", "layout.tp = 1"],
    ),
    (
        {"layout.tp": 3, "layout.pp": 100},
        "layout.tp = 3 must divide model.n_heads = 8",
        ["layout.tp = 2 with layout.pp = 10", "layout.tp = 4 with layout.pp = 10"],
    ),
]


@pytest.mark.parametrize(("changes", "rule", "legal"), BROKEN, ids=lambda v: str(v)[:40])
def test_each_rule_and_its_nearest_legal_values(changes, rule, legal):
    parts = case(changes)
    assert broken(*parts) == rule
    assert nearest_legal(*parts) == legal
    for proposal in nearest_legal(*parts, count=20):
        assert broken(*applied(parts, proposal)) is None


def test_every_rule_is_tried_above():
    tried = set()
    for changes, _, _ in BROKEN:
        parts = case(changes)
        tried.add(next(rule.check for rule in RULES if rule.check(*parts)))
    assert tried == {rule.check for rule in RULES}


def test_a_legal_layout_needs_no_change_and_three_rules_are_met_at_once():
    assert nearest_legal(*case({})) == []
    parts = case({"layout.tp": 3, "layout.microbatch": 5, "layout.dp_shard": 4})
    assert nearest_legal(*parts)[0] == (
        "layout.tp = 2 with layout.microbatch = 4 and layout.zero = 1"
    )


def test_schedules_have_the_names_of_the_config():
    assert set(SCHEDULES) == set(get_args(Schedule))


def test_divisors():
    for value in range(1, 200):
        assert divisors(value) == tuple(d for d in range(1, value + 1) if value % d == 0)
    assert divisors(10**18)[:3] == (1, 2, 4)


DEGREE = st.one_of(st.integers(1, 9), st.sampled_from([16, 48, 64, 4096, 10**9 + 7, 10**18]))
LAYOUTS = st.builds(
    Layout,
    **dict.fromkeys((*AXES, "ep", "virtual_stages", "microbatch"), DEGREE),
    etp=st.sampled_from([None, 1, 2]),
    zero=st.sampled_from([0, 1, 2, 3]),
    sp=st.booleans(),
    cp_kind=st.sampled_from(["ring", "ulysses"]),
    schedule=st.sampled_from(get_args(Schedule)),
    recompute=st.sampled_from(["none", "selective", "full"]),
    offload=st.sampled_from(["none", "optimizer", "params"]),
)
TRAINS = st.builds(
    TrainSpec,
    batch=st.one_of(st.integers(1, 64), st.sampled_from([256, 1024, 2**20])),
    seq_len=st.sampled_from([1, 7, 96, 250, 256, 4096, 10**9]),
    compile=st.booleans(),
)
MODELS = st.sampled_from(
    [
        model_spec(**MODEL),
        model_spec(preset="llama-3-8b"),
        model_spec(preset="smollm2-135m"),
        model_spec(**MODEL | {"n_layers": 1, "n_kv_heads": 1, "vocab_size": 257}),
    ]
)


@settings(max_examples=200, deadline=None)
@given(MODELS, TRAINS, LAYOUTS)
def test_what_is_proposed_is_legal(model, train, layout):
    rule = broken(model, train, layout)
    proposals = nearest_legal(model, train, layout, count=6)
    assert len(proposals) == len(set(proposals)) <= 6
    if rule is None:
        assert proposals == []
    for proposal in proposals:
        assert broken(*applied((model, train, layout), proposal)) is None, proposal


SMALL = st.sampled_from([1, 2, 3, 4, 6, 8])
KEYS = {
    **{f"layout.{key}": SMALL for key in ("pp", "dp_replicate", "dp_shard", "cp", "tp")},
    **{f"layout.{key}": SMALL for key in ("virtual_stages", "microbatch")},
    "layout.zero": st.sampled_from([0, 1, 2, 3]),
    "layout.sp": st.sampled_from(["true", "false"]),
    "layout.cp_kind": st.sampled_from(["ring", "ulysses"]),
    "layout.schedule": st.sampled_from(get_args(Schedule)),
    "train.batch": st.sampled_from([1, 6, 16, 64]),
    "train.seq_len": st.sampled_from([96, 250, 4096]),
    "model.n_kv_heads": st.sampled_from([1, 2, 4]),
}


@settings(max_examples=100, deadline=None)
@given(st.fixed_dictionaries({}, optional=KEYS), st.sampled_from([CPU, GPUS]))
def test_a_user_who_follows_a_refusal_is_not_refused_again(changes, machine):
    overrides = [f"{key}={value}" for key, value in changes.items()]
    config = load_config(None, overrides)
    try:
        layout = resolve_layout(config, machine)
    except ConfigError as error:
        _, _, legal = str(error).partition("; nearest legal: ")
        for proposal in filter(None, re.split(", | or ", legal)):
            more = [f"{key}={value}" for key, value in written(proposal).items()]
            resolve_layout(load_config(None, [*overrides, *more]), machine)
    else:
        assert broken(config.model, config.train, layout) is None


@pytest.mark.parametrize("schedule", get_args(Schedule))
def test_a_microbatch_left_out_keeps_a_pipeline_busy(schedule):
    virtual = SCHEDULES[schedule].min_virtual
    overrides = ["layout.pp=2", f"layout.schedule={schedule}", "model.n_layers=8"]
    config = load_config(None, [*overrides, f"layout.virtual_stages={virtual}", "train.batch=8"])
    layout = resolve_layout(config, CPU)
    count = layout.microbatches(config.train.batch)
    assert layout.dp == 1
    # Four for each rank where the schedule takes so many.
    assert count == 8 if microbatch_rule(schedule, 2, virtual, 8) is None else count >= 1
    twice = resolve_layout(
        load_config(None, [*overrides, f"layout.virtual_stages={virtual}", "train.batch=32"]),
        CPU,
    )
    # Nothing larger would do: the budget is 4 sequences, a rank's share 32.
    assert twice.microbatch == (4 if microbatch_rule(schedule, 2, virtual, 8) is None else 1)


def test_a_microbatch_is_found_where_there_are_too_few_for_the_ranks():
    config = load_config(
        None, ["layout.pp=4", "layout.schedule=naive", "train.batch=2", "layout.dp_shard=1"]
    )
    assert resolve_layout(config, CPU).microbatch == 2
    with pytest.raises(ConfigError, match=r"nearest legal: layout\.schedule = gpipe"):
        resolve_layout(load_config(None, ["layout.pp=4", "train.batch=2"]), CPU)


@pytest.mark.parametrize(
    ("degrees", "rows"),
    [
        ([], 4),
        (["layout.cp=2"], 8),
        (["layout.tp=2", "layout.sp=true"], 8),
        (["layout.tp=2"], 4),  # a token's row of the stream is whole on both
    ],
)
def test_the_budget_of_a_microbatch_is_of_the_tokens_that_a_rank_has(degrees, rows):
    config = load_config(None, [*degrees, "train.batch=32", "train.seq_len=256"])
    assert resolve_layout(config, CPU).microbatch == rows


def test_what_is_left_out():
    def resolved(*overrides):
        return resolve_layout(load_config(None, [*overrides, "model.n_kv_heads=4"]), GPUS)

    assert resolved("layout.zero=3").dp_shard == 8
    assert resolved("layout.tp=4").dp_replicate == 2
    assert resolved("layout.tp=2", "layout.cp=2", "layout.zero=1").dp_shard == 2
    assert resolved("layout.dp_shard=2", "layout.zero=2").world == 2
    assert not resolved("layout.sp=true").sp
    assert resolved("layout.sp=true", "layout.tp=2").sp
    with pytest.raises(ConfigError, match="needs a multiple of 3 ranks"):
        resolved("layout.tp=3")


def test_properties():
    layout = Layout(pp=2, dp_replicate=3, dp_shard=4, cp=5, tp=7, virtual_stages=2, zero=1)
    assert layout.world == layout.mesh.size == 840
    assert (layout.dp, layout.model_ranks, layout.stages) == (12, 70, 4)
    assert layout.shard_ranks == 20
    assert Layout(cp=5).shard_ranks == 1
    assert layout.is_pipelined
    assert not Layout(tp=2).is_pipelined


def work_of(function):
    """Return how many functions are called, and how many lines of Python are run."""
    done = {"call": 0, "line": 0}

    def note(frame, event, value):
        if event in done:
            done[event] += 1
        return note

    before = sys.gettrace()
    try:
        sys.settrace(note)
        function()
    finally:
        sys.settrace(before)
    return done["call"], done["line"]


def test_a_legal_layout_is_checked_in_few_lines():
    """The planner asks for thousands: 4 us each, as each rule compares before it words anything."""
    parts = case({"layout.pp": 2, "layout.tp": 2, "layout.cp": 2, "layout.zero": 2})
    assert broken(*parts) is None
    calls, lines = work_of(lambda: broken(*parts))
    assert len(RULES) < calls < 2 * len(RULES)
    assert lines < 7 * len(RULES)
