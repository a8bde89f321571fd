"""Groups of parameters by name: their rate and decay, their refusals, and the same on shards."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from conformance_cases import make
from meshwright.errors import ConfigError
from meshwright.interop.importing import import_values
from meshwright.prove.case import GROUPED
from meshwright.prove.suite import Suite
from meshwright.spec.dump import to_toml
from meshwright.spec.groups import GroupSpec, group_of
from meshwright.spec.loading import load_config
from meshwright.spec.optimizers import OPTIMIZERS
from meshwright.spec.parts import Part
from meshwright.spec.training import OptimizerSpec
from meshwright.training.optimizer import build_optimizer, set_learning_rate, step_scaled
from ranks import on_ranks
from saved_steps import check_read_by

FINITE = torch.tensor(1.0, dtype=torch.float64)
PARTS = [
    Part("embed.weight", (6, 4), ("vocab", "dim")),
    Part("layers.0.mlp.up.weight", (8, 4), ("ffn", "dim")),
    Part("layers.1.mlp.up.weight", (8, 4), ("ffn", "dim")),
    Part("norm.weight", (4,), ("dim",)),
]
GROUPS = (
    GroupSpec(match="layers.1.*", lr_scale=0.0),
    GroupSpec(match="layers.*", lr_scale=0.5),
    GroupSpec(match="norm.*", lr_scale=2.0, weight_decay=0.3),
)


def after_a_step(spec, rate, part):
    """A parameter by itself, after a step of the optimizer without groups."""
    plain = spec.model_copy(update={"groups": ()})
    (weight,) = stepped(plain, rate, [part])
    return weight


def stepped(spec, rate, parts):
    weights = []
    for part in parts:
        torch.manual_seed(len(part.name))
        weight = nn.Parameter(torch.randn(part.shape))
        weight.grad = torch.randn(part.shape)
        weights.append(weight)
    optimizer = build_optimizer(weights, parts, spec)
    set_learning_rate(optimizer, rate)
    step_scaled(optimizer, FINITE, 1.0, 0.0)
    return [weight.detach() for weight in weights]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_group_is_updated_by_its_own_rate_and_decay(name):
    spec = OptimizerSpec(name=name, weight_decay=0.2, groups=GROUPS)
    embed, first, second, norm = stepped(spec, 0.01, PARTS)
    assert torch.equal(embed, after_a_step(spec, 0.01, PARTS[0]))
    assert torch.equal(first, after_a_step(spec, 0.005, PARTS[1]))
    torch.manual_seed(len(PARTS[2].name))
    assert torch.equal(second, torch.randn(PARTS[2].shape))
    # Vectors do not decay by themselves: only a group can have them do so.
    torch.manual_seed(len(PARTS[3].name))
    shrunk = torch.randn(PARTS[3].shape) * 0.02 * 0.3
    torch.testing.assert_close(norm, after_a_step(spec, 0.02, PARTS[3]) - shrunk)


def test_the_first_group_that_matches_counts():
    assert group_of(GROUPS, "layers.1.mlp.up.weight") is GROUPS[0]
    assert group_of(GROUPS, "layers.11.mlp.up.weight") is GROUPS[1]
    assert group_of(GROUPS, "embed.weight") is None


def test_rates_of_the_schedule_keep_their_factor():
    weights = [nn.Parameter(torch.ones(part.shape)) for part in PARTS]
    optimizer = build_optimizer(weights, PARTS, OptimizerSpec(lr=0.1, groups=GROUPS))
    for rate in (0.1, 0.4):
        set_learning_rate(optimizer, rate)
        rates = {group["lr_scale"]: group["lr"] for group in optimizer.param_groups}
        assert rates == {scale: scale * rate for scale in (1.0, 0.5, 0.0, 2.0)}


REFUSED = {
    '[{match="attn.q"}]': r"'attn.q' .* matches no trained parameter; .*: layers\.\*\.attn\.q\.w",
    '[{match="embedding*"}]': "nearest legal: embed.weight",
    '[{match="*"}, {match="embed*"}]': "parameters of earlier groups only.* narrower .* first",
    '[{match="*", lr_scal=1}]': r"groups\.0\.lr_scal \(.*nearest legal: lr_scale",
    '[{match="*", lr_scale="1"}]': r"groups\.0\.lr_scale = '1' \(.*\) must be a number",
    '[{match="*", weight_decay=-1}]': r"groups\.0\.weight_decay = -1 .* greater than or equal",
    "[{lr_scale=1}]": r"groups\.0\.match is missing",
    '{match="*"}': "must be a list of tables",
    "[1]": "must be a list of tables",
}


@pytest.mark.parametrize("value", REFUSED)
def test_groups_are_refused_with_what_is_near(value):
    with pytest.raises(ConfigError, match=REFUSED[value]):
        load_config(None, [f"optimizer.groups={value}"])


def test_frozen_parameters_are_in_no_group():
    with pytest.raises(ConfigError, match=r"'embed\.weight' .* matches no trained parameter"):
        load_config(None, ["lora.rank=2", 'optimizer.groups=[{match="embed.weight"}]'])
    load_config(None, ["lora.rank=2", 'optimizer.groups=[{match="*.attn.*", lr_scale=2}]'])


def test_a_file_has_a_table_for_each_group(tmp_path):
    file = tmp_path / "run.toml"
    tables = '[[optimizer.groups]]\nmatch = "layers.*"\n' * 2
    file.write_text(tables)
    with pytest.raises(ConfigError, match=r"\(run\.toml:1\) matches parameters of earlier"):
        load_config(file)
    file.write_text('[optimizer]\nlr = 0.1\n[[optimizer.groups]]\nmatch = "*norm*"\nlr_scale = 2\n')
    config = load_config(file)
    assert config.optimizer.groups == (GroupSpec(match="*norm*", lr_scale=2.0),)
    file.write_text(to_toml(config))
    assert load_config(file).optimizer == config.optimizer


CASES = [
    ("shard2 zero3 mb2", "llama", GROUPED),
    ("tp2 sp mb2", "biased", GROUPED),
    ("shard2 zero2 mb2", "llama", OptimizerSpec(name="muon", groups=GROUPED.groups)),
    *(
        pytest.param(*case, GROUPED, marks=pytest.mark.slow)
        for case in [
            ("dp2 mb2", "llama"),
            ("shard2 zero1 mb2", "tied"),
            ("shard2 zero2 ep2 mb2", "qwen2_moe"),
            ("pp2 1f1b mb1", "tied"),
            ("shard2 zero1 mb1 offload-optimizer", "llama"),
        ]
    ),
]


def proven(world, case):
    return Suite(world).prove(case)


@pytest.mark.often(1)
@pytest.mark.parametrize(("label", "model", "spec"), CASES, ids=str)
def test_layouts_update_as_one_device_does(label, model, spec):
    case = replace(make(label, model), optimizer=spec)
    for verdicts in on_ranks(case.layout.world, proven, case=case):
        assert [verdict for verdict in verdicts if not verdict.passed] == []


@pytest.mark.slow
def test_fsdp2_updates_as_one_device_does():
    case = replace(make("shard2 zero3 mb2", "llama"), optimizer=GROUPED, fsdp2=True)
    for verdicts in on_ranks(2, proven, case=case):
        assert [verdict for verdict in verdicts if not verdict.passed] == []


@pytest.mark.slow
@pytest.mark.parametrize("label", ["shard2 zero3 mb1", "tp2 sp mb1", "pp2 1f1b mb1"])
def test_a_step_is_read_bit_for_bit_by_any_layout(label, tmp_path):
    check_read_by(("mb1",), label, GROUPED, str(tmp_path), rtol=1e-4, atol=1e-5)


MEGATRON = {
    "num-layers": 2,
    "hidden-size": 64,
    "num-attention-heads": 4,
    "seq-length": 64,
    "global-batch-size": 8,
    "lr": 4e-4,
    "min-lr": 4e-5,
    "decoupled-lr": 1e-4,
}


@pytest.mark.parametrize("is_tied", [False, True])
def test_megatron_s_rate_of_the_ends_is_two_groups(is_tied):
    untied = {} if is_tied else {"untie-embeddings-and-output-weights": True}
    values = {**MEGATRON, **untied, "decoupled-min-lr": 1e-5}
    imported = import_values(values, "megatron", base={}, devices=1, accepted=("all",))
    names = ["embed.weight"] if is_tied else ["embed.weight", "head.weight"]
    groups = imported.given["optimizer"]["groups"].value
    assert groups == [{"match": name, "lr_scale": 0.25} for name in names]


@pytest.mark.parametrize("stated", [{"decoupled-min-lr": 0.0}, {}], ids=["stated", "by default"])
def test_a_lowest_rate_of_the_ends_with_another_share_is_refused(stated):
    """Where it is not stated, Megatron takes min-lr: 4e-5 of 1e-4, where others fall to a tenth."""
    report = import_values(MEGATRON | stated, "megatron", base={}, devices=1).report
    (row,) = [row for row in report.refused if row.key == "decoupled-min-lr"]
    assert row.is_default == (not stated)
    assert row.note.endswith("the same share of the highest; nearest: 1e-05")


def test_ends_that_fall_to_nothing_need_no_lowest_rate():
    values = {**MEGATRON, "min-lr": 0.0}
    imported = import_values(values, "megatron", base={}, devices=1)
    assert "decoupled-min-lr" not in {row.key for row in imported.report.refused}
