"""What importers say that Meshwright lacks, held against the keys and values of its config.

A new key or value that serves a refused one matches a pattern here, and this test fails until the
refusal has become a translation.
"""

import ast
import re
import typing
from fnmatch import fnmatch
from importlib.resources import files

import pytest

from meshwright.interop.table import load_table
from meshwright.spec.families.base import FEATURES
from meshwright.spec.loading import SECTIONS
from meshwright.spec.rotary import ROPE_KINDS

TABLES = (
    *("deepspeed", "gpt_neox", "megatron", "hf"),
    *("torchtitan", "accelerate", "axolotl", "transformers", "ms_swift", "nemo", "prime_rl"),
)
# What a reason says, and the keys (`section.key`) or values (`section.key=value`) that would make
# it untrue. A reason without a pattern is of the other system, or no key could make it untrue.
ABSENT = {
    # optimizers and schedules
    r"no other iteration of Newton-Schulz": ["optimizer.ns_method*", "optimizer.ns_coef*"],
    r"Muon has no more keys": ["optimizer.muon_*", "optimizer.ns_[!sp]*"],
    r"no other scale of Muon": ["optimizer.scale_*", "optimizer.scale=[!mo]*"],
    r"momentum is in fp32": ["optimizer.momentum_*"],
    r"no moments in 4 bits": ["optimizer.state_dtype=*4*"],
    r"of Lamb|OneBitLamb": ["optimizer.*lamb*"],
    r"1-bit optimizers|ZeroOneAdam": ["optimizer.*bit*", "optimizer.*zero*one*"],
    r"no other optimizer": ["optimizer.name=*[!wdn]"],  # adamw, sgd and muon are named there
    r"AMSGrad": ["optimizer.*amsgrad*"],
    r"the plain one": ["optimizer.sgd_nesterov*"],
    r"dampening": ["optimizer.*dampening*"],
    r"bias correction": ["optimizer.*correct*"],
    r"decoupled": ["optimizer.*decoupled*", "optimizer.name=adam", "optimizer.*l2*"],
    r"no other implementation": [],
    r"no states in fp16 or fp8": ["optimizer.state_dtype=*fp[!3]*"],
    r"weight decay stays the same": ["optimizer.*decay_end*", "optimizer.*decay_schedule*"],
    r"have one rate": ["optimizer.*_lr", "optimizer.lr_*"],
    r"to the same share": ["optimizer.*min_lr", "optimizer.lowest*"],
    r"no [^;]*decay\b|see optimizer.schedule": [
        "optimizer.schedule=*exp*",
        "optimizer.schedule=*sq*",
    ],
    r"LRRangeTest": ["optimizer.schedule=*range*"],
    r"OneCycle": ["optimizer.schedule=*cycle*"],
    r"fall straight": ["optimizer.decay_s[!t]*", "optimizer.decay_kind*", "optimizer.*wsd_*"],
    r"warm-up is linear": ["optimizer.warmup_[!s]*"],
    r"warm-up starts from nothing": ["optimizer.warmup_[!s]*"],
    r"every step has (the same|a whole) batch": ["train.batch_*", "train.*ramp*"],
    r"epochs are not read from this file": [],
    r"updates are not split": ["optimizer.*delay*", "layout.*zenflow*"],
    r"the batch does not follow": ["train.*elastic*", "layout.*elastic*"],
    # precision
    r"fp16 weights have masters|fp32 weights": ["train.master=*fp16*", "optimizer.*master*"],
    r"gradients add up in fp32": ["train.*accum*"],
    r"gradients are summed in fp32": ["train.reduce_dtype=[!fs]*"],
    r"travel in train\.": ["train.*quant*", "layout.*quant*", "train.*gather*dtype*"],
    r"begins at 65536|2000 good steps|first overflow|2\^-24": ["train.loss_scale_*"],
    r"residual stream is in": ["train.*residual*"],
    r"nearest: bf16(oat16)?\b": [
        "train.precision=*fp[48]*",
        "train.*fp4*",
        "train.precision=*fp4*",
    ],
    r"nearest: bfloat16": ["train.precision=*float8*"],
    r"no choice but train.fp8|scaled at each use|e5m2": ["train.fp8_*", "train.fp8=*"],
    r"scores are fp32": ["train.router_dtype*"],
    r"scores are computed without it": ["train.*layer_scaling*", "model.*layer_scaling*"],
    r"norms and the loss in fp32|the loss is fp32": ["train.loss_dtype*", "train.*norm_dtype*"],
    r"Apex AMP": ["train.*amp"],
    r"training for quantization|of quantization": ["train.*quant*", "model.*quant*"],
    r"prun|distill": ["train.*prun*", "train.*distill*", "model.*prun*"],
    # the model
    r"LayerNorm has a bias": ["model.norm_bias*"],
    r"have a norm each": ["model.*tied*norm*", "model.norm_shared*"],
    r"one norm of all heads, which": ["model.qk_norm=*share*"],
    r"norms of queries and keys have weights": ["model.qk_norm=*l2*"],
    r"not clipped": ["optimizer.*qk*", "train.*qk*"],
    r"Qwen3-Next alone": [],
    r"a sink of each head": ["model.attention_sinks=*", "model.*off_by*"],
    r"attention drops nothing": ["model.attention_dropout*"],
    r"attention is dense": ["model.*sparse*", "model.*block_size*"],
    r"no .*positions": ["model.*position*", "model.*alibi*"],
    r"positions count from 0": ["model.*offset*"],
    r"every layer is computed": ["train.*layer_drop*", "model.*layer_drop*"],
    r"do not share weights": ["model.*shared_layers*", "model.*unique*"],
    r"muP": ["model.*mup*", "optimizer.mup*", "train.*mup*"],
    r"Mamba-1|RWKV|gMLP": ["model.*rwkv*", "model.*ssm*", "model.*gmlp*"],
    r"begin normal|outputs begin": ["model.init_[!sf]*"],
    r"nearest: swiglu": ["model.activation=*quick*"],
    r"LayerNorm, RMSNorm|layernorm \(": ["model.norm=[!rl]*"],
    r"next-token prediction": ["model.*mtp*", "model.*predict*", "train.*mtp*", "train.*dpo*"],
    r"prompts are trained": ["*.*soft_prompt*", "*.*prompt_tun*"],
    # experts
    r"no loss of|loss of the whole batch|global batch|no \.*sinkhorn": [
        *("train.router_aux_loss_*", "train.router_aux_loss=*", "train.*balanc*[!g]_*"),
    ],
    r"router_z_loss is of": ["train.router_z_loss_*"],
    r"noise at the router": ["train.*jitter*", "train.*noise*", "model.*jitter*"],
    r"groups are not devices": ["*.*limited_devices*"],
    r"groups are scored": ["model.group_[!s]*", "model.*groups_scored*"],
    r"scores by": ["model.router_scores=*soft[!m]*", "model.router_scores=*sqrt*"],
    r"ranks none": ["train.*rank_capacity*"],
    r"later tokens are dropped|whole sequence, and": ["train.expert_capacity_*", "train.*drop*"],
    r"weighed, not its input": ["model.*on_input*", "model.score_apply*"],
    r"stream itself": ["model.*expert_latent*", "model.*latent_experts*"],
    r"out of a dense model": ["model.*upcycl*"],
    r"in turn; nearest": ["train.routing=[!lb]*"],
    # layouts
    r"stages are split by cost": ["layout.*stage_layers*", "layout.*split*"],
    r"by itself|all blocks are recomputed|recomputes attention|or their attention": [
        *("layout.recompute_*", "layout.recompute=[!nsf]*"),
    ],
    r"inputs of recomputed blocks stay whole": ["layout.*partition*"],
    r"all states or none|nearest: cpu|offload to disk|one kind of state": [
        *("layout.offload_*", "layout.offload=*nvme*", "layout.offload=*disk*"),
        *("layout.offload=*+*", "cluster.*nvme*"),
    ],
    r"all cores": ["cluster.*cores*", "layout.*cores*"],
    r"sharded once": ["layout.*hpz*", "layout.*secondary*"],
    r"split by vocabulary": ["layout.*head*"],
    r"no other exchange": ["layout.cp_kind=[!ru]*"],
    r"CUDA graphs": ["train.*graph*", "layout.*graph*"],
    r"Transformer Engine": ["train.*transformer_engine*", "train.engine=*te*r*"],
    r"gradients of the embedding are dense": ["*.*sparse_grad*"],
    r"async_tp is set": ["layout.*overlap*", "train.*overlap*"],
    r"mean over the global batch": ["train.*loss_reduction*", "train.*sum_loss*"],
    # data
    r"uniform shuffle|no curriculum|no data routing": ["data.*curriculum*", "train.*curriculum*"],
    r"held-out documents come from": ["data.validation_[!f]*", "data.*eval*source*"],
    r"mixed by their size": ["data.*by_documents*", "data.*alpha*"],
    r"samples cut documents|nearest: data.packing|data.packing = documents": [
        *("data.packing=[!sd]*", "data.mask*", "train.*mask*"),
    ],
    r"every token counts": ["data.mask*", "train.*mask*"],
    r"targets are in the rows": ["data.*label*"],
    r"tokenizer.json as data.tokenizer|no .*nearest: gpt2": ["data.tokenizer_*"],
    r"nearest: (mmap|single)$|data.source = stdlib": ["data.*mock*", "data.*dataloader*"],
    # runs
    r"steps are saved evenly|newest steps are kept": ["checkpoint.*at*", "checkpoint.keep_[!b]*"],
    r"a step has all": ["checkpoint.*without*", "checkpoint.*optim*"],
    r"all ranks (must )?reach": ["checkpoint.*local*", "checkpoint.*s3*", "checkpoint.*url*"],
    r"log.wandb( has the project only)?$|log.wandb has the project": ["log.wandb_*"],
    r"log.trackio$": ["log.*comet*"],
    r"events.jsonl has": ["log.*profil*", "train.*profil*"],
    r"generation inside of training": ["train.*rollout*", "train.*rl*_*"],
    r"under way are not served": ["train.*serve*"],
    r"takes the config's schedule": ["optimizer.*from_checkpoint*"],
}
# Reasons of a table that no key of ours could make untrue: rules of the other system, and keys
# that serve in another way.
OF_THEIRS = (
    r"beside it|DeepSpeed (takes|keeps)|GPT-NeoX reads|nothing of the kind|leave it out",
    r"nearest: (data|lora)\.[a-z_]+$",
    r"nearest: (train|layout|model|checkpoint)\.[a-z_]+($|, | and | = (optimizer|ulysses))",
    r"nearest: (cpu_offload_param|sequence-parallel|\[log\]|train --resume RUN)",
    r"train --resume|--resume goes on|layout.dp_replicate replicates|Meshwright's own",
    r"is found always|loss is minimised|no code of the (folder|file)",
    r"a block is gathered at a time|its own file is to be read",
)


def known() -> set[str]:
    """Return every key of the config, and each of its values that has a name."""
    names = {f"model.{key}" for key in FEATURES} | {f"model.rope_scaling={k}" for k in ROPE_KINDS}
    for section, spec in SECTIONS.items():
        for key, field in spec.model_fields.items():
            names.add(f"{section}.{key}")
            names |= {f"{section}.{key}={value}" for value in literals(field.annotation)}
    return names


def literals(annotation):
    """Yield the texts among the values that an annotation names."""
    if typing.get_origin(annotation) is typing.Literal:
        yield from (value for value in typing.get_args(annotation) if isinstance(value, str))
    else:
        for part in typing.get_args(annotation):
            yield from literals(part)


def of_tables():
    """Yield each key that a table may refuse, and why."""
    for name in TABLES:
        for key, row in load_table(name).rows.items():
            if row.unsupported:
                yield f"{name}: {key}", row.unsupported


def of_readers():
    """Yield the reasons that stand in the readers."""
    for file in files("meshwright.interop").iterdir():
        if file.name.endswith(".py"):
            yield from written(ast.parse(file.read_text(encoding="utf-8")))


def written(tree):
    """Yield the reasons that a reader writes out: those of refuse and miss, and every `reason`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            if node.func.attr in ("refuse", "miss") and len(node.args) > 1:
                yield text(node.args[1])
        elif isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "reason":
            yield text(node.value)


def text(node):
    """Return the words of a string in a program; what is computed is an ellipsis."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(
            text(part) if isinstance(part, ast.Constant) else "..." for part in node.values
        )
    return ""


def false_reasons(names: set[str]) -> dict[str, list[str]]:
    """Return the phrases that reasons have though one of the names makes them untrue."""
    told = [*(reason for _, reason in of_tables()), *of_readers()]
    return {
        phrase: hits
        for phrase, patterns in ABSENT.items()
        if any(re.search(phrase, reason) for reason in told)
        and (hits := sorted(n for n in names if any(fnmatch(n, p) for p in patterns)))
    }


def test_nothing_is_refused_that_is_there():
    assert false_reasons(known()) == {}


@pytest.mark.parametrize(
    ("name", "phrase"),
    [
        ("optimizer.ns_method", "no other iteration of Newton-Schulz"),
        ("optimizer.name=lion8", "no other optimizer"),
        ("optimizer.state_dtype=fp8", "no states in fp16 or fp8"),
        ("optimizer.sgd_nesterov", "the plain one"),
        ("model.mtp_layers", "next-token prediction"),
        ("train.batch_rampup", "every step has (the same|a whole) batch"),
        ("optimizer.schedule=inverse_sqrt", r"no [^;]*decay\b|see optimizer.schedule"),
    ],
)
def test_a_new_key_or_value_contradicts_a_refusal(name, phrase):
    assert phrase in false_reasons({name})


def test_every_reason_of_a_table_says_what_is_lacking():
    """Each has a phrase above, so that a new key can contradict it."""
    silent = [
        (where, reason)
        for where, reason in of_tables()
        if not any(re.search(phrase, reason) for phrase in (*ABSENT, *OF_THEIRS))
    ]
    assert silent == []


def test_every_phrase_is_in_use():
    told = [*(reason for _, reason in of_tables()), *of_readers()]
    assert not [p for p in ABSENT if not any(re.search(p, reason) for reason in told)]


def test_a_row_with_names_knows_all_of_ours():
    """A value that is new here has its name there, or is among the few that have none."""
    nameless = {
        "communication_data_type": {"same"},
        "accumulate-allreduce-grads-in-fp32": {"same"},
        "grad-reduce-in-bf16": {"fp32"},
        "optimizer-cpu-offload": {"none", "params", "activations"},
        "pipeline.activation_checkpoint_interval": {"selective"},
        "openai-gelu": {"gelu", "silu", "relu2"},
        "squared-relu": {"gelu", "gelu_tanh", "silu"},
        "training.enable_cpu_offload": {"optimizer", "activations"},
        "training.mixed_precision_param": {"fp16"},
        "training.mixed_precision_reduce": {"same"},
        "dynamo_config.dynamo_backend": {"auto"},
        "megatron_lm_config.megatron_lm_recompute_activations": {"full"},
        "megatron_lm_config.megatron_lm_recompute_granularity": {"none"},
        "megatron_lm_config.megatron_lm_optimizer_cpu_offload": {"params", "activations"},
        "lr_scheduler": {"wsd"},
        "activation_offloading": {"params", "optimizer", "none"},
        "scheduler.type": {"linear"},
        "bf16.bf16_optimizer_states": {"fp32", "int8"},
        "bf16.bf16_master_weights_and_grads": {"fp32"},
        "optimizer.implementation": {"fp32", "int8"},
        "exp-avg-dtype": {"int8"},
        "exp-avg-sq-dtype": {"int8"},
        "use_bnb_optimizer": {"fp32", "bf16"},
    }
    for name in TABLES:
        for key, row in load_table(name).rows.items():
            if row.values is None:
                continue
            section, _, field = row.to.partition(".")
            ours = set(literals(SECTIONS[section].model_fields[field].annotation))
            unnamed = ours - set(row.values.values())
            assert unnamed == nameless.get(key, set()), (name, key)
