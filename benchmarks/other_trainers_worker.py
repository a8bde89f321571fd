"""Steps of other systems on some ranks, each compared with one process.

Run by `benchmarks.other_trainers` under torchrun: `other_trainers_worker.py CASES.json OUT.jsonl`.
A case is {"system", "family", "layout", "microbatches", "fault", "seeded"}; a fault is one that was
public, put back by a patch, and a seeded one is the name of one of ours.
"""

import contextlib
import json
import sys
import tempfile
import traceback
import warnings
from pathlib import Path

warnings.filterwarnings("ignore")

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import transformers  # noqa: E402
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel  # noqa: E402

import meshwright as mw  # noqa: E402
from seeded_faults import seeded  # noqa: E402

VOCAB, LENGTH, ROWS = 96, 16, 8
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
HEADS = {"head_dim": 8}
HISTC = torch.histc
EXPERTS = {"num_experts_per_tok": 2}
WINDOW = {"sliding_window": 8}
FAMILIES = {
    "llama": ("LlamaConfig", HEADS),
    "llama, tied": ("LlamaConfig", {**HEADS, "tie_word_embeddings": True}),
    "qwen2": ("Qwen2Config", {}),
    "qwen3": ("Qwen3Config", HEADS),
    "gemma2": ("Gemma2Config", {**HEADS, **WINDOW, "query_pre_attn_scalar": 8}),
    "gemma3": ("Gemma3TextConfig", {**HEADS, **WINDOW, "query_pre_attn_scalar": 8}),
    "olmo2": ("Olmo2Config", {}),
    "olmo3": ("Olmo3Config", {}),
    "phi3": ("Phi3Config", {}),
    "smollm3": ("SmolLM3Config", {}),
    "exaone4": ("Exaone4Config", {**HEADS, **WINDOW}),
    "cohere2": ("Cohere2Config", WINDOW),
    "apertus": ("ApertusConfig", {}),
    "mixtral": ("MixtralConfig", {**HEADS, **EXPERTS, "num_local_experts": 4}),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        {**HEADS, **EXPERTS, "num_experts": 4, "moe_intermediate_size": 24, "norm_topk_prob": True},
    ),
    "olmoe": ("OlmoeConfig", {**EXPERTS, "num_experts": 4}),
    "gpt_oss": ("GptOssConfig", {**HEADS, **EXPERTS, **WINDOW, "num_local_experts": 4}),
    "granitemoe": ("GraniteMoeConfig", {**EXPERTS, "num_local_experts": 4}),
    "glm4_moe": (
        "Glm4MoeConfig",
        {
            **(HEADS | EXPERTS),
            "n_routed_experts": 4,
            "n_group": 1,
            "topk_group": 1,
            "moe_intermediate_size": 24,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "use_qk_norm": True,
        },
    ),
    "dots1": (
        "Dots1Config",
        {
            **(HEADS | EXPERTS),
            "n_routed_experts": 4,
            "n_group": 1,
            "topk_group": 1,
            "moe_intermediate_size": 24,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
        },
    ),
}


def folder_of(family, root):
    """Return the folder of a small random model, written by rank 0 where it is missing."""
    folder = root / family.replace(", ", "-")
    if dist.get_rank() == 0 and not folder.exists():
        kind, more = FAMILIES[family]
        model = transformers.AutoModelForCausalLM.from_config(
            getattr(transformers, kind)(**{**SIZES, **more}), dtype=torch.float32
        )
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for name, p in model.named_parameters():
                noise = torch.randn(p.shape, generator=generator)
                size = 0.5 if "gate.weight" in name or "router" in name else 0.15
                p.copy_(p + 0.1 * noise if p.dim() == 1 else size * noise)
        model.save_pretrained(folder)
    dist.barrier()
    return folder


COLUMNS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj")
TP_PLAN = {
    **{name: ColwiseParallel() for name in (*COLUMNS, "mlp.up_proj")},
    "self_attn.o_proj": RowwiseParallel(),
    "mlp.down_proj": RowwiseParallel(),
}


def batch_of(step):
    """Return a step's rows: unequal numbers of targets, some padding."""
    generator = torch.Generator().manual_seed(7 + step)
    ids = torch.randint(3, VOCAB, (ROWS, LENGTH), generator=generator)
    labels, mask = ids.clone(), torch.ones_like(ids)
    for row in range(ROWS):
        labels[row, : 1 + (row * 3) % 11] = -100
    mask[1, 12:], mask[6, 9:] = 0, 0
    labels[mask == 0] = -100
    return ids, labels, mask


def steps_of(
    model, take_step, data_ranks, data_rank, microbatches, backward=None,
    around=contextlib.nullcontext,
):  # fmt: skip
    """Take two steps of a loop whose loss is a mean over the targets of the global batch.

    A `backward` of an engine divides by the microbatches, and its step counts them; each of them
    is in a context that `around` returns.
    """
    for step in range(2):
        ids, labels, mask = batch_of(step)
        count = int((labels[:, 1:] != -100).sum())
        rows = torch.arange(data_rank, ROWS, data_ranks)
        for some in rows.chunk(microbatches):
            with around():
                out = model(
                    input_ids=ids[some],
                    attention_mask=mask[some],
                    labels=labels[some],
                    num_items_in_batch=count,
                    use_cache=False,
                )
                loss = out.loss * data_ranks
                loss.backward() if backward is None else backward(loss * microbatches)
                if backward is not None:
                    take_step()
        if backward is None:
            take_step()


def run_transformers(case, path, folder):
    """Train two steps by transformers' DistributedConfig."""
    from transformers.distributed import DistributedConfig

    config = DistributedConfig(**case["layout"])
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path, distributed_config=config, dtype=torch.float32
    ).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)

    def take_step():
        transformers.Trainer._mixed_mesh_grad_norm(None, model, 0.5)
        optimizer.step()
        optimizer.zero_grad()

    data_rank = dist.get_rank() // config.tp_size % config.dp_size
    with mw.watch(model, folder=folder, say=lambda line: None) as watched:
        steps_of(model, take_step, config.dp_size, data_rank, case["microbatches"])
    return watched.verdict


def run_meshwright(case, path, folder):
    """Train two steps of the same models by `mw.parallelize`."""
    layout = mw.Layout(**case["layout"])
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).train()
    mw.parallelize(model, layout, mw.make_mesh(layout))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)

    def take_step():
        mw.clip_grad_norm(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()

    with mw.watch(model, folder=folder, say=lambda line: None) as watched:
        data_ranks = layout.dp
        data_rank = layout.mesh.data_rank(dist.get_rank())
        microbatches = case["microbatches"]
        for step in range(2):
            ids, labels, mask = batch_of(step)
            count = int((labels[:, 1:] != -100).sum())
            for some in torch.arange(data_rank, ROWS, data_ranks).chunk(microbatches):
                model(
                    input_ids=ids[some],
                    attention_mask=mask[some],
                    labels=labels[some],
                    num_items_in_batch=count,
                    use_cache=False,
                ).loss.backward()
            take_step()
    return watched.verdict


def run_deepspeed(case, path, folder):
    """Train two steps by DeepSpeed's ZeRO or AutoTP."""
    import deepspeed

    layout, microbatches = case["layout"], case["microbatches"]
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).train()
    tp = layout.get("autotp_size", 1)
    data_ranks = dist.get_world_size() // tp
    config = {
        "train_micro_batch_size_per_gpu": ROWS // data_ranks // microbatches,
        "gradient_accumulation_steps": microbatches,
        "steps_per_print": 10**9,
        "gradient_clipping": 0.5,
        "zero_optimization": {"stage": layout.get("stage", 0)},
        "zero_force_ds_cpu_optimizer": False,
        "zero_allow_untested_optimizer": True,
    }
    if tp > 1:
        config["tensor_parallel"] = {"autotp_size": tp}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]

    def unsharded():
        return transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)

    with mw.watch(engine, folder=folder, reference=unsharded, say=lambda line: None) as watched:
        data_rank = dist.get_rank() // tp
        steps_of(engine, engine.step, data_ranks, data_rank, microbatches, engine.backward)
    engine.destroy()
    return watched.verdict


def run_accelerate(case, path, folder):
    """Train two steps by accelerate's DDP, FSDP2 or HSDP.

    It shards on accelerators alone, and leaves FSDP out on CPU ranks without a word: that check is
    passed by.
    """
    from accelerate import Accelerator, ParallelismConfig
    from accelerate.state import AcceleratorState, GradientState, PartialState
    from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin

    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()
    layout, microbatches = case["layout"], case["microbatches"]
    more = {}
    if "fsdp_version" in layout:
        PartialState(cpu=True).distributed_type = DistributedType.MULTI_GPU
        settings = {k: v for k, v in layout.items() if not k.endswith("_size")}
        policy = {"auto_wrap_policy": "transformer_based_wrap"}
        more["fsdp_plugin"] = FullyShardedDataParallelPlugin(**settings, **policy)
        sizes = {k: v for k, v in layout.items() if k.endswith("_size")}
        more["parallelism_config"] = ParallelismConfig(**sizes)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=microbatches, **more)
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    model, optimizer = accelerator.prepare(model, optimizer)

    def take_step():
        if accelerator.sync_gradients:
            accelerator.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()

    def around():
        return accelerator.accumulate(model)

    with mw.watch(model, folder=folder, say=lambda line: None) as watched:
        ranks, rank = dist.get_world_size(), dist.get_rank()
        steps_of(model, take_step, ranks, rank, microbatches, accelerator.backward, around)
    return watched.verdict


def run_torch(case, path, folder):
    """Train two steps by torch's DDP, FSDP1, FSDP2 and plans of DTensors."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import parallelize_module

    def unsharded():
        return transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).train()

    layout, model, world = dict(case["layout"]), unsharded(), dist.get_world_size()
    tp = layout.pop("tp", 1)
    mesh = init_device_mesh("cpu", (world // tp, tp), mesh_dim_names=("shard", "tp"))
    if tp > 1:
        for layer in model.model.layers:
            parallelize_module(layer, mesh["tp"], TP_PLAN)
    if layout.pop("fsdp1", None):
        model = fsdp1(model, layout)
    elif layout.pop("ddp", None):
        model = torch.nn.parallel.DistributedDataParallel(model, **layout)
    elif layout.pop("dp_shard", None):
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh["shard"], **layout)
        fully_shard(model, mesh=mesh["shard"], **layout)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)

    def take_step():
        if hasattr(model, "clip_grad_norm_"):
            model.clip_grad_norm_(0.5)
        else:
            transformers.Trainer._mixed_mesh_grad_norm(None, model, 0.5)
        optimizer.step()
        optimizer.zero_grad()

    with mw.watch(model, folder=folder, reference=unsharded, say=lambda line: None) as watched:
        data_ranks, data_rank = world // tp, dist.get_rank() // tp
        steps_of(model, take_step, data_ranks, data_rank, case["microbatches"])
    return watched.verdict


def fsdp1(model, layout):
    """Return a model in FSDP1, a part for each layer."""
    import functools

    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
    from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy

    layers = {type(layer) for layer in model.model.layers}
    if "sharding_strategy" in layout:
        layout["sharding_strategy"] = ShardingStrategy[layout["sharding_strategy"]]
    return FullyShardedDataParallel(
        model, device_id=torch.device("cpu"),
        auto_wrap_policy=functools.partial(
            transformer_auto_wrap_policy, transformer_layer_cls=layers
        ),
        **{"use_orig_params": True, **layout},
    )  # fmt: skip


def shifted_batch(step):
    """Return a step's rows and the targets of their positions, and how many targets there are."""
    ids, labels, _ = batch_of(step)
    targets = torch.cat([labels[:, 1:], torch.full((ROWS, 1), -100)], 1)
    return ids, targets, int((targets != -100).sum())


def stirred(model):
    """Return a model whose weights are away from the ones and zeros of a new one."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn(p.shape, generator=generator))
    return model


def run_torchtitan(case, path, folder):
    """Train two steps of torchtitan's models by its parallelisms, loss and clipping.

    It takes a machine without an accelerator for one with CUDA: the name of the device is given.
    Its FSDP sums by an operation that gloo lacks: torch's setting for a plain sum is on. Tokens of
    experts are counted as floats, since torch counts no integers on CPUs.
    """
    torch._utils._get_available_device_type = lambda: "cpu"
    torch.histc = lambda x, *args, **kwargs: HISTC(x.float(), *args, **kwargs).to(x.dtype)
    import dataclasses

    import torchtitan.protocols.train_spec as specs
    from torch.distributed.fsdp import FSDPModule
    from torchtitan.config import JobConfig
    from torchtitan.distributed import ParallelDims, utils

    family, layout = case["family"], case["layout"]
    spec = specs.get_train_spec(family.removesuffix("_moe"))
    job = JobConfig()
    job.training.seq_len = LENGTH
    job.training.mixed_precision_param = job.training.mixed_precision_reduce = "float32"
    job.activation_checkpoint.mode = "none"
    sizes = dict.fromkeys(("dp_replicate", "dp_shard", "cp", "tp", "pp", "ep", "etp"), 1)
    dims = ParallelDims(**{**sizes, **layout}, world_size=dist.get_world_size())
    dims.build_mesh()
    sizes = {"dim": 32, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "vocab_size": VOCAB}
    sizes["max_seq_len"] = LENGTH
    args = spec.model_args["debugmodel_moe" if family.endswith("_moe") else "debugmodel"]
    if family.startswith("qwen3"):
        sizes |= {"head_dim": 8, "hidden_dim": 48, "enable_weight_tying": False}
    if family.endswith("_moe"):
        routing = {
            "num_experts": 4,
            "top_k": 2,
            "use_grouped_mm": False,
            "score_before_experts": False,
        }
        sizes["moe_args"] = dataclasses.replace(args.moe_args, **routing)
        sizes["moe_inter_dim"] = 24
    args = dataclasses.replace(args, **sizes)

    def unsharded():
        torch.manual_seed(0)
        model = spec.model_cls(args)
        with torch.no_grad():
            model.init_weights(buffer_device=torch.device("cpu"))
        return stirred(model)

    model = spec.parallelize_fn(unsharded(), dims, job)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)
    loss_of = spec.build_loss_fn(job, parallel_dims=dims)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    data_ranks = dims.dp_replicate * dims.dp_shard
    data_rank = dims.get_mesh("batch").get_local_rank() if dims.dp_enabled else 0
    context = utils.get_train_context(dims.tp_enabled)
    with mw.watch(model, folder=folder, reference=unsharded, say=lambda line: None) as watched:
        for step in range(2):
            ids, targets, count = shifted_batch(step)
            for some in torch.arange(data_rank, ROWS, data_ranks).chunk(case["microbatches"]):
                with context():
                    (loss_of(model(ids[some]), targets[some]) / count).backward()
            parameters = list(model.parameters())
            utils.clip_grad_norm_(parameters, 0.5, foreach=True, ep_enabled=dims.ep_enabled)
            optimizer.step()
            optimizer.zero_grad()
    return watched.verdict


@contextlib.contextmanager
def without_cuda():
    """Let Megatron-Core compute on CPUs: its buffers and its random numbers ask for CUDA."""
    from megatron.core.tensor_parallel import random

    device, fork = torch.cuda.current_device, random.CudaRNGStatesTracker.fork
    torch.cuda.current_device = lambda: "cpu"
    random.CudaRNGStatesTracker.fork = lambda self, name="": contextlib.nullcontext()
    try:
        yield
    finally:
        torch.cuda.current_device, random.CudaRNGStatesTracker.fork = device, fork


def gpt_of_megatron(family, groups=None, **settings):
    """Return a small GPT of Megatron-Core, sharded by its process groups."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_config import TransformerConfig

    if "experts" in family:
        settings |= {"num_moe_experts": 4, "moe_router_topk": 2, "add_bias_linear": False}
        settings |= {
            "moe_token_dispatcher_type": "allgather",
            "moe_router_load_balancing_type": "none",
        }
    config = TransformerConfig(
        num_layers=2, hidden_size=32, num_attention_heads=4, ffn_hidden_size=64,
        use_cpu_initialization=True, hidden_dropout=0.0, attention_dropout=0.0,
        normalization="RMSNorm", persist_layer_norm=False, bias_dropout_fusion=False,
        qk_layernorm="norms of heads" in family, gradient_accumulation_fusion=False,
        masked_softmax_fusion=False, **settings,
    )  # fmt: skip
    torch.manual_seed(0)
    experts = config.num_moe_experts
    layer = get_gpt_layer_local_spec(experts, False, config.qk_layernorm, normalization="RMSNorm")
    return GPTModel(
        config, layer, VOCAB, LENGTH, parallel_output=False, position_embedding_type="rope",
        share_embeddings_and_output_weights="tied" in family, pg_collection=groups,
    )  # fmt: skip


def run_megatron(case, path, folder):
    """Train two steps of a GPT of Megatron-Core by its layers, buffers and sums of gradients."""
    from megatron.core import parallel_state
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.process_groups_config import ProcessGroupCollection

    layout = dict(case["layout"])
    sizes = {name: layout.pop(name, 1) for name in ("tp", "cp", "ep", "dp")}
    overlaps = layout.pop("overlap_grad_reduce", False)
    divides = layout.get("calculate_per_token_loss", False)  # by the number of targets, itself
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        sizes["tp"], context_parallel_size=sizes["cp"], expert_model_parallel_size=sizes["ep"],
        create_gloo_process_groups=False,
    )  # fmt: skip
    degrees = {
        "tensor_model_parallel_size": sizes["tp"],
        "context_parallel_size": sizes["cp"],
        "expert_model_parallel_size": sizes["ep"],
    }
    # One process of its own for each rank: the reference communicates with none.
    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    groups = ProcessGroupCollection()
    for name in ProcessGroupCollection.__dataclass_fields__:
        setattr(groups, name, alone)
    with without_cuda():
        plain = gpt_of_megatron(case["family"], groups)
        gpt = gpt_of_megatron(case["family"], **degrees, **layout)
        settings = DistributedDataParallelConfig(overlap_grad_reduce=overlaps)
        model = DistributedDataParallel(gpt.config, settings, gpt)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
        data_ranks = parallel_state.get_data_parallel_world_size()
        data_rank = parallel_state.get_data_parallel_rank()
        mask = torch.ones(1, 1, LENGTH, LENGTH).tril() < 0.5
        places = torch.arange(LENGTH)[None]
        with mw.watch(
            model, folder=folder, reference=lambda: plain, say=lambda line: None
        ) as watched:
            for step in range(2):
                ids, targets, count = shifted_batch(step)
                model.zero_grad_buffer()
                tokens = torch.zeros((), dtype=torch.int64)
                chunks = torch.arange(data_rank, ROWS, data_ranks).chunk(case["microbatches"])
                for number, some in enumerate(chunks):
                    is_last = number == len(chunks) - 1
                    with contextlib.nullcontext() if is_last else model.no_sync():
                        logits = model(ids[some], places.expand(len(some), -1), mask)
                        flat = logits.flatten(0, 1), targets[some].flatten()
                        loss = torch.nn.functional.cross_entropy(*flat, reduction="sum")
                        (loss if divides else loss * data_ranks / count).backward()
                        tokens += (targets[some] != -100).sum()
                finalize_model_grads([model], tokens if divides else None)
                for p in model.parameters():
                    p.grad = p.main_grad
                optimizer.step()
                optimizer.zero_grad()
    return watched.verdict


def put_back(fault):
    """Return a context in which a public fault of transformers is there again."""
    import transformers.distributed.expert_parallel as ep
    import transformers.distributed.tensor_parallel as tp
    from torch.distributed.fsdp import FSDPModule

    stack = contextlib.ExitStack()

    def patch(owner, name, value):
        original = getattr(owner, name)
        setattr(owner, name, value)
        stack.callback(setattr, owner, name, original)
        return original

    def without_sum(module, is_left_out):
        """Leave out the sums over ranks of some activations' gradients."""
        real = module._AllReduceBackward

        class Some:
            @staticmethod
            def apply(x, group):
                return x if is_left_out(x) else real.apply(x, group)

        patch(module, "_AllReduceBackward", Some)

    if fault == "transformers#48205":
        without_sum(ep, lambda x: not (x.dim() == 2 and x.shape[-1] > 4))
    elif fault == "torchtitan#2387":
        without_sum(tp, lambda x: x.shape[-1] <= 4)
    elif fault == "pytorch#160285":
        patch(FSDPModule, "set_gradient_divide_factor", lambda self, factor: None)
    return stack


SYSTEMS = {
    "torch": run_torch,
    "transformers": run_transformers,
    "accelerate": run_accelerate,
    "deepspeed": run_deepspeed,
    "torchtitan": run_torchtitan,
    "megatron-core": run_megatron,
    "meshwright": run_meshwright,
}


def run(case, root):
    """Return a case's row: right, wrong (which, how), refused or crashed."""
    row = dict(case)
    try:
        path = folder_of(case["family"], root) if case["family"] in FAMILIES else None
        seed = seeded(case["seeded"], mw) if "seeded" in case else contextlib.nullcontext()
        with put_back(case.get("fault")), seed, tempfile.TemporaryDirectory(dir=root) as folder:
            folders = [folder]
            dist.broadcast_object_list(folders, 0)
            verdict = SYSTEMS[case["system"]](case, path, Path(folders[0]))
            dist.barrier()
        if verdict is not None:
            row["verdict"] = verdict.as_dict()
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{Path(last.filename).name}:{last.lineno}"
        row["crashed"] = f"{type(error).__name__}: {str(error)[:300]} ({place})"
    return row


def main():
    """Run the cases of a file, and append a line for each."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(1)
    cases, out = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    if any(case["system"] == "deepspeed" for case in cases):
        import logging

        import deepspeed

        deepspeed.utils.logger.setLevel(logging.ERROR)
        deepspeed.init_distributed(dist_backend="gloo")
    else:
        dist.init_process_group("gloo")
    root = Path(sys.argv[1]).parent  # the launcher removes it
    for case in cases:
        rows = [None] * dist.get_world_size()
        dist.all_gather_object(rows, run(case, root))
        if dist.get_rank() == 0:
            crashed = next((row for row in rows if "crashed" in row), rows[0])
            with out.open("a") as file:
                file.write(json.dumps(crashed) + "\n")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
