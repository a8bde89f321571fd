"""What the small case of a config keeps of it: by preset, by chance, and key by key."""

from random import Random

import pytest

from meshwright.layout import Layout, broken, resolve_layout
from meshwright.prove.case import Case
from meshwright.prove.kept import NOT_PROVEN, PROPERTIES, PROVEN, not_kept, not_proven
from meshwright.prove.kept import why_not_proven as why
from meshwright.prove.shrink import shrink
from meshwright.runtime.machines.machine import detect
from meshwright.spec.groups import GroupSpec
from meshwright.spec.loading import KEYS, SECTIONS, load_config
from meshwright.spec.presets import PRESETS
from meshwright.spec.resolve import model_spec
from meshwright.spec.training import OptimizerSpec, TrainSpec

# In half precision, a CPU's own kernel serves short rows, and PyTorch's long ones alone.
LOST = {"PyTorch's attention"}


# The pattern of a layer that small models lack, and one of all models.
GROUPS = (GroupSpec(match="layers.11.*", lr_scale=0.5), GroupSpec(match="*norm*", lr_scale=0))


def preset_model(name):
    return model_spec(preset=name, **({"vocab_size": 50304} if name == "gpt3-175b" else {}))


def lost(model, train, layout, spec):
    asked = Case(model, train, layout, steps=train.steps, optimizer=spec)
    cases = shrink(model, train, layout, spec)
    assert cases
    return {name for case in cases for name in not_kept(asked, case)}


@pytest.mark.often(20)
@pytest.mark.parametrize("preset", PRESETS)
def test_each_preset_keeps_what_can_be_wrong_about_it(preset):
    model = preset_model(preset)
    for label in ("mb2", "shard2 zero3 mb2", "cp2-ring mb1", "pp2 1f1b mb1", "dp2 cp2-ring mb2"):
        for seq_len in (64, 512, 2048, 8192):
            train = TrainSpec(batch=64, seq_len=seq_len)
            layout = Layout.parse(label)
            assert broken(model, train, layout) is None
            assert lost(model, train, layout, OptimizerSpec(warmup_steps=20)) == set()


def random_case(random, presets):
    """A random preset, layout, batch and optimizer, or None where they do not go together."""
    model = preset_model(random.choice(presets))
    if model.has_mamba:  # published ones have one group of heads
        model = model.model_copy(update={"mamba_groups": random.choice((1, 2, 8))})

    def degree():
        return random.choice((1, 1, 1, 2, 4, 8))

    shard, tp, cp = degree(), degree(), degree()
    layout = Layout(
        pp=degree(),
        dp_replicate=degree(),
        dp_shard=shard,
        cp=cp,
        tp=tp,
        zero=random.choice((1, 2, 3)) if shard > 1 else 0,
        sp=tp > 1 and random.random() < 0.5,
        cp_kind=random.choice(("ring", "ulysses")) if cp > 1 else "ring",
        ep=random.choice((1, 2, 4, 8)) if model.experts else 1,
        microbatch=random.choice((1, 2, 4)),
    )
    train = TrainSpec(
        batch=layout.dp * layout.microbatch * random.choice((1, 2, 4, 8, 16)),
        seq_len=random.choice((32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)),
        precision=random.choice(("fp32", "bf16", "fp16")),
        steps=random.choice((3, 20, 200)),
        clip_norm=random.choice((0.0, 0.5)),
        expert_capacity=random.choice((None, 1.25, 2.0)) if model.experts else None,
    )
    optimizer = OptimizerSpec(
        name=random.choice(("adamw", "sgd")),
        momentum=random.choice((0, 0.9)),
        weight_decay=random.choice((0, 0.1)),
        groups=random.choice(((), GROUPS)),
        schedule=random.choice(("cosine", "linear", "wsd", "constant")),
        warmup_steps=random.choice((0, 1, 2, 20)),
        schedule_steps=random.choice((None, None, 10, 100, 300)),
        decay_steps=random.choice((None, 1, 5)),
    )
    specs = model, train, layout
    return None if broken(*specs) else (*specs, optimizer)


def test_random_configs_keep_what_can_be_wrong_about_them():
    random = Random(7)
    drawn = filter(None, (random_case(random, list(PRESETS)) for _ in range(600)))
    several = list(drawn)
    assert len(several) > 300
    for case in several:
        allowed = LOST if case[1].precision != "fp32" else set()
        assert lost(*case) <= allowed, case


def test_every_property_is_had_by_a_config():
    """None is there that no config has: it would keep nothing."""
    random, rest = Random(7), dict(PROPERTIES)
    for _ in range(3000):
        case = random_case(random, list(PRESETS))
        if case is not None:
            model, train, layout, optimizer = case
            asked = Case(model, train, layout, steps=train.steps, optimizer=optimizer)
            rest = {name: has for name, has in rest.items() if not has(asked)}
        if not rest:
            break
    assert not rest


# Words of a config, and others, which differ in the key: some pair must change the small case.
TP, EP = ("layout.tp=2",), ("layout.dp_shard=2", "layout.zero=1", "layout.ep=2")
PP = ("layout.pp=2", "train.batch=16")
MIXTURE = ("model.preset=mixtral-8x7b",)
LATENT = ("model.preset=deepseek-v3",)
RECURRENT = ("model.preset=qwen3-next-80b-a3b",)
STATE_SPACE = ("model.preset=granite-4.0-h-tiny",)
GPT_OSS = ("model.preset=gpt-oss-20b",)
LORA = ("lora.rank=4",)
WSD = ("optimizer.schedule=wsd",)
BF16 = ("optimizer.state_dtype=bf16",)
SGD = ("optimizer.name=sgd",)
MUON = ("optimizer.name=muon",)
CHANGES = {
    "model.preset": ((), ("model.preset=qwen3-8b",)),
    "model.family": ((), ("model.family=qwen3",)),
    "model.n_layers": (PP, (*PP, "model.n_layers=7")),
    "model.n_heads": ((), ("model.n_heads=8", "model.n_kv_heads=2")),
    "model.n_kv_heads": ((), ("model.n_kv_heads=1",)),
    "model.rope_theta": ((), ("model.rope_theta=5e5",)),
    "model.rope_scaling": (
        (),
        ('model.rope_scaling={kind="llama3",factor=8.0,original_context=64}',),
    ),
    "model.rotary_pct": (
        ("model.family=neox", "model.rotary_pct=0.5"),
        ("model.family=neox", "model.rotary_pct=0.25"),
    ),
    "model.pad_vocab_to_multiple_of": ((), ("model.pad_vocab_to_multiple_of=512",)),
    "model.norm_eps": ((), ("model.norm_eps=1e-6",)),
    "model.tie_embeddings": ((), ("model.tie_embeddings=true",)),
    "model.attention_bias": ((), ("model.attention_bias=true",)),
    "model.mlp_bias": ((), ("model.mlp_bias=true",)),
    "model.parallel_residual": (
        ("model.family=neox",),
        ("model.family=neox", "model.parallel_residual=true"),
    ),
    "model.residual_scale": (
        ("model.family=granite",),
        ("model.family=granite", "model.residual_scale=0.3"),
    ),
    "model.logits_divisor": (
        ("model.family=granite",),
        ("model.family=granite", "model.logits_divisor=3"),
    ),
    "model.attention_scale": (
        ("model.family=granite",),
        ("model.family=granite", "model.attention_scale=0.3"),
    ),
    "model.embedding_scale": (
        ("model.family=granite",),
        ("model.family=granite", "model.embedding_scale=3"),
    ),
    "model.attention_softcap": (
        ("model.family=gemma2",),
        ("model.family=gemma2", "model.attention_softcap=3"),
    ),
    "model.logits_softcap": (
        ("model.family=gemma2",),
        ("model.family=gemma2", "model.logits_softcap=3"),
    ),
    "model.layer_pattern": (
        ("model.family=gemma3",),
        ("model.family=gemma3", "model.layer_pattern=[{window=30},{}]"),
    ),
    "model.activation": ((), ("model.activation=gelu",)),
    "model.experts": (MIXTURE, (*MIXTURE, "model.experts=4")),
    "model.top_k": (MIXTURE, (*MIXTURE, "model.top_k=1")),
    "model.norm_top_k": (
        ("model.preset=qwen3-30b-a3b",),
        ("model.preset=qwen3-30b-a3b", "model.norm_top_k=false"),
    ),
    "model.swiglu_limit": (GPT_OSS, (*GPT_OSS, "model.swiglu_limit=3")),
    "model.swiglu_alpha": (GPT_OSS, (*GPT_OSS, "model.swiglu_alpha=3")),
    "model.shared_ffn_dim": (LATENT, (*LATENT, "model.shared_ffn_dim=0")),
    "model.dense_layers": (LATENT, (*LATENT, "model.dense_layers=0")),
    "model.expert_groups": (LATENT, (*LATENT, "model.expert_groups=1", "model.top_groups=1")),
    "model.top_groups": (LATENT, (*LATENT, "model.top_groups=8")),
    "model.routed_scale": (LATENT, (*LATENT, "model.routed_scale=1.5")),
    "model.q_lora_rank": (LATENT, (*LATENT, "model.q_lora_rank=0")),
    "model.kv_lora_rank": (LATENT, ("model.preset=qwen3-8b",)),
    "model.qk_nope_head_dim": (LATENT, (*LATENT, "model.qk_nope_head_dim=64")),
    "model.qk_rope_head_dim": (LATENT, (*LATENT, "model.qk_rope_head_dim=128")),
    "model.v_head_dim": (LATENT, (*LATENT, "model.v_head_dim=256")),
    "model.delta_heads": (RECURRENT, (*RECURRENT, "model.delta_heads=16")),
    "model.delta_key_heads": (RECURRENT, (*RECURRENT, "model.delta_key_heads=1")),
    "model.delta_kernel": (RECURRENT, (*RECURRENT, "model.delta_kernel=2")),
    "model.mamba_heads": (STATE_SPACE, (*STATE_SPACE, "model.mamba_heads=1")),
    "model.mamba_groups": (STATE_SPACE, (*STATE_SPACE, "model.mamba_groups=2")),
    "model.mamba_kernel": (STATE_SPACE, (*STATE_SPACE, "model.mamba_kernel=2")),
    "model.mamba_dt_limit": (STATE_SPACE, (*STATE_SPACE, "model.mamba_dt_limit=[0.1,1.0]")),
    "model.dropout": ((), ("model.dropout=0.1",)),
    "model.init_std": ((), ("model.init_std=0.01",)),
    "data.packing": ((), ("data.packing=documents",)),
    "data.format": (
        ("data.packing=documents",),
        ("data.packing=documents", "data.format=chat"),
    ),
    "train.steps": ((), ("train.steps=300",)),
    "train.batch": (("train.batch=16",), ("train.batch=2",)),
    "train.seq_len": ((), ("train.seq_len=64",)),
    "train.precision": ((), ("train.precision=bf16",)),
    "train.fp8": (("train.precision=bf16",), ("train.precision=bf16", "train.fp8=true")),
    "train.async_tp": ((*TP, "layout.sp=true"), (*TP, "layout.sp=true", "train.async_tp=true")),
    "train.reduce_dtype": ((), ("train.reduce_dtype=same",)),
    "train.master": (("train.precision=bf16",), ("train.precision=bf16", "train.master=none")),
    "train.seed": ((), ("train.seed=1",)),
    "train.clip_norm": ((), ("train.clip_norm=0",)),
    "train.compile": ((), ("train.compile=true",)),
    "train.matmul": ((), ("train.matmul=torch",)),
    "train.router_aux_loss": (MIXTURE, (*MIXTURE, "train.router_aux_loss=0.1")),
    "train.router_z_loss": (MIXTURE, (*MIXTURE, "train.router_z_loss=0.1")),
    "train.router_bias_rate": (LATENT, (*LATENT, "train.router_bias_rate=0.1")),
    "train.expert_capacity": (MIXTURE, (*MIXTURE, "train.expert_capacity=1.1")),
    "optimizer.name": ((), SGD),
    "optimizer.lr": ((), ("optimizer.lr=1",)),
    "optimizer.betas": ((), ("optimizer.betas=[0.9,0.999]",)),
    "optimizer.weight_decay": ((), ("optimizer.weight_decay=0",)),
    "optimizer.groups": ((), ('optimizer.groups=[{match="embed*", lr_scale=0.5}]',)),
    "optimizer.state_dtype": ((), ("optimizer.state_dtype=bf16",)),
    "optimizer.rounding": (BF16, (*BF16, "optimizer.rounding=stochastic")),
    "optimizer.momentum": (SGD, (*SGD, "optimizer.momentum=0.9")),
    "optimizer.nesterov": (MUON, (*MUON, "optimizer.nesterov=false")),
    "optimizer.ns_steps": (MUON, (*MUON, "optimizer.ns_steps=6")),
    "optimizer.ns_precision": (MUON, (*MUON, "optimizer.ns_precision=fp32")),
    "optimizer.scale": (MUON, (*MUON, "optimizer.scale=original")),
    "optimizer.schedule": ((), WSD),
    "optimizer.warmup_steps": ((), ("optimizer.warmup_steps=1",)),
    "optimizer.decay_steps": (WSD, (*WSD, "optimizer.decay_steps=1")),
    "optimizer.schedule_steps": ((), ("optimizer.schedule_steps=100",)),
    "optimizer.min_lr_ratio": ((), ("optimizer.min_lr_ratio=0",)),
    "layout.pp": ((), PP),
    "layout.dp_replicate": ((), ("layout.dp_replicate=2",)),
    "layout.dp_shard": ((), ("layout.dp_shard=2", "layout.zero=1")),
    "layout.cp": ((), ("layout.cp=2",)),
    "layout.tp": ((), TP),
    "layout.ep": (
        (*MIXTURE, "layout.dp_shard=2", "layout.zero=1"),
        (*MIXTURE, *EP),
    ),
    "layout.etp": (
        (*MIXTURE, *TP, "layout.sp=true", "layout.ep=2", "layout.dp_replicate=2"),
        (*MIXTURE, *TP, "layout.sp=true", "layout.ep=2", "layout.dp_replicate=2", "layout.etp=1"),
    ),
    "layout.zero": (
        ("layout.dp_shard=2", "layout.zero=1"),
        ("layout.dp_shard=2", "layout.zero=2"),
    ),
    "layout.sp": (TP, (*TP, "layout.sp=true")),
    "layout.cp_kind": (("layout.cp=2",), ("layout.cp=2", "layout.cp_kind=ulysses")),
    "layout.schedule": (PP, (*PP, "layout.schedule=gpipe")),
    "layout.virtual_stages": (
        (*PP, "layout.schedule=looped_bfs", "layout.virtual_stages=2"),
        (*PP, "layout.schedule=looped_bfs", "layout.virtual_stages=3", "model.n_layers=12"),
    ),
    "layout.microbatch": (("layout.microbatch=1",), ("layout.microbatch=2",)),
    "layout.recompute": ((), ("layout.recompute=full",)),
    "layout.offload": ((), ("layout.offload=optimizer",)),
    "cluster.nodes": ((), ("cluster.nodes=2",)),
    "cluster.devices_per_node": ((), ("cluster.devices_per_node=2",)),
    "lora.rank": (LORA, ("lora.rank=3",)),
    "lora.alpha": (LORA, (*LORA, "lora.alpha=9")),
    "lora.targets": (LORA, (*LORA, "lora.targets=q_proj")),
    "lora.rslora": (LORA, (*LORA, "lora.rslora=true")),
    "lora.dropout": (LORA, (*LORA, "lora.dropout=0.1")),
    "lora.base": (
        (*LORA, "model.dim=256", "model.n_heads=4", "model.ffn_dim=512"),
        (*LORA, "model.dim=256", "model.n_heads=4", "model.ffn_dim=512", "lora.base=nf4"),
    ),
}
# What a family fixes: `model.family` and `model.preset` change these.
FIXED = {
    *("norm", "norm_placement", "norm_plus_one", "gated_mlp", "qk_norm", "output_bias"),
    *("attention_sinks", "expert_bias", "shared_gate", "router_scores", "rope_interleave"),
    "attention_gate",
}


def proof(words):
    """What a proof of a config is about: its small cases, and the schedule of the whole run."""
    base = ("train.batch=8", "cluster.device=cpu", "layout.microbatch=1")
    counts = (
        () if any("devices_per_node" in word for word in words) else ("cluster.devices_per_node=1",)
    )
    config = load_config(None, [*base, *counts, *words])
    given = {key for key in ("dp_replicate", "dp_shard") if f"layout.{key}" in " ".join(words)}
    if not given and not any(word.startswith("cluster.") for word in words):
        section = config.layout.model_copy(update={"dp_replicate": 1})
        config = config.model_copy(update={"layout": section})
    world = config.layout
    degrees = (world.dp_replicate or 1) * (world.dp_shard or 1) * world.pp * world.cp * world.tp
    if given or not any(word.startswith("cluster.") for word in words):
        cluster = config.cluster.model_copy(update={"devices_per_node": degrees})
        config = config.model_copy(update={"cluster": cluster})
    layout = resolve_layout(config, detect(config.cluster, {}))
    packed, chat = config.data.packing == "documents", config.data.format == "chat"
    cases = shrink(config.model, config.train, layout, config.optimizer, packed=packed, chat=chat)
    schedule = config.optimizer.model_copy(update={"eps": 1.0, "betas": (0.0, 0.0)})
    schedule = schedule.model_copy(update={"momentum": 0.0, "weight_decay": 0.0, "name": "sgd"})
    return cases, schedule, config.train.steps


def test_every_key_changes_proofs_or_is_listed():
    keys = {f"{section}.{key}" for section, names in KEYS.items() for key in names}
    of_families = {f"model.{key}" for key in FIXED}
    listed = {key for key in keys if why(key) is not None}
    assert keys - listed - of_families == CHANGES.keys()
    assert not listed & of_families
    every = {key for key in NOT_PROVEN if "." in key} | PROVEN
    assert every <= keys
    assert {key for key in NOT_PROVEN if "." not in key} <= SECTIONS.keys()


@pytest.mark.often(30)
@pytest.mark.parametrize("key", CHANGES)
def test_a_key_changes_a_proof(key):
    before, after = CHANGES[key]
    assert proof(before) != proof(after)


@pytest.mark.parametrize(
    "words",
    [
        ("model.vocab_size=512",),
        ("model.ffn_dim=512",),
        ("model.context=512",),
        ("train.log_every=7", "train.eval_every=3", "train.check_every=2"),
        ("train.nonfinite=skip",),
        ("optimizer.eps=1e-3",),
        ("checkpoint.every=3", "log.trace=0", "data.seed=4"),
    ],
)
def test_a_listed_key_changes_no_proof(words):
    assert proof(()) == proof(words)
    assert all(why(word.partition("=")[0]) for word in words)


def test_what_a_config_states_and_no_proof_depends_on_is_told():
    config = load_config(None, ["optimizer.eps=1e-7", "train.precision=bf16", "log.name=x"])
    assert not_proven(config).keys() == {"optimizer.eps", "log.name"}


def test_experts_are_full_in_a_small_case():
    for preset in ("mixtral-8x7b", "qwen3-30b-a3b", "deepseek-v3"):
        train = TrainSpec(batch=8, seq_len=2048, expert_capacity=2.0)
        (case,) = shrink(model_spec(preset=preset), train, Layout(microbatch=2))
        share = case.model.top_k / case.model.experts
        assert case.train.expert_capacity * share < 0.6
