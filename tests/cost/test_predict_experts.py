"""Rows with experts: what is known of their models, what travels, and what is refused."""

from itertools import combinations

import pytest

from meshwright.cost.calibration import Calibration, shipped_calibration
from meshwright.cost.catalogue import cluster_of, find_device
from meshwright.cost.network import Network, Picks
from meshwright.cost.rows import predict_row, read_row

ROW = {
    "id": "one",
    "gpu": "H100",
    "n_gpus": 16,
    "framework": "Megatron-Core via Megatron-Bridge",
    "model": "Qwen3_30B_a3B",
    "layers": 48,
    "hidden": 2048,
    "heads": 32,
    "kv_heads": 4,
    "head_dim": 128,
    "ffn": 6144,
    "seq": 4096,
    "gbs": 512,
    "mbs": 1,
    "tp": 1,
    "pp": 1,
    "ep": 8,
    "experts": 128,
    "moe_ffn": 768,
    "topk": 8,
    "precision": "BF16",
}


def test_a_row_with_experts_is_predicted():
    case = read_row(ROW, shipped_calibration())
    assert case.layout.ep == 8
    assert (case.setting.model.experts, case.setting.model.expert_ffn_dim) == (128, 768)
    found = predict_row(ROW, shipped_calibration())
    alone = predict_row({**ROW, "ep": 1}, shipped_calibration())
    assert found["peak_mem_gib"] < alone["peak_mem_gib"]
    pattern = "([0]*3+[1]*45)"
    some = read_row({**ROW, "moe_layer_freq": pattern}, shipped_calibration()).setting.model
    assert [some.has_experts(some.layer(at)) for at in range(5)] == [False] * 3 + [True] * 2


def test_a_row_with_latent_attention_is_predicted():
    sizes = {"kv_lora_rank": 64, "qk_nope_head_dim": 48, "qk_rope_head_dim": 16, "v_head_dim": 40}
    row = {**ROW, **sizes, "shared_ffn": 768, "moe_layer_freq": "([0]*1+[1]*47)"}
    model = read_row(row, shipped_calibration()).setting.model
    assert (model.head_dim, model.n_kv_heads, model.q_lora_rank) == (64, 32, 0)
    assert not model.has_experts(model.layer(0))
    found = [predict_row({**row, **more}, shipped_calibration()) for more in ({}, {"heads": 64})]
    assert found[0]["step_time_s"] < found[1]["step_time_s"]


def test_a_row_that_names_a_known_model_needs_no_sizes():
    kept = {key: ROW[key] for key in ("id", "n_gpus", "framework", "seq", "gbs", "mbs", "ep")}
    row = {**kept, "model": "GPT OSS 120B", "gpu": "B300", "precision": "MXFP8"}
    case = read_row(row, shipped_calibration())
    model = case.setting.model
    assert (model.family, model.n_layers, model.experts, model.top_k) == ("gpt_oss", 36, 128, 4)
    assert "layers 36" in " ".join(case.assumed)
    named = read_row({**ROW, "model": "DeepSeekV3"}, shipped_calibration())
    assert (named.setting.model.dim, named.setting.model.vocab_size) == (2048, 129280)


def test_a_token_goes_once_to_each_rank_that_has_some_of_its_experts():
    """The share of places, counted over all ways to pick experts."""
    picks = list(combinations(range(8), 3))
    for parts in (1, 2, 4, 8):
        counted = sum(len({one * parts // 8 for one in pick}) for pick in picks) / len(picks)
        assert Picks(8, 3).share(parts) == pytest.approx(counted / 3)


def test_tokens_that_travel_once_travel_sooner():
    cluster = cluster_of(find_device("h100-sxm"), 16)
    network = Network(
        cluster, Calibration({**shipped_calibration().constants, "h100.times.once": 1})
    )
    plain = network.seconds("all_to_all", 1e8, 16, 1, "ep")
    once = network.seconds("all_to_all", 1e8, 16, 1, "ep", Picks(128, 8))
    assert network.seconds("all_to_all", 1e8, 16, 1, "ep", Picks(128, 1)) <= plain * 1.1
    assert once < plain / 2


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"kv_lora_rank": 512}, "has latent attention, but lacks qk_nope_head_dim and"),
        ({"ep": 32}, "ep 32 does not divide the 16 ranks that share experts"),
        ({"ep": 3}, "ep 3 does not divide"),
        ({"edp": 3}, "x edp 3 does not divide the"),
        ({"topk": None}, "lacks topk or moe_ffn"),
        ({"moe_layer_freq": "[1]*48"}, "only ([0]*n+[1]*m) is read"),
        ({"moe_layer_freq": "([0]*3+[1]*4)"}, "moe_layer_freq has 7 layers, the row 48"),
    ],
)
def test_a_row_with_experts_that_cannot_be_priced_says_why(change, why):
    assert why in predict_row({**ROW, **change}, shipped_calibration())["refused"]
