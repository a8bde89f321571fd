"""Prices that are kept from one plan to the next: what is found does not depend on them."""

import pytest

from meshwright.planner.plan import plan
from meshwright.planner.prices import KnownPrices
from meshwright.spec.loading import load_config

WORDS = ("model.preset=llama-3-8b", "cluster.preset=h100-sxm", "cluster.nodes=1")


def found(*words, prices=None):
    made = plan(load_config(None, [*WORDS, *words]), 5, prices=prices).found
    ranked = [(one.layout, one.time.total, one.memory.total) for one in made.ranked]
    return ranked, made.considered, made.reasons


@pytest.mark.slow
@pytest.mark.parametrize(
    "questions",
    [
        (["train.batch=256"], ["train.batch=512"], ["train.batch=64", "train.seq_len=16384"]),
        (["train.batch=256"], ["train.batch=256", "layout.tp=2"], ["train.batch=512"]),
        (["train.batch=256"], ["cluster.nodes=2", "train.batch=512"], ["train.batch=128"]),
        # Weights on the host are sent for each microbatch.
        (["layout.offload=params", "train.batch=64"], ["layout.offload=params", "train.batch=512"]),
    ],
    ids=["batch and length", "a key that is fixed", "devices", "weights on the host"],
)
def test_a_plan_is_the_same_after_others(questions):
    prices = KnownPrices()
    for words in questions:
        assert found(*words, prices=prices) == found(*words)


@pytest.mark.slow
def test_settings_that_differ_by_their_batch_share_prices():
    prices = KnownPrices()
    configs = [load_config(None, [*WORDS, f"train.batch={batch}"]) for batch in (256, 512)]
    settings = [plan(config, 1, prices=prices).setting for config in configs]
    assert prices.of(settings[0], {}) is prices.of(settings[1], {})
    other = plan(load_config(None, [*WORDS, "train.seq_len=2048"]), 1, prices=prices).setting
    assert prices.of(other, {}) is not prices.of(settings[0], {})
    assert prices.of(settings[0], {"tp": 2}) is not prices.of(settings[0], {})


@pytest.mark.slow
def test_no_rank_waits_a_negative_time():
    """The stage with the head is slightly slower, and most of the microbatches are extrapolated."""
    words = ("model.preset=llama-3-70b", "cluster.preset=h100-sxm", "cluster.nodes=8")
    config = load_config(None, [*words, "train.batch=1024", "layout.schedule=interleaved_1f1b"])
    ranked = plan(config, 10).found.ranked
    assert len(ranked) == 10
    for one in ranked:
        for causes in one.time.ranks:
            assert min(causes.values()) >= 0, one.layout.label
            assert sum(causes.values()) <= one.time.total * (1 + 1e-9)
