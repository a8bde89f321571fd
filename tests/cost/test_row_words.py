"""What the words of a row mean: kernels, precisions, parts that are made again, the loss."""

import pytest

from meshwright.cost.calibration import shipped_calibration
from meshwright.cost.price import memory, price, worst_memory
from meshwright.cost.row_words import system_of
from meshwright.cost.rows import predict_row, read_row
from test_predict_rows import ROW

LONG = {**ROW, "framework": "Megatron-Core", "seq": 131072, "gbs": 8, "mbs": 1, "recompute": "none"}


@pytest.mark.parametrize(
    "name",
    ["FA3", "Flash Attention 3", "sdpa", "torch sdpa", "xformers", "triton", "memory_efficient"],
)
def test_an_unknown_attention_is_taken_for_one_that_spares_the_scores(name):
    found = predict_row({**LONG, "attn_impl": name}, shipped_calibration())
    known = predict_row({**LONG, "attn_impl": "flash_attention2"}, shipped_calibration())
    assert f"attention {name!r} priced as flash2" in found["assumed"]
    assert found["peak_mem_gib"] == known["peak_mem_gib"]
    assert not [text for text in known["assumed"] if "attention" in text]


@pytest.mark.parametrize(
    ("name", "kernel"),
    [
        ("torch", "scores"),
        ("eager", "scores"),
        ("fused", "softmax"),
        ("flash_attentionv1.0.8", "flash1"),
        ("FA1", "flash1"),
        ("flash_attention2 + RMS kernel", "flash2"),
        ("FA2", "flash2"),
        ("cuDNN fused attention", "cudnn"),
        ("TE", "cudnn"),
    ],
)
def test_kernels_by_their_names(name, kernel):
    assumed: list[str] = []
    assert system_of({"framework": "Megatron-Core", "attn_impl": name}, assumed).attention == kernel
    assert not assumed


def test_an_attention_that_a_row_does_not_name_is_assumed():
    """Scores, where the system wrote them; not where the layout has no room for them at all."""
    assumed = predict_row(ROW, shipped_calibration())["assumed"]
    assert "attention scores" in assumed
    long = {**LONG, "framework": "Megatron-LM"}
    found = predict_row(long, shipped_calibration())
    assert "attention flash2" in found["assumed"]
    assert found["peak_mem_gib"] < 1000
    said = predict_row({**long, "attn_impl": "torch"}, shipped_calibration())
    assert said["peak_mem_gib"] > 1000


FLOAT8 = {
    **{key: value for key, value in ROW.items() if key != "recompute"},
    "gpu": "H100",
    "framework": "Megatron-Core",
    "recompute": "none",
    "mlp": "gated",
    "ffn": 16384,
}


def test_products_in_float8_keep_their_inputs_in_float8():
    """Of Transformer Engine, by a half or a little less for MX's scales; torchao keeps 16 bits."""

    def kept(framework, precision):
        row = {**FLOAT8, "framework": framework, "precision": precision}
        case = read_row(row, shipped_calibration())
        held = worst_memory(case.setting, case.layout).by_category()
        return held["activations: product"], held["activations: norm"], held["weights"]

    for framework in ("Megatron-Core", "NeMo", "HF loop + TE"):
        plain, mx, half = (kept(framework, name) for name in ("bf16", "MXFP8", "fp8"))
        assert half == (plain[0] / 2, *plain[1:])
        assert mx[0] == pytest.approx(plain[0] * 33 / 64)
    assert kept("torchtitan", "fp8") == kept("torchtitan", "bf16")


def held_and_seconds(change):
    case = read_row({**FLOAT8, "precision": "bf16", **change}, shipped_calibration())
    found = price(case.setting, case.layout)
    return case.layout.recompute, found.memory.by_category(), found.time.causes["recompute"]


def test_selective_recomputation_is_that_of_the_parts_that_a_row_names():
    policy, none, _ = held_and_seconds({})
    assert policy == "none"
    hidden = none["activations: activation"] / 2  # of gate and up: one of them
    for name, product, activation in (
        ("mlp", none["activations: product"] - hidden, 0.0),
        ("selective: mlp", none["activations: product"] - hidden, 0.0),
        ("layernorm", hidden, 2 * hidden),
        ("mlp, layernorm", 0.0, 0.0),
        ("activation", none["activations: product"] - hidden, 2 * hidden),
    ):
        policy, held, seconds = held_and_seconds({"recompute": name})
        assert policy == "selective"
        assert held.get("activations: product", 0.0) == pytest.approx(product), name
        assert held.get("activations: activation", 0.0) == pytest.approx(activation), name
        assert seconds > 0
    by_parts = [held_and_seconds({"recompute": name})[2] for name in ("layernorm", "mlp", "full")]
    assert by_parts == sorted(by_parts)
    listed = held_and_seconds({"recompute": "selective", "recompute_modules": ["mlp", "layernorm"]})
    assert listed == held_and_seconds({"recompute": "mlp, layernorm"})
    scores = {"attn_impl": "torch", "framework": "torchtitan"}
    assert "activations: scores" in held_and_seconds(scores)[1]
    assert "activations: scores" not in held_and_seconds({**scores, "recompute": "core_attn"})[1]


def test_words_of_recomputation_that_nobody_knows_are_assumed_to_be_none():
    found = predict_row({**ROW, "recompute": "every other tuesday"}, shipped_calibration())
    assert "recompute 'every other tuesday' read as none" in found["assumed"]


def test_a_loss_in_chunks_never_has_all_logits():
    def logits(**more):
        row = {**FLOAT8, "precision": "bf16", "tp": 1, "dp": 32, **more}
        case = read_row(row, shipped_calibration())
        held = memory(case.setting, case.layout, case.layout.pp - 1)
        return held.by_category()["logits and loss"], case.assumed

    whole, assumed = logits()
    assert not [text for text in assumed if "chunks" in text]
    for more in ({"loss": "Liger"}, {"loss_impl": "fused linear cross entropy"}):
        cut, assumed = logits(**more)
        assert cut == pytest.approx(whole / 8, rel=1e-6)
        assert "8 chunks of the loss" in assumed
    cut, assumed = logits(notes="compiled blocks and loss, 16 loss chunks")
    assert cut == pytest.approx(whole / 16, rel=1e-6)
    assert not [text for text in assumed if "chunks" in text]
    assert logits(notes="no chunked loss")[0] == whole


def test_a_pipeline_with_more_stages_than_layers_is_priced():
    """Some count the embedding and the head as layers of it; up to two stages have no layer."""
    row = {**FLOAT8, "pp": 8, "vp": 4, "tp": 1, "dp": 8, "precision": "bf16"}
    priced = {
        layers: predict_row({**row, "layers": layers}, shipped_calibration())
        for layers in (24, 30, 31, 32)
    }
    seconds = {layers: priced[layers]["step_time_s"] for layers in priced}
    assert seconds[24] < seconds[30] < seconds[31] < seconds[32]
    # The stages of the embedding and of the head need no time for a layer as well
    assert seconds[32] - seconds[31] > 2 * (seconds[31] - seconds[30])
    assert priced[30]["peak_mem_gib"] < priced[31]["peak_mem_gib"] == priced[32]["peak_mem_gib"]


def test_layers_that_keep_16_bits_are_priced_as_such():
    """Of torchtitan's NVFP4: what the others' products take is kept in four bits."""

    def priced(precision):
        row = {**FLOAT8, "gpu": "GB200", "framework": "torchtitan", "precision": precision}
        case = read_row(row, shipped_calibration())
        held = worst_memory(case.setting, case.layout).by_category()
        return price(case.setting, case.layout).time.total, held["activations: product"]

    layers = FLOAT8["layers"]
    wide, narrow = priced("bf16"), priced("nvfp4")
    half = priced(f"nvfp4 (layers 0-{layers // 2 - 1}), bf16 ({layers // 2}-{layers - 1}, head)")
    assert narrow[1] == pytest.approx(wide[1] * 9 / 32)
    assert half[1] == pytest.approx((wide[1] + narrow[1]) / 2)
    assert narrow[0] < half[0] < wide[0]
    row = {**ROW, "precision": f"nvfp4, bf16 (0-{ROW['layers']})"}
    assert "in 16 bits, but the row has" in predict_row(row, shipped_calibration())["refused"]


def test_a_dispatcher_says_how_often_a_token_is_sent():
    experts = {"experts": 64, "topk": 8, "moe_ffn": 1408, "ep": 8, "tp": 1, "dp": 32}
    row = {**FLOAT8, "precision": "bf16", **experts}

    def once(**more):
        case = read_row({**row, **more}, shipped_calibration())
        return case.setting.system.sends_once, case.assumed

    assert once()[0]
    for name in ("DeepEP", "own (DeepEP)", "HybridEP", "flex"):
        for framework in ("Megatron-Core", "torchtitan"):
            assert once(dispatcher=name, framework=framework)[0], name
    for name in ("NCCL all-to-all", "alltoall", "allgather"):
        assert not once(dispatcher=name)[0], name
    assert not once(gpu="A800-80GB")[0]
    sent, assumed = once(dispatcher="pigeons")
    assert sent
    assert any("dispatcher 'pigeons' priced as" in text for text in assumed)
    seconds = [
        predict_row({**row, "ep": 32, "dispatcher": name}, shipped_calibration())["step_time_s"]
        for name in ("DeepEP", "alltoall")
    ]
    assert seconds[0] < seconds[1]
