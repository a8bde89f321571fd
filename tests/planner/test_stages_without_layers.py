"""Pipelines of more stages than layers: the head, and the embedding, have a stage of their own."""

from dataclasses import replace

import pytest

from meshwright.cli import main
from meshwright.cost.price import price
from meshwright.interop.trainers import trainer_named
from meshwright.layout import Layout, broken
from meshwright.layout.rules import most_stages
from meshwright.planner.for_trainer import plan_for
from meshwright.planner.plan import cost_inputs_of, plan
from meshwright.planner.prices import worst_estimate
from meshwright.program.stages import split_stages
from meshwright.prove.case import Case
from meshwright.prove.draw import draw
from meshwright.prove.matrix import matrix
from meshwright.prove.shrink import shrink
from meshwright.runtime.proofs.proof import prove_cases
from meshwright.spec.loading import load_config
from meshwright.spec.resolve import model_spec
from meshwright.spec.training import TrainSpec
from runs import clean_environ

TRAIN = TrainSpec(batch=8, seq_len=16, seed=5)


def small(layers, family="llama", **keys):
    sizes = {"dim": 32, "n_heads": 4, "n_kv_heads": 2, "ffn_dim": 64, "vocab_size": 72}
    return model_spec(family=family, n_layers=layers, **sizes, **keys)


@pytest.mark.parametrize("layers", [1, 2, 3, 6])
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_the_ends_are_alone_only_where_layers_do_not_suffice(layers, family):
    for count in range(1, most_stages(layers) + 1):
        stages = split_stages(small(layers, family), count, 16)
        assert [layer for stage in stages for layer in stage.layers] == list(range(layers))
        empty = [stage for stage in stages if not stage.layers]
        assert len(empty) == max(count - layers, 0)
        assert all(stage.is_first or stage.is_last for stage in empty)
        assert len(empty) != 1 or empty[0].is_last
    with pytest.raises(ValueError, match="stages of"):
        split_stages(small(layers, family), most_stages(layers) + 1, 16)


@pytest.mark.parametrize(
    ("layers", "label", "family", "tied"),
    [
        (1, "pp2 1f1b mb2", "llama", False),
        (2, "pp2 interleaved_1f1b v2 mb2", "gemma2", True),
        (3, "pp2 zbv v2 mb2 recompute-full", "llama", True),
        pytest.param(2, "shard2 zero3 pp4 1f1b mb1", "qwen3", False, marks=pytest.mark.slow),
        pytest.param(2, "tp2 sp pp4 gpipe mb2", "gemma2", True, marks=pytest.mark.slow),
        pytest.param(3, "shard2 zero2 pp2 dualpipev v2 mb1", "llama", True, marks=pytest.mark.slow),
    ],
)
def test_they_compute_the_same(layers, label, family, tied):
    case = Case(small(layers, family, tie_embeddings=tied), TRAIN, Layout.parse(label))
    assert broken(case.model, case.train, case.layout) is None
    (outcome,) = prove_cases([case], clean_environ(), lambda outcome: None)
    assert outcome.verdicts
    assert not [verdict for verdict in outcome.verdicts if not verdict.passed]


@pytest.mark.slow
def test_a_dry_run_has_the_predicted_bytes_and_messages(capsys):
    keys = [f"model.{key}={value}" for key, value in small(2).model_dump().items() if key in SIZES]
    layout = ["layout.pp=2", "layout.schedule=zbv", "layout.virtual_stages=2"]
    rest = ["train.batch=8", "train.seq_len=64", "layout.microbatch=1", "layout.dp_replicate=1"]
    assert main(["simulate", *keys, *layout, *rest]) == 0
    assert "collectives and FLOPs are the program's, every one; so is memory" in (
        capsys.readouterr().out
    )


SIZES = ("dim", "n_layers", "n_heads", "n_kv_heads", "ffn_dim")


def test_a_small_proof_of_a_large_model_keeps_them():
    """126 layers in 128 stages, as Llama 3 405B was trained."""
    model = small(126)
    layout = Layout.parse("tp8 pp16 interleaved_1f1b v8 mb1")
    for case in shrink(model, TRAIN.model_copy(update={"batch": 64}), layout):
        if case.layout.is_pipelined:
            assert case.layout.stages - case.model.n_layers == 2


def test_the_table_and_random_layouts_have_some():
    for cases in (matrix(4), matrix(8), draw(3, 100)):
        assert {1, 2} <= {case.layout.stages - case.model.n_layers for case in cases}


@pytest.mark.slow
def test_the_published_layout_of_llama_3_405b_is_the_better_one():
    """Before, its pipeline was refused, and the best for 16 ranks had no virtual stages."""
    words = ["model.preset=llama-3.1-405b", "cluster.preset=h100-sxm", "cluster.nodes=2048"]
    words += ["layout.tp=8", "layout.pp=16", "train.batch=2048", "train.seq_len=8192"]
    virtual = ["layout.schedule=interleaved_1f1b", "layout.virtual_stages=8"]
    plain = ["layout.schedule=1f1b", "layout.virtual_stages=1"]
    seconds = [
        plan(load_config(None, [*words, *schedule])).best.time.total
        for schedule in (virtual, plain)
    ]
    assert seconds[0] < 0.9 * seconds[1]


@pytest.mark.slow
def test_another_trainer_gets_only_stages_that_it_can_make():
    """Its best layout had 24 stages of 80 layers, which Megatron-LM refuses."""
    words = ["model.preset=llama-3-70b", "cluster.preset=h100-sxm", "cluster.nodes=64"]
    config = load_config(None, [*words, "train.batch=512", "train.seq_len=8192"])
    trainer = trainer_named("megatron")
    ranked = plan_for(config, trainer, top=3).found.ranked
    assert ranked
    assert not [refusal for one in ranked if (refusal := trainer.refusal(one.layout, 80))]


@pytest.mark.slow
def test_every_drawn_layout_with_them_is_priced():
    """Memory by the walk and in closed form, and time: also offloaded, recomputed, tied."""
    base = cost_inputs_of(load_config(None, ["cluster.preset=h100-sxm"]))
    cases = [case for case in draw(5, 300) if case.layout.stages > case.model.n_layers]
    assert len(cases) > 20
    for case in cases:
        setting = replace(base, model=case.model, train=case.train, optimizer=case.optimizer)
        exact, closed = price(setting, case.layout), worst_estimate(setting, case.layout)
        assert exact.time.total > 0
        assert exact.memory.allocated > 0 < closed.total, case.label
