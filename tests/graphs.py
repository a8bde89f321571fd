"""Graphs that the compiler makes of a layout's blocks: counted on one core, without a kernel."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
from torch._dynamo.utils import counters

from meshwright.comm.flight_recorder import FlightRecorder
from meshwright.comm.groups import open_groups
from meshwright.kernels.compiled import compile_block
from meshwright.kernels.fp32_matmuls import target_of
from meshwright.layout import Layout
from meshwright.parallel import build
from meshwright.program.lower import lower
from meshwright.program.target import Route
from meshwright.prove.batches import make_batch
from meshwright.prove.case import Case
from meshwright.prove.compare import mine
from meshwright.simulate.fake import fake_world, replaced
from meshwright.spec.resolve import model_spec
from meshwright.spec.training import OptimizerSpec, TrainSpec

SEQ_LEN = 32
SIZES = {"vocab_size": 64, "dim": 32, "n_layers": 4, "n_heads": 4, "ffn_dim": 64}


class Compiled(NamedTuple):
    """What became of the blocks of a rank: graphs that run, breaks with their reasons."""

    graphs: int
    calls: int
    breaks: dict[str, int]


def compiled(
    label, target=None, packed=False, rank=0, precision="bf16", model=None, fp8=False, **sizes
):
    """Return what the compiler makes of the blocks of a rank in two steps of a layout."""
    model = model or model_spec(**{**SIZES, **sizes})
    spec = TrainSpec(batch=4, seq_len=SEQ_LEN, precision=precision, compile=True, fp8=fp8)
    layout, calls = Layout.parse(label), []
    torch.compiler.reset()
    counters.clear()

    def backend(graph, examples):
        calls.append(0)
        at = len(calls) - 1
        run = torch._dynamo.lookup_backend("aot_eager")(graph, examples)

        def counted(*args):
            calls[at] += 1
            return run(*args)

        return counted

    with (
        fake_world(rank, layout.world, FlightRecorder()) as world,
        replaced(build, "compiler", lambda _: partial(count_by, backend)),
    ):
        case = Case(model, spec, layout, packed=packed)
        target = target or target_of(spec, world.device, packed=packed)
        program = lower(model, spec, OptimizerSpec(), layout, target._replace(packed=packed))
        groups = open_groups(layout, world)
        source = build.seeded(model, 0)
        parallel = build.build(program, groups, world.device, source, compiled=True)
        batch = mine(make_batch(case, 0), program, world)
        for _ in range(2):
            parallel.backward(batch)
    return Compiled(len(calls), sum(calls), dict(counters["graph_break"]))


def count_by(backend, products, splits, recomputes):
    return partial(compile_block, products=Route(), splits=splits, backend=backend)
