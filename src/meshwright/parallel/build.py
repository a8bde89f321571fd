"""Builds this rank's part of the model from a program, in one ordered function."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from meshwright.comm.groups import Groups
from meshwright.kernels.float8 import take_float8
from meshwright.kernels.fp32_matmuls import take_route
from meshwright.kernels.recompute import recompute
from meshwright.kernels.uncompiled import leave_uncompiled
from meshwright.kernels.varlen import attend_varlen
from meshwright.layout.schedules import SCHEDULES
from meshwright.models import Transformer, build_model, init_parameter
from meshwright.models.attention import Attention
from meshwright.models.blocks import Recurrence
from meshwright.models.experts import ExpertMLP
from meshwright.models.latent import LatentAttention
from meshwright.models.mamba import Mamba2
from meshwright.parallel.apply import Parallel
from meshwright.parallel.context_parallel.context import Ring, Ulysses, positions
from meshwright.parallel.context_parallel.passing import Passing
from meshwright.parallel.data_parallel.float8_gather import Float8Gathers
from meshwright.parallel.data_parallel.gradients import GatheredParameter
from meshwright.parallel.data_parallel.sharded import (
    DTYPES,
    distribute_data,
    narrow_weights,
    ready_parameters,
    replicate_in_place,
    sum_apart_from_weights,
)
from meshwright.parallel.expert_parallel.dispatch import send_to_experts
from meshwright.parallel.expert_parallel.experts import cut_experts
from meshwright.parallel.expert_parallel.routing import balance_routers, routers
from meshwright.parallel.offload import Offload
from meshwright.parallel.tensor_parallel.adapters import cut_adapted
from meshwright.parallel.tensor_parallel.async_tp import OPTIONS, take_async_tp
from meshwright.parallel.tensor_parallel.deferred import Deferral, local
from meshwright.parallel.tensor_parallel.nf4_weights import give_levels, keep_in_nf4
from meshwright.parallel.tensor_parallel.tensor import (
    ColumnLinear,
    RowLinear,
    VocabEmbedding,
    cut_groups,
    cut_latent,
    over_all_heads,
    together,
)
from meshwright.parallel.tensor_parallel.tp_regions import TPRegion
from meshwright.program.float8 import gathers_float8
from meshwright.program.layers.linears import gathers_again
from meshwright.program.lower import Program
from meshwright.program.shards import Region, data_rank, whole
from meshwright.program.sizes import Sizes, fuses_loss, loss_rows, received
from meshwright.program.target import Route
from meshwright.spec.model import ModelSpec

# name, shape of the whole and region to the tensor of that region
Source = Callable[[str, tuple[int, ...], Region], Tensor]


@runtime_checkable
class ReadsAhead(Protocol):
    """A source that reads what it will be asked for next while it is asked for something else."""

    def read_ahead(self, requests: Iterable[tuple[str, Region]]) -> None:
        """Begin to read regions of parameters, which will be asked for in this order."""


Wrap = Callable[[nn.Module], None]  # has a module compiled


def build(
    program: Program,
    groups: Groups,
    device: torch.device,
    source: Source,
    *,
    compiled: bool = False,
) -> Parallel:
    """Return this rank's part of the model, with weights from `source`.

    For each stage of this rank: build it on the meta device, shard it over tp, replace its
    attention over cp, wrap blocks for recomputation, compile them, distribute over data, allocate,
    fill. The values of a shard depend only on its position in the whole tensor, so every mesh
    starts from the same weights.
    """
    matmul_route = take_route(program.train.matmul, device)
    deferral = Deferral()
    splits = splits_backward(program)
    options: dict[str, Any] = {"recomputes": program.layout.recompute == "full"}
    if program.train.async_tp:
        groups = take_async_tp(groups, device)
        options["compiler_options"] = OPTIONS
    wrap = compiler(matmul_route, splits=splits, **options) if compiled else None
    modules = describe(program, groups, deferral, wrap=wrap)
    return materialise(program, groups, device, source, modules, deferral)


def describe(
    program: Program,
    groups: Groups,
    deferral: Deferral,
    *,
    wrap: Wrap | None = None,
) -> dict[int, Transformer]:
    """Return this rank's stages by number, on the meta device, with every parallelism applied.

    `wrap` compiles a block; None: no compilation.
    """
    layout, spec = program.layout, program.model
    modules = {}
    offload = None
    if layout.offload == "activations":
        offload = Offload(Sizes.of(program).least_moved)
    for stage in program.held(groups.at["pp"]):
        model = build_model(spec, device="meta", max_seq_len=program.train.seq_len)
        model.keep(stage.layers, first=stage.is_first, last=stage.is_last)
        attend_by_varlen(model)
        cut_over_tp(model, program, groups, deferral)
        balance_routers(model, program, groups)
        share_out_experts(model, program, groups)
        if layout.tp > 1 or layout.ep > 1:
            _make_sharded(model, program, groups)
        cut_over_cp(model, program, groups)
        narrow_weights(model, program.train)
        keep_in_nf4(model, program)
        if program.train.fp8:
            take_float8(model.blocks, program.target)
        for block in model.blocks:
            compiled = (
                block if wrap is None else leave_uncompiled(block, program, splits=deferral.splits)
            )
            if wrap is not None and compiled is not block:
                wrap(compiled)
            is_whole = wrap is not None and compiled is block
            note = None if offload is None or is_whole else offload.note
            recompute(block, layout.recompute, note)
            if wrap is not None and is_whole:
                wrap(block)
            if offload is not None:
                offload.wrap(block, is_first=block is model.blocks[0])
        if program.target.uses_fsdp2(layout):
            of_experts = None if groups.experts is None else groups.experts.parameters
            mesh = groups.parameters
            options: dict[str, Any] = {"of_experts": of_experts, "keeps_frozen": True}
            if not spec.tie_embeddings:
                options |= {"embed": model.embed, "head": model.head}
            distribute_data(model, model.blocks, layout, program.train, mesh, **options)
        modules[stage.index] = model
    return modules


def compiler(
    products: Route,
    *,
    splits: bool = False,
    recomputes: bool = False,
    compiler_options: Mapping[str, Any] | None = None,
) -> Wrap:
    """Return a function that compiles a block.

    `products` is how its matmuls are computed; see `kernels.compiled.compile_block`.
    """
    # Not at the top: the compiler is a second of imports.
    from meshwright.kernels.compiled import compile_block

    arguments: dict[str, Any] = {
        "splits": splits,
        "recomputes": recomputes,
        "compiler_options": compiler_options,
    }
    return partial(compile_block, products=products, **arguments)


def materialise(
    program: Program,
    groups: Groups,
    device: torch.device,
    source: Source,
    modules: dict[int, Transformer],
    deferral: Deferral,
) -> Parallel:
    """Allocate the stages from `describe` on the device, and fill them with weights from
    `source`.
    """
    layout, train = program.layout, program.train
    attended, in_stream = _positions(program, groups, device)
    params: list[GatheredParameter] = []
    for index, model in modules.items():
        model.to_empty(device="cpu" if layout.offload == "params" else device)
        model.init_tables(device)
        give_levels(model, device)
        _place_buffers(model, device)
        trained = dict(model.named_parameters())
        if not program.target.uses_fsdp2(layout):  # only now: the parameters are new ones
            trained = replicate_in_place(model, layout, train, groups)
        elif train.weight_dtype != train.gradient_dtype:
            sum_apart_from_weights(model, DTYPES[train.gradient_dtype])
        params += _held(program, index, trained)
    stages: dict[int, nn.Module] = dict(modules)
    sizes = Sizes.of(program)
    rows = loss_rows(sizes.tokens, sizes.element, program.target)
    fuses = fuses_loss(sizes.element, layout.tp, program.target)
    gathers = None
    if gathers_float8(train, layout, program.target):
        ready = (parameter for model in modules.values() for parameter in ready_parameters(model))
        gathers = Float8Gathers(ready, DTYPES[train.precision], groups.shard)
    routed = {k: router for model in modules.values() for k, router in routers(model).items()}
    parts = (program, groups, device, stages, params, attended, in_stream, deferral, rows, fuses)
    parallel = Parallel(*parts, routers=routed, float8=gathers)
    fill(parallel, source)
    return parallel


def _place_buffers(model: nn.Module, device: torch.device) -> None:
    """Move buffers to the device, also where parameters are kept on the host."""
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            module.register_buffer(name, torch.empty_like(buffer, device=device))


def splits_backward(program: Program) -> bool:
    """Whether the schedule computes weight gradients apart from input gradients (zero bubble).

    False for models with adapters.
    """
    layout = program.layout
    return (
        SCHEDULES[layout.schedule].splits_backward and layout.pp > 1 and program.model.lora is None
    )


def cut_over_tp(model: Transformer, program: Program, groups: Groups, deferral: Deferral) -> None:
    """Shard attention heads, MLP widths and vocabulary over tp, as the program says.

    Also replaces linear layers where weight gradients may be deferred, even without tp.
    """
    layout = program.layout
    deferral.splits = splits_backward(program)
    if layout.tp == 1 and not deferral.splits:
        return
    tp_region = TPRegion(groups.tp, layout.sp, gathers_again=gathers_again(program))
    if program.model.lora is not None:
        for block in model.blocks:
            cut_adapted(block, tp_region, folds=layout.folds > 1)
    else:
        _take_over_linear(model, program, tp_region, deferral)
    if layout.tp == 1:
        return
    for block in model.blocks:
        if isinstance(block.attn, Attention):
            block.attn.norm_pair = over_all_heads(groups.tp)
        if isinstance(block.attn, Attention | Recurrence):
            block.attn.local = local
        if isinstance(block.attn, Mamba2):
            cut_groups(block.attn, groups.tp)
    if model.embed is not None:
        VocabEmbedding.take_over(model.embed, tp_region)


def _take_over_linear(
    model: Transformer, program: Program, tp_region: TPRegion, deferral: Deferral
) -> None:
    """Replace linear layers, also those of experts, by ones with deferrable weight gradients."""
    for block in model.blocks:  # first: linear layers of experts are not those of MLPs
        if isinstance(block.mlp, ExpertMLP):
            cut_experts(block.mlp, tp_region, deferral, folds=program.layout.folds > 1)
        else:
            block.mlp.project = together(tp_region, deferral)
        block.attn.project = together(tp_region, deferral)
        if isinstance(block.attn, LatentAttention):
            cut_latent(block.attn, deferral)
    for path, module in model.layers.named_modules(prefix="layers"):
        if type(module) is nn.Linear:
            is_row = program.shardings[f"{path}.weight"].tp_dim == 1
            (RowLinear if is_row else ColumnLinear).take_over(module, tp_region, deferral)


def share_out_experts(model: Transformer, program: Program, groups: Groups) -> None:
    """Make each rank compute its own experts, on tokens from all ranks of `ep`."""
    if groups.experts is None:
        return
    for block in model.blocks:
        mlp = block.mlp
        if isinstance(mlp, ExpertMLP):
            count, link = program.model.experts, groups.experts.ep
            come = partial(received, program)
            began = partial(send_to_experts, mlp.experts, count, link, come, groups.recorder)
            mlp.begin = began  # type: ignore[method-assign]


def _make_sharded(model: nn.Module, program: Program, groups: Groups) -> None:
    """Replace parameters by this rank's shards on the meta device, those sharded by tp as
    DTensors.
    """
    for path, module in model.named_modules():
        for name, _ in list(module.named_parameters(recurse=False)):
            sharding = program.shardings[f"{path}.{name}"]
            if sharding.tp_shape == sharding.part.shape:
                continue
            cut = torch.empty(sharding.tp_shape, device="meta")
            if sharding.tp_dim is not None:
                mesh = groups.parameters
                if sharding.ep > 1 and groups.experts is not None:
                    mesh = groups.experts.parameters
                dims = [Shard(sharding.tp_dim)]
                cut = DTensor.from_local(cut, mesh["tp"], dims, run_check=False)
            setattr(module, name, nn.Parameter(cut, requires_grad=sharding.part.trained))


def attend_by_varlen(model: Transformer) -> None:
    """Make attention use varlen attention, with document bounds from `Parallel` instead of
    a mask.
    """
    model.mask_of = lambda x, documents, cache: documents
    for block in model.blocks:
        if not isinstance(block.attn, Recurrence):
            block.attn.core = attend_varlen


def cut_over_cp(model: Transformer, program: Program, groups: Groups) -> None:
    """Replace what tokens take from others by what computes over all ranks of cp.

    It is `Ring` or `Ulysses` for attention, and `Passing` for recurrences.
    """
    if program.layout.cp == 1:
        return
    group, is_ring = groups.cp.required, program.layout.cp_kind == "ring"
    core = Ring(group, recorder=groups.recorder) if is_ring else Ulysses(group, attend_varlen)
    passing = Passing(groups.cp, program.layout.cp_kind)
    for block in model.blocks:
        if isinstance(block.attn, Recurrence):
            block.attn.convolve, block.attn.recur = passing.convolve, passing.recur
        else:
            block.attn.core = core


def _positions(
    program: Program, groups: Groups, device: torch.device
) -> tuple[Tensor | None, Tensor | None]:
    """Return the positions of a sequence in a rank's attention and in its residual stream.

    None: all positions.
    """
    layout, seq_len = program.layout, program.train.seq_len
    attended = None
    if layout.cp > 1:
        attended = positions(layout.cp_kind, seq_len, layout.cp, groups.cp.rank).to(device)
    in_stream = attended
    if layout.sp and layout.tp > 1:
        row = torch.arange(seq_len, device=device) if attended is None else attended
        in_stream = row.chunk(layout.tp)[groups.tp.rank]
    return attended, in_stream


def _held(
    program: Program, stage: int, trained: dict[str, nn.Parameter]
) -> list[GatheredParameter]:
    """Return the parameters of a stage that this rank holds shards of."""
    layout, params = program.layout, []
    ranks_of_stage = layout.world // layout.pp
    for name, parameter in trained.items():
        sharding = program.shardings[name]
        copies = ranks_of_stage // sharding.distinct
        if name == "embed.weight" and stage > 0:
            copies = 0
        params.append(GatheredParameter(name, stage, parameter, sharding, copies))
    return params


def seeded(spec: ModelSpec, seed: int, on_piece: Callable[[], None] = lambda: None) -> Source:
    """Return a source of freshly initialised weights; `on_piece` is called before each draw."""

    def region_of(name: str, shape: tuple[int, ...], region: Region) -> Tensor:
        rows, *columns = region
        local_region = [(0, rows[1] - rows[0]), *columns]
        return cut(init_parameter(name, shape, spec, seed, rows, on_piece), local_region)

    return region_of


@torch.no_grad()
def fill(parallel: Parallel, source: Source) -> None:
    """Fill this rank's shards of parameters, and all buffers, from `source`."""
    dtype = DTYPES[parallel.program.train.precision]
    buffers = [pair for module in parallel.modules.values() for pair in module.named_buffers()]
    regions = [(param.name, region_of(param, parallel)) for param in parallel.held]
    if isinstance(source, ReadsAhead):
        source.read_ahead([*((name, whole(buffer.shape)) for name, buffer in buffers), *regions])
    for name, buffer in buffers:
        shape = tuple(buffer.shape)
        buffer.copy_(source(name, shape, whole(shape)))
    for param, (_, region) in zip(parallel.held, regions, strict=True):
        parallel.recorder.beat()
        param.fill(source(param.name, param.sharding.part.real_shape, region), dtype)


def region_of(param: GatheredParameter, parallel: Parallel) -> Region:
    """Return the region of a whole parameter that this rank's shard covers, without padding."""
    coordinates = parallel.groups.at
    data = data_rank(parallel.program.layout, coordinates)
    return param.sharding.real_region(coordinates["tp"], data)


def cut(full: Tensor, region: Sequence[tuple[int, int]]) -> Tensor:
    """Return a view of a region of a tensor, given as (start, stop) per dim."""
    for dim, (start, stop) in enumerate(region):
        full = full.narrow(dim, start, stop - start)
    return full
