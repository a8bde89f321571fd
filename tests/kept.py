"""What compiled blocks keep for the backward: of the compiler's own graphs, on one core."""

from __future__ import annotations

import torch
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.decomposition import select_decomp_table

import graphs
from meshwright.comm.flight_recorder import FlightRecorder
from meshwright.comm.groups import open_groups
from meshwright.layout import Layout
from meshwright.parallel import build
from meshwright.program.lower import lower
from meshwright.program.target import Target
from meshwright.simulate.fake import fake_world, replaced
from meshwright.spec.resolve import model_spec
from meshwright.spec.training import OptimizerSpec, TrainSpec


def kept_of_graphs(label, **sizes):
    """Return the shapes that each graph of a layout's blocks keeps on a GPU, but for its inputs."""
    found = []

    def forward(graph, examples):
        (outputs,) = [node.args[0] for node in graph.graph.nodes if node.op == "output"]
        made = [one for one in outputs if isinstance(one, torch.fx.Node)]
        found.append([tuple(one.meta["val"].shape) for one in made if one.op != "placeholder"])
        return graph.forward

    def cut(joint, inputs, **words):
        return min_cut_rematerialization_partition(joint, inputs, compiler="inductor", **words)

    backend = aot_autograd(
        fw_compiler=forward,
        bw_compiler=lambda graph, examples: graph.forward,
        partition_fn=cut,
        decompositions=select_decomp_table(),
    )
    with replaced(torch._dynamo, "lookup_backend", lambda _: lambda name: backend):
        graphs.compiled(label, Target("gpu"), **sizes)
    return found


def kept_bytes(label):
    """Return the bytes that a block compiled for a CPU keeps beside its input and weights."""
    model = model_spec(**graphs.SIZES)
    spec = TrainSpec(batch=4, seq_len=graphs.SEQ_LEN, precision="bf16", compile=True)
    layout, kept = Layout.parse(label), {}
    torch.compiler.reset()
    with fake_world(0, 1, FlightRecorder()) as world:
        program = lower(model, spec, OptimizerSpec(), layout, Target("cpu"))
        source = build.seeded(model, 0)
        groups = open_groups(layout, world)
        parallel = build.build(program, groups, world.device, source, compiled=True)
        block = parallel.modules[0].layers["0"]
        x = torch.randn(2, graphs.SEQ_LEN, model.dim).bfloat16().requires_grad_()
        given = [x, *block.parameters(), *block.attn.rope.tables(0, graphs.SEQ_LEN, None, 0)]
        known = {one.untyped_storage().data_ptr() for one in given}

        def note(tensor):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in known:
                kept[storage.data_ptr()] = storage
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            block(x)
    return sum(storage.nbytes() for storage in kept.values())
