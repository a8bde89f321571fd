"""GPT-NeoX's configs, key by key."""

import json

import pytest

from meshwright.interop.importing import import_files
from test_interop import config_of, entry, imported

NEOX = """{
  "pipe-parallel-size": 1, "model_parallel_size": 2,
  "num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "seq_length": 32,
  "max_position_embeddings": 64, "pos_emb": "rotary", "rotary_pct": 0.25,
  "no_weight_tying": true, "gpt_j_residual": true, "attention_config": [[["flash"], 2]],
  # comments, and trailing commas
  "optimizer": {"type": "Adam", "params": {"lr": 6e-4, "betas": [0.9, 0.95], "eps": 1.0e-8}},
  "min_lr": 0.00006, "train_iters": 100, "lr_decay_iters": 100, "lr_decay_style": "cosine",
  "warmup": 0.05, "weight_decay": 0.1, "train_micro_batch_size_per_gpu": 4,
  "gradient_accumulation_steps": 2, "fp16": {"enabled": true, "loss_scale": 0},
  "zero_optimization": {"stage": 1}, "checkpoint_activations": true, "split": "949,50,1",
}"""


def test_gpt_neox(tmp_path):
    found = imported(tmp_path, NEOX, "a.yml", devices=4, is_fixed=True)
    config = config_of(found)
    model, optimizer, layout = config.model, config.optimizer, config.layout
    assert (model.family, model.dim, model.rotary_pct, model.ffn_dim) == ("neox", 64, 0.25, 256)
    assert (model.parallel_residual, model.tie_embeddings) == (True, False)
    assert (layout.tp, layout.pp, layout.dp_shard, layout.zero) == (2, 1, 2, 1)
    assert (config.train.batch, layout.microbatch, layout.recompute) == (16, 4, "full")
    assert (optimizer.weight_decay, optimizer.min_lr_ratio) == (0.1, pytest.approx(0.1))
    assert (optimizer.warmup_steps, optimizer.schedule) == (5, "cosine")
    assert config.data.validation == pytest.approx(0.051)


@pytest.mark.parametrize(("is_set", "dtype"), [("true", "int8"), ("false", "fp32")])
def test_gpt_neox_s_optimizer_of_bitsandbytes_keeps_8_bits(tmp_path, is_set, dtype):
    content = NEOX.replace("{", f'{{"use_bnb_optimizer": {is_set},', 1)
    optimizer = config_of(imported(tmp_path, content, "a.yml", devices=4, is_fixed=True)).optimizer
    assert (optimizer.name, optimizer.state_dtype) == ("adamw", dtype)


def test_gpt_neox_pads_the_vocabulary(tmp_path):
    content = NEOX.replace("{", '{"tokenizer_type": "GPT2BPETokenizer",', 1)
    config = config_of(imported(tmp_path, content, "a.yml", devices=4, is_fixed=True))
    assert config.data.tokenizer == "gpt2"
    assert (config.model.vocab_size, config.model.vocab_rows) == (50257, 50432)  # by 128 x 2


def test_gpt_neox_llama_sizes(tmp_path):
    content = """{"num_layers": 2, "hidden_size": 4096, "intermediate_size": 32768,
      "mlp_multiple_of": 256, "num_attention_heads": 32, "pos_emb": "rotary", "norm": "rmsnorm",
      "activation": "swiglu", "use_bias_in_attn_linear": false, "use_bias_in_mlp": false,
      "rms_norm_epsilon": 1.0e-6, "rotary_pct": 1}"""
    model = config_of(imported(tmp_path, content, "a.yml", devices=1)).model
    assert (model.family, model.ffn_dim, model.norm_eps) == ("llama", 11008, 1e-6)
    assert not model.attention_bias
    assert not model.mlp_bias
    assert model.tie_embeddings  # GPT-NeoX's default


@pytest.mark.parametrize(
    ("other", "gas", "why"),
    [
        ("", 1, None),
        ('"gradient_accumulation_steps": 2, ', 2, None),
        ('"train_batch_size": 16, ', 2, None),
        ("", 2, "accumulates 1; nearest: gas = 1, or gradient_accumulation_steps = 2"),
        ('"gradient_accumulation_steps": 2, ', 3, "accumulates 2; nearest: gas = 2"),
    ],
)
def test_gas_is_held_against_the_accumulation(tmp_path, other, gas, why):
    """GPT-NeoX had the key, as Pythia's configs do, and overwrote what a file has for it."""
    content = NEOX.replace('"gradient_accumulation_steps": 2,', f'{other}"gas": {gas},')
    found = imported(tmp_path, content, "a.yml", devices=4, is_fixed=True)
    assert [e.key for e in found.report.refused] == ["gas"][: why is not None]
    if why is None:
        assert config_of(found).train.batch == (8 if gas == 1 else 16)
    else:
        assert why in entry(found, "gas").note


def test_gpt_neox_saves_by_either_name_of_the_interval(tmp_path):
    saves = {"save": "steps", "load": "steps", "save_interval": 7}
    content = NEOX.replace("{", "{" + json.dumps(saves)[1:-1] + ",", 1)
    found = imported(tmp_path, content, "a.yml", devices=4, is_fixed=True)
    assert config_of(found).checkpoint.every == 7
    assert "meshwright train --resume RUN" in entry(found, "save").note


@pytest.mark.parametrize(
    ("old", "new", "key"),
    [
        ('"pos_emb": "rotary", ', "", "pos_emb"),  # its default is learned
        ('"pos_emb": "rotary"', '"pos_emb": "alibi"', "pos_emb"),
        ('"flash"', '"mamba"', "attention_config"),
        ('"lr_decay_iters": 100', '"lr_decay_iters": 50', "lr_decay_iters"),
        ('"num_layers": 2', '"num_layers": 2, "norm": "rmsnorm"', "rotary_pct"),
        ("1.0e-8", "1.0e_8", "optimizer.params.eps"),
        ('"split": "949,50,1"', '"split": "all"', "split"),
        ('"model_parallel_size": 2', '"model_parallel_size": 8', "train_micro_batch_size_per_gpu"),
        (
            '"num_layers": 2',
            '"num_layers": 2, "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.01}}',
            "scheduler.params.warmup_max_lr",
        ),
    ],
)
def test_gpt_neox_refusals(tmp_path, old, new, key):
    assert old in NEOX
    found = imported(tmp_path, NEOX.replace(old, new), "a.yml", devices=4, is_fixed=True)
    assert key in [e.key for e in found.report.refused]


def test_gpt_neox_files_are_merged(tmp_path):
    one, two = tmp_path / "one.yml", tmp_path / "two.yml"
    one.write_text(NEOX)
    two.write_text('{"log-interval": 7, "train-iters": 100}')
    config = config_of(import_files([one, two], devices=2, is_fixed=True))
    assert config.train.log_every == 7
    two.write_text('{"log-interval": 7, "train-iters": 90}')
    report = import_files([one, two], devices=2, is_fixed=True).report
    assert report.refused[0].note == "100 in one.yml, 90 in two.yml; keep one"
