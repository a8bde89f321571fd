"""A GPT of Megatron-Core in a loop of its own, which proves its own first steps on CPU ranks.

torchrun --nproc-per-node 2 examples/megatron_loop.py [--forget]

All ranks are tensor parallel. With --forget, the loop leaves out `finalize_model_grads`, which sums
the gradients of norms of heads over them. It needs megatron-core.
"""

import contextlib
import sys
import tempfile

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
from megatron.core.transformer.transformer_config import TransformerConfig

import meshwright as mw

VOCAB, LENGTH, ROWS, MICROBATCHES, STEPS = 64, 16, 2, 2, 3


def make_model(tp: int, groups: ProcessGroupCollection | None = None) -> GPTModel:
    """Return a small GPT, the same weights whatever the number of ranks that share it."""
    config = TransformerConfig(
        num_layers=2,
        hidden_size=32,
        num_attention_heads=4,
        ffn_hidden_size=64,
        normalization="RMSNorm",
        qk_layernorm=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=tp,
        use_cpu_initialization=True,
        persist_layer_norm=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
    )
    torch.manual_seed(0)
    layer = get_gpt_layer_local_spec(qk_layernorm=True, normalization="RMSNorm")
    return GPTModel(
        config,
        layer,
        VOCAB,
        LENGTH,
        parallel_output=False,
        position_embedding_type="rope",
        pg_collection=groups,
    )


def groups_alone() -> ProcessGroupCollection:
    """Return groups of this rank alone, for the model that is not sharded; a collective."""
    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    groups = ProcessGroupCollection()
    for name in ProcessGroupCollection.__dataclass_fields__:
        setattr(groups, name, alone)
    return groups


def train(model: DistributedDataParallel, optimizer: torch.optim.Optimizer, forget: bool) -> None:
    """Take some steps on random tokens, the same on all ranks."""
    mask = torch.ones(1, 1, LENGTH, LENGTH).tril() < 0.5
    places = torch.arange(LENGTH).expand(ROWS, -1)
    generator = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        model.zero_grad_buffer()
        for microbatch in range(MICROBATCHES):
            ids = torch.randint(VOCAB, (ROWS, LENGTH + 1), generator=generator)
            is_last = microbatch == MICROBATCHES - 1
            with contextlib.nullcontext() if is_last else model.no_sync():
                logits = model(ids[:, :-1], places, mask)
                loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
                (loss / MICROBATCHES).backward()
        if forget:
            model.finish_grad_sync()
        else:
            finalize_model_grads([model])
        for p in model.parameters():
            p.grad = p.main_grad
        optimizer.step()
        optimizer.zero_grad()  # else each backward would add to main_grad twice


def main(forget: bool) -> int:
    """Train three steps; 1 if the gradients of the first two are wrong."""
    dist.init_process_group("gloo")
    tp = dist.get_world_size()
    parallel_state.initialize_model_parallel(tp, create_gloo_process_groups=False)
    # On CPUs, its buffers and its random numbers ask for CUDA; on GPUs, these lines are not needed.
    torch.cuda.current_device = lambda: "cpu"
    CudaRNGStatesTracker.fork = lambda self, name="": contextlib.nullcontext()
    unsharded = make_model(1, groups_alone())
    gpt = make_model(tp)
    model = DistributedDataParallel(gpt.config, DistributedDataParallelConfig(), gpt)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    folders = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folders, 0)
    with mw.watch(model, folder=folders[0], reference=lambda: unsharded) as watched:
        train(model, optimizer, forget)
    passed = [watched.verdict is None or watched.verdict.passed]
    dist.broadcast_object_list(passed, 0)
    dist.destroy_process_group()
    return 0 if passed[0] else 1


if __name__ == "__main__":
    raise SystemExit(main("--forget" in sys.argv))
