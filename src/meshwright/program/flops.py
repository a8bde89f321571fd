"""FLOPs of a step, as executed by the kernels of a rank."""

from __future__ import annotations

from meshwright.program.layers.linears import is_joint
from meshwright.program.lower import Program
from meshwright.program.operations import operations


def stops_early(program: Program) -> bool:
    """Whether recomputing a block's forward stops before its last matmul.

    torch.utils.checkpoint stops when everything that the backward needs exists, and a matmul needs
    only its input. Meshwright's own linear layers, under tp or with deferred weight gradients, save
    tensors after they have computed, and so do torchao's float8 layers, dropout, and a norm after
    the MLP.
    """
    model = program.model
    return not (is_joint(program) or model.dropout or model.norms_after or program.train.fp8)


def matmul_flops(program: Program, pp_rank: int) -> float:
    """Return the FLOPs of a pipeline rank's matmuls in one step, except attention's.

    Forward, backward and, with full recomputation, forward again, over all microbatches; `2 m n k`
    for each matmul of a linear layer or the head.
    """
    total = 0.0
    recomputes = program.layout.recompute == "full"
    last = f"layers.*.mlp.down{'.lora_b' if 'mlp.down' in program.model.adapted else ''}"
    for stage in program.held(pp_rank):
        for op in operations(program, stage):
            if op.kind == "product":
                is_again = recomputes and op.name.startswith("layers.")
                if op.name == last:
                    is_again = is_again and not stops_early(program)
                total += op.flops * op.count * (1 + op.backward + is_again)
    return total * program.microbatches


def attention_flops(program: Program, pp_rank: int, cp_rank: int = 0) -> float:
    """Return the FLOPs of a rank's attention in one step, as its kernels execute them.

    Two matmuls forward and five backward, `2 head_dim` FLOPs for each pair of query and key and
    each head; pairs as in `scores.pairs`. With full recomputation, forward twice. Those of
    recurrences are among them.
    """
    recomputed = program.layout.recompute == "full"
    return program.microbatches * sum(
        op.flops * op.count * (1 + op.backward + recomputed)
        for stage in program.held(pp_rank)
        for op in operations(program, stage, cp_rank=cp_rank)
        if op.kind == "attention"
    )
