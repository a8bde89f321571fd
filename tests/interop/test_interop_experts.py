"""Published models with experts, latent attention and windows, as other systems' configs."""

import pytest

from meshwright.cli import main
from meshwright.spec.dump import given_toml
from meshwright.spec.parts import parameter_count
from meshwright.spec.resolve import model_spec
from test_interop import config_of, entry, imported

# Megatron-LM's examples/mixtral/train_mixtral_8x7b_distributed.sh, on 32 GPUs.
MIXTRAL = """#!/bin/bash
GPUS_PER_NODE=8
NNODES=${SLURM_NNODES:-"4"}
DISTRIBUTED_ARGS=(
    --nproc_per_node $GPUS_PER_NODE
    --nnodes $NNODES
)
MODEL_ARGS=(
    --use-mcore-models
    --disable-bias-linear
    --seq-length 4096
    --max-position-embeddings 32768
    --num-layers 32
    --hidden-size 4096
    --ffn-hidden-size 14336
    --num-attention-heads 32
    --init-method-std 0.01
    --attention-dropout 0.0
    --hidden-dropout 0.0
    --normalization RMSNorm
    --position-embedding-type rope
    --swiglu
    --untie-embeddings-and-output-weights
    --group-query-attention
    --num-query-groups 8
    --no-masked-softmax-fusion
    --no-position-embedding
    --rotary-base 1000000
)
MOE_ARGS=(
    --num-experts 8
    --moe-router-topk 2
    --moe-router-load-balancing-type aux_loss
    --moe-aux-loss-coeff 1e-2
    --moe-grouped-gemm
    --moe-token-dispatcher-type alltoall
    --overlap-param-gather
    --overlap-grad-reduce
)
TRAINING_ARGS=(
    --micro-batch-size 1
    --global-batch-size 256
    --lr 1e-4
    --train-iters 500000
    --lr-decay-iters 320000
    --lr-decay-style cosine
    --min-lr 1.0e-5
    --weight-decay 0.1
    --lr-warmup-iters 500
    --clip-grad 1.0
    --bf16
)
MODEL_PARALLEL_ARGS=(
    --tensor-model-parallel-size 1
    --pipeline-model-parallel-size 4
    --expert-model-parallel-size 8
    --use-distributed-optimizer
)
torchrun ${DISTRIBUTED_ARGS[@]} pretrain_gpt.py ${MODEL_ARGS[@]} ${MOE_ARGS[@]} \\
    ${TRAINING_ARGS[@]} ${MODEL_PARALLEL_ARGS[@]} --vocab-size 32000
"""
_LLAMA = """--micro-batch-size 1 --bf16 --no-masked-softmax-fusion --disable-bias-linear
    --untie-embeddings-and-output-weights --position-embedding-type rope --no-rope-fusion
    --normalization RMSNorm --swiglu --attention-dropout 0.0 --hidden-dropout 0.0 --use-mcore-models
    --init-method-std 0.02 --seq-length 4096 --global-batch-size 512 --lr 1e-5 --train-iters 1000
    --use-distributed-optimizer --moe-router-dtype fp32 --moe-token-dispatcher-type alltoall
    --sequence-parallel --norm-epsilon 1e-6"""
# Megatron-LM's examples/post_training/modelopt/conf: Qwen/Qwen3-30B-A3B.sh, deepseek-ai/*.sh.
QWEN3 = f"""torchrun --nproc_per_node 8 --nnodes 2 pretrain_gpt.py {_LLAMA}
    --num-layers 48 --hidden-size 2048 --ffn-hidden-size 6144 --num-attention-heads 32
    --group-query-attention --num-query-groups 4 --kv-channels 128 --qk-layernorm
    --num-experts 128 --moe-ffn-hidden-size 768 --moe-router-topk 8 --moe-aux-loss-coeff 1e-3
    --moe-router-load-balancing-type aux_loss --max-position-embeddings 40960
    --rotary-percent 1.0 --rotary-base 1000000 --no-bias-swiglu-fusion
    --tensor-model-parallel-size 2 --expert-model-parallel-size 8 --expert-tensor-parallel-size 1
    --vocab-size 151936""".replace("\n", " \\\n")
DEEPSEEK = f"""torchrun --nproc_per_node 8 --nnodes 64 pretrain_gpt.py {_LLAMA}
    --num-layers 61 --hidden-size 7168 --ffn-hidden-size 18432 --num-attention-heads 128
    --kv-channels 128 --multi-latent-attention --kv-lora-rank 512 --v-head-dim 128
    --q-lora-rank 1536 --qk-head-dim 128 --qk-layernorm --qk-pos-emb-head-dim 64
    --num-experts 256 --moe-layer-freq [0]*3+[1]*58 --moe-ffn-hidden-size 2048
    --moe-router-score-function sigmoid --moe-router-bias-update-rate 1e-3
    --moe-router-enable-expert-bias --moe-router-topk 8 --moe-router-num-groups 8
    --moe-router-group-topk 4 --moe-router-pre-softmax --moe-router-topk-scaling-factor 2.5
    --moe-shared-expert-overlap --moe-shared-expert-intermediate-size 2048
    --moe-aux-loss-coeff 1e-4 --moe-router-load-balancing-type seq_aux_loss
    --moe-token-drop-policy probs --max-position-embeddings 163840 --rotary-base 10000
    --rotary-percent 1.0 --rotary-scaling-factor 40 --mscale 1.0 --mscale-all-dim 1.0
    --recompute-activations --tensor-model-parallel-size 2 --pipeline-model-parallel-size 8
    --expert-model-parallel-size 64 --expert-tensor-parallel-size 1
    --vocab-size 129280 --make-vocab-size-divisible-by 1280""".replace("\n", " \\\n")
# GPT-NeoX's configs/mistral/7B.yml. Its window counts the tokens before a query.
MISTRAL = """{
  "pipe_parallel_size": 1, "model_parallel_size": 1, "make_vocab_size_divisible_by": 1,
  "num_layers": 32, "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32,
  "num_kv_heads": 8, "seq_length": 8192, "sliding_window_width": 4095,
  "max_position_embeddings": 32768, "pos_emb": "rotary", "rotary_pct": 1, "rotary_emb_base": 10000,
  "no_weight_tying": true, "gpt_j_residual": false, "output_layer_parallelism": "column",
  "norm": "rmsnorm", "rms_norm_epsilon": 1.0e-5, "attention_config": [[["flash"], 32]],
  "scaled_upper_triang_masked_softmax_fusion": true, "bias_gelu_fusion": false,
  "use_bias_in_norms": false, "use_bias_in_attn_linear": false, "use_bias_in_mlp": false,
  "activation": "swiglu", "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 4,
  "zero_optimization": {"stage": 1}, "padded_vocab_size": 32000, "checkpoint_activations": true,
  "bf16": {"enabled": true}, "optimizer": {"type": "Adam", "params": {"lr": 3.0e-4}}
}""".replace('"intermediate_size": 14336', '"intermediate_size": 43008')  # a third of it is one

PUBLISHED = {
    "mixtral-8x7b": (MIXTRAL, "run.sh", 46_702_792_704),
    "qwen3-30b-a3b": (QWEN3, "run.sh", 30_532_122_624),
    "deepseek-v3": (DEEPSEEK, "run.sh", 671_026_419_200 - 58 * 256),
    "mistral-7b-v0.1": (MISTRAL, "a.yml", 7_241_732_096),
}
# What training decides, not the architecture.
_OF_TRAINING = ("preset", "init_std", "dropout", "pad_vocab_to_multiple_of")


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_model_is_the_preset(tmp_path, name):
    text, file, count = PUBLISHED[name]
    vocab = f"model.vocab_size={model_spec(preset=name).vocab_size}"
    model = config_of(imported(tmp_path, text, file, overrides=[vocab])).model
    published = model_spec(preset=name)
    assert model.model_dump(exclude=_OF_TRAINING) == published.model_dump(exclude=_OF_TRAINING)
    assert parameter_count(model) == count


@pytest.mark.often(2)
@pytest.mark.parametrize("name", PUBLISHED)
def test_plan_accepts_a_published_config(tmp_path, name, capsys):
    text, file, _ = PUBLISHED[name]
    devices = {"devices": 8, "is_fixed": True} if file == "a.yml" else {}
    found = imported(tmp_path, text, file, **devices)
    config = tmp_path / "run.toml"
    config.write_text(given_toml(found.given))
    nodes = {"mixtral-8x7b": 4, "qwen3-30b-a3b": 2, "deepseek-v3": 64}.get(name, 1)
    words = ["cluster.preset=h100-sxm", f"cluster.nodes={nodes}", "cluster.devices_per_node=8"]
    assert main(["plan", str(config), *words, "--top", "1"]) == 0, capsys.readouterr().err
    layout = config_of(found).layout
    assert (layout.ep, layout.etp) == {
        "mixtral-8x7b": (8, None),
        "qwen3-30b-a3b": (8, 1),
        "deepseek-v3": (64, 1),
    }.get(name, (1, None))


def refused(tmp_path, text, file="run.sh"):
    return {e.key: e.note for e in imported(tmp_path, text, file).report.refused}


# A change of Mixtral's or DeepSeek's arguments, the key that is refused, and what it says.
COMBINATIONS = {
    "latent softmax": (
        *(DEEPSEEK, "--moe-router-score-function sigmoid", ""),
        "moe-router-score-function moe-router-enable-expert-bias",
        "nearest: deepseek_v3",
    ),
    "unweighed shares": (
        *(MIXTRAL, "--moe-router-topk 2", "--moe-router-topk 2 --moe-router-pre-softmax"),
        *("moe-router-pre-softmax", "nearest: mixtral"),
    ),
    "experts with biases": (
        *(MIXTRAL, "--disable-bias-linear", ""),
        *("disable-bias-linear", "no family has model.expert_bias = true"),
    ),
    "experts with LayerNorm": (
        *(MIXTRAL, "--normalization RMSNorm", ""),
        *("num-experts", "nearest: starcoder2"),
    ),
    "dense layers late": (
        *(DEEPSEEK, "[0]*3+[1]*58", "[1]*58+[0]*3"),
        *("moe-layer-freq", "these layers without experts"),
    ),
    "best of four in a group": (
        *(DEEPSEEK, "--moe-router-group-topk 4", "--moe-router-group-topk 2"),
        *("moe-router-group-topk", "nearest: moe-router-group-topk 4"),
    ),
    "no norms of latents": (
        *(DEEPSEEK, "--qk-layernorm", ""),
        *("qk-layernorm", "nearest: qk-layernorm"),
    ),
    "loss of two sequences": (
        *(MIXTRAL, "--micro-batch-size 1", "--micro-batch-size 2"),
        *("moe-router-load-balancing-type", "nearest: seq_aux_loss"),
    ),
    "loss of the global batch": (
        *(MIXTRAL, "type aux_loss", "type global_aux_loss"),
        *("moe-router-load-balancing-type", "no loss of the global batch"),
    ),
    "sinkhorn": (
        *(MIXTRAL, "type aux_loss", "type sinkhorn"),
        *("moe-router-load-balancing-type", "no sinkhorn"),
    ),
    "z-loss of sigmoids": (
        *(DEEPSEEK, "--moe-aux-loss-coeff 1e-4", "--moe-z-loss-coeff 1e-3"),
        *("moe-z-loss-coeff", "of a softmax"),
    ),
    "drops small probabilities": (
        *(MIXTRAL, "--moe-grouped-gemm", "--moe-expert-capacity-factor 1.5"),
        *("moe-token-drop-policy", "nearest: position"),
    ),
    "prediction of further tokens": (
        *(DEEPSEEK, "--num-layers 61", "--num-layers 61 --mtp-num-layers 1"),
        *("mtp-num-layers", "next-token prediction only"),
    ),
    "windows of some layers only": (
        *(MIXTRAL, "--swiglu", "--swiglu --window-size 127,0 --window-attn-skip-freq 2"),
        *("window-size", "has no such windows"),
    ),
    "a list for fewer layers": (
        *(DEEPSEEK, "[0]*3+[1]*58", "[0]*3+[1]*57"),
        *("moe-layer-freq", "for 61 layers"),
    ),
    "documents that see each other": (
        *(MIXTRAL, "--bf16", "--bf16 --eod-mask-loss"),
        *("eod-mask-loss", "nearest: reset-attention-mask"),
    ),
    "delayed scaling": (
        *(MIXTRAL, "--bf16", "--bf16 --fp8-format hybrid"),
        *("fp8-recipe", "nearest: tensorwise"),
    ),
}


@pytest.mark.parametrize("name", COMBINATIONS)
def test_what_no_family_has_is_refused_by_its_key(tmp_path, name):
    text, old, new, key, why = COMBINATIONS[name]
    assert old in text
    found = refused(tmp_path, text.replace(old, new))
    assert set(found) == set(key.split())
    assert why in found[key.split()[0]]


# Arguments beside Mixtral's, and what they set.
SETS = {
    "--moe-router-score-function sigmoid": {"model.router_scores": "sigmoid"},
    "--moe-z-loss-coeff 1e-3": {"train.router_z_loss": 1e-3},
    "--moe-expert-capacity-factor 1.5 --moe-token-drop-policy position": {
        "train.expert_capacity": 1.5
    },
    "--moe-router-force-load-balancing": {"train.routing": "balanced"},
    "--reset-position-ids --reset-attention-mask --eod-mask-loss": {"data.packing": "documents"},
    "--fp8-format hybrid --fp8-recipe tensorwise --fp8-param-gather": {"train.fp8": True},
    "--window-size 4095,0": {"model.layer_pattern": ({"window": 4096},)},
    "--window-size (4095,0)": {"model.layer_pattern": ({"window": 4096},)},
    "--window-size -1,0": {"model.layer_pattern": ()},
    "--use-rope-scaling --rope-scaling-factor 32": {
        "model.rope_scaling": {"kind": "llama3", "factor": 32.0}
    },
    "--rotary-seq-len-interpolation-factor 4": {
        "model.rope_scaling": {"kind": "linear", "factor": 4.0}
    },
    "--distributed-timeout-minutes 60": {"cluster.timeout": 3600.0, "cluster.hang": 1800.0},
    "--distributed-timeout-minutes 2": {"cluster.timeout": 120.0, "cluster.hang": 60.0},
    "--moe-ffn-hidden-size 7168": {"model.ffn_dim": 7168, "model.family": "mixtral"},
    "--qk-layernorm": {"model.family": "qwen3_moe", "model.expert_ffn_dim": 14336},
    "--qk-layernorm --moe-router-pre-softmax": {"model.norm_top_k": False},
    "--qk-layernorm --moe-layer-freq 2": {"model.layer_pattern": ({}, {"dense": True})},
    "--moe-shared-expert-intermediate-size 64 --moe-shared-expert-gate": {
        "model.family": "qwen2_moe",
        "model.shared_ffn_dim": 64,
        "model.norm_top_k": True,
    },
}


@pytest.mark.parametrize("words", SETS)
def test_arguments_beside_mixtral_s(tmp_path, words):
    words_of_shell = words.replace("(", "'(").replace(")", ")'")
    config = config_of(imported(tmp_path, f"{MIXTRAL.rstrip()} {words_of_shell}", "run.sh"))
    for key, value in SETS[words].items():
        section, _, field = key.partition(".")
        assert _plain(getattr(getattr(config, section), field), value) == value, key


def _plain(value, like):
    """Return a value as plain data, with the keys that the wanted one has."""
    if isinstance(like, tuple):
        return tuple(value.model_dump(exclude_defaults=True) for value in value)
    if isinstance(like, dict):
        return {key: getattr(value, key) for key in like}
    return value


# Arguments in place of Mixtral's experts, and the family that has them.
DENSE = {
    "": "llama",
    "--window-size 127,0": "mistral",
    "--qk-layernorm": "qwen3",
    "--add-qkv-bias": "qwen2",
    "--qk-layernorm --window-size 127,0 --window-attn-skip-freq 4": "qwen3",
    "--window-size 127,0 --window-attn-skip-freq 4": "smollm3",
    "--no-rope-freq 4": "smollm3",
    "--rotary-percent 0.5": "phi3",
}


@pytest.mark.parametrize("words", DENSE)
def test_the_family_is_the_one_that_has_all_features(tmp_path, words):
    text = MIXTRAL.replace("--expert-model-parallel-size 8", "").replace("--num-experts 8", "")
    found = imported(tmp_path, f"{text.rstrip()} {words}", "run.sh")
    model = config_of(found).model
    assert model.family == DENSE[words]
    assert entry(found, "moe-router-topk").note == "num-experts is not set"
    if "skip-freq" in words:
        assert [layer.window for layer in model.layer_pattern] == [128, 128, 128, None]


NEOX = MISTRAL.replace("{", '{"moe_num_experts": 8, "moe_top_k": 2,', 1)


@pytest.mark.parametrize(
    ("more", "keys"),
    [
        ("", {"moe_router_type"}),  # its default is sinkhorn
        ('"moe_router_type": "topk",', {"moe_router_type"}),  # shares of the softmax of all
        ('"use_qk_layernorm": true,', {"moe_router_type", "use_qk_layernorm"}),
        ('"moe_expert_interval": 2,', {"moe_router_type", "moe_expert_interval"}),
    ],
)
def test_experts_of_gpt_neox(tmp_path, more, keys):
    text = NEOX.replace("{", "{" + more, 1)
    notes = refused(tmp_path, text, "a.yml")
    assert set(notes) == keys
    if "topk" in more:
        assert "nearest: mixtral" in notes["moe_router_type"]


@pytest.mark.parametrize(("tp", "etp"), [(1, None), (2, 1)])
def test_experts_of_deepspeed(tmp_path, tp, etp):
    content = {
        "train_batch_size": 16,
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 1},
        "tensor_parallel": {"autotp_size": tp},
        "expert_parallel": {
            "enabled": True,
            "autoep_size": 4,
            "preset_model": "mixtral",
            "top_k": "auto",
            "expert_tensor_parallel_size": 1,
            "score_func": "auto",
            "route_scale": 1.0,
        },
    }
    over = ["model.preset=mixtral-8x7b", "layout.sp=true"]
    options = {"overrides": over, "devices": 8, "is_fixed": True}
    layout = config_of(imported(tmp_path, content, **options)).layout
    assert (layout.ep, layout.etp, layout.dp_shard) == (4, etp, 8 // tp)
    content["expert_parallel"]["enabled"] = False
    found = imported(tmp_path, content, **options)
    assert entry(found, "expert_parallel.autoep_size").verdict == "ignored"


def test_inputs_of_recomputed_blocks_on_the_host(tmp_path):
    key = "activation_checkpointing.cpu_checkpointing"
    content = {"activation_checkpointing": {"cpu_checkpointing": True}}
    assert entry(imported(tmp_path, content), key).to == {"layout.offload": "activations"}
    content["zero_optimization"] = {"offload_optimizer": {"device": "cpu"}}
    found = imported(tmp_path, content)
    assert entry(found, key).verdict == "unsupported"
    assert not found.report.refused
    neox = MISTRAL.replace("{", '{"checkpoint_in_cpu": true,', 1)
    assert config_of(imported(tmp_path, neox, "a.yml")).layout.offload == "activations"
