"""Parallelizes a user's own model, for a user's own training loop."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn.utils.parametrize import is_parametrized

from meshwright.comm.groups import Link
from meshwright.errors import ConfigError, nearest_divisors, refusal
from meshwright.kernels.recompute import recompute
from meshwright.layout import AXES, Layout
from meshwright.models.lora import LoraLinear
from meshwright.parallel.context_parallel.context import positions as cut_positions
from meshwright.parallel.data_parallel.gradients import local_shard, norms
from meshwright.parallel.data_parallel.sharded import distribute_data
from meshwright.parallel.tensor_parallel.deferred import Deferral
from meshwright.parallel.tensor_parallel.tensor import ColumnLinear, RowLinear, VocabEmbedding
from meshwright.parallel.tensor_parallel.tp_regions import TPRegion
from meshwright.parallel.user_models.fp32 import kept_in_fp32
from meshwright.parallel.user_models.own_attention import OwnAttention
from meshwright.parallel.user_models.own_check import check_first
from meshwright.parallel.user_models.parts import GradientAgreement, PartFollower
from meshwright.spec.training import TrainSpec
from meshwright.torch_private import foreach_mul_

Style = Literal["column", "row", "vocab", "column_gathered"]

# What transformers' `tp_plan` calls them.
_STYLES: Mapping[str, Style] = {
    "colwise": "column",
    "rowwise": "row",
    "embedding_rowwise": "vocab",
    "colwise_gather_output": "column_gathered",
    "colwise_rep": "column_gathered",
}
# Whole weights that meet a part: these are found while the model computes, whoever names them.
_FOUND = "replicated_with_grad_allreduce"


def parallelize(
    model: nn.Module,
    layout: Layout,
    mesh: DeviceMesh,
    plan: Mapping[str, str] | None = None,
    train: TrainSpec | None = None,
) -> nn.Module:
    """Distribute a model in place over data, tensor and context parallelism, and return it.

    `mesh` is the result of `make_mesh`. Every rank passes the same weights. `plan` names linear and
    embedding layers by pattern (`*` is a number or a name) and how to shard them: "column", "row",
    "vocab" (rows of an embedding) or "column_gathered" (whole outputs, such as logits); None: the
    plan of a transformers model. `train` sets the precision; weights that a transformers model
    keeps in fp32 stay so. Gradients are summed over data: divide the loss by the global number of
    targets. The model's code must derive the number of heads from the size of the projections. If a
    whole weight is used with one rank's features, such as a norm of each head's queries, its
    gradient is summed over all tp ranks. Under cp, the model receives this rank's `positions` of
    each sequence, `F.scaled_dot_product_attention` sees whole sequences, and the first forward is
    compared with that of a whole sequence. Raises `ConfigError` for anything that the layout or the
    model does not allow, in the first backward if only that can show it.
    """
    if layout.offload == "activations":
        rule = "layout.offload = activations knows the blocks of Meshwright's models alone"
        raise ConfigError(refusal(rule, legal=["layout.recompute = full", "layout.offload = none"]))
    if train is not None and train.master == "none":
        rule = "train.master = none: the optimizer trains weights in the dtype that a model has"
        legal = ["model.to(torch.bfloat16) beside train.master = fp32"]
        raise ConfigError(refusal(rule, legal=legal))
    _check(layout, mesh)
    _refuse_adapters(model, layout)
    blocks = find_blocks(model)
    parameters = _mesh_of_parameters(layout, mesh)
    attention = None
    if layout.cp > 1:
        cp = _link(mesh["cp"])
        attention = OwnAttention(layout, cp)
        attention.follow_all(model)  # within tp's mode, which sees attention as one operator
    if layout.tp > 1:
        parts = _cut(model, parameters["tp"], _plan_of(model, plan))
        for module in (*blocks, model):
            parts.follow(module)
    for block in blocks:
        recompute(block, layout.recompute, draws=True)
    train = train or TrainSpec()
    in_fp32 = kept_in_fp32(model, train.precision)
    axes = "dp_replicate", "dp_shard"
    distribute_data(model, blocks, layout, train, parameters, *axes, in_fp32=in_fp32)
    if attention is not None:
        check_first(model, attention, layout, cp)
    return model


def make_mesh(layout: Layout, device: str = "cpu") -> DeviceMesh:
    """Return torch's mesh of a layout with all five axes named; a collective over the world."""
    return init_device_mesh(device, layout.mesh.shape, mesh_dim_names=AXES)


def positions(layout: Layout, seq_len: int) -> Tensor:
    """Return the positions of a sequence that this rank computes, int64 `[seq_len / cp]`,
    ascending.

    Use them to index inputs, targets and position ids; without cp, they are all positions. Raises
    `ConfigError` if `seq_len` tokens don't divide evenly.
    """
    return cut_positions(
        layout.cp_kind, seq_len, layout.cp, layout.mesh.coordinates(dist.get_rank())["cp"]
    )


def _mesh_of_parameters(layout: Layout, mesh: DeviceMesh) -> DeviceMesh:
    """Return the mesh over which parameters are distributed, where cp ranks count as data ranks.

    With ZeRO, cp multiplies the shards, otherwise the replicas.
    """
    if layout.cp == 1:
        return mesh
    replicas, shards = (1, layout.cp) if layout.zero else (layout.cp, 1)
    shape = (layout.pp, layout.dp_replicate * replicas, layout.dp_shard * shards, layout.tp)
    names = tuple(axis for axis in AXES if axis != "cp")
    return DeviceMesh(
        mesh.device_type, torch.arange(layout.world).view(shape), mesh_dim_names=names
    )


def _link(mesh: DeviceMesh) -> Link:
    return Link(mesh.get_group(), tuple(mesh.mesh.tolist()), mesh.get_local_rank())


def clip_grad_norm(parameters: Iterable[nn.Parameter], max_norm: float) -> float:
    """Clip the gradient of a parallelized model to a global norm; return the norm before clipping.

    Every element counts once, however the parameters are sharded; a collective over all ranks.
    """
    gradients = [p.grad for p in parameters if p.grad is not None]
    shards = [local_shard(gradient) for gradient in gradients]
    total = torch.zeros((), dtype=torch.float64, device=shards[0].device if shards else None)
    world = dist.get_world_size()
    copy_counts = [_copies(gradient, world) for gradient in gradients]
    if shards:
        local_norms = norms(shards).unbind()  # the host reads nothing until all is summed
        for copies in sorted(set(copy_counts)):
            shared = [
                norm
                for norm, count in zip(local_norms, copy_counts, strict=True)
                if count == copies
            ]
            total += torch.stack(shared).square().sum() / copies
    dist.all_reduce(total)
    norm = math.sqrt(total.item())
    if norm > max_norm:
        foreach_mul_(shards, max_norm / norm)
    return norm


def _copies(gradient: Tensor, world: int) -> int:
    """Return how many of the ranks hold the same shard of a gradient."""
    if not isinstance(gradient, DTensor):
        return world
    over = gradient.device_mesh
    cut = [dim for dim, place in enumerate(gradient.placements) if not place.is_replicate()]
    return world // math.prod(over.size(dim) for dim in cut)


def find_blocks(model: nn.Module) -> list[nn.Module]:
    """Return the repeated layers: the largest list of modules of one class, or an empty list."""
    lists = [
        list(module.children())
        for module in model.modules()
        if isinstance(module, nn.ModuleList | nn.ModuleDict | nn.Sequential)
    ]
    alike = [layers for layers in lists if len({type(layer) for layer in layers}) == 1]

    def size(layers: list[nn.Module]) -> int:
        return sum(p.numel() for layer in layers for p in layer.parameters())

    return max(alike, key=size, default=[])


def _refuse_adapters(model: nn.Module, layout: Layout) -> None:
    """Raise `ConfigError` for layers with adapters, PEFT's or Meshwright's, if there is tp."""
    adapted = (
        name
        for name, module in model.named_modules()
        if isinstance(module, LoraLinear)
        or hasattr(module, "lora_A")
        or getattr(module, "lora_b", None) is not None
    )
    if layout.tp > 1 and (name := next(adapted, None)) is not None:
        rule = f"layout.tp = {layout.tp} cuts linear layers, and {name} has a low-rank adapter"
        hint = "The [lora] section of a config trains adapters on any layout"
        raise ConfigError(refusal(rule, legal=["layout.tp = 1"], hint=hint))


def _check(layout: Layout, mesh: DeviceMesh) -> None:
    names = mesh.mesh_dim_names or ()
    if names != AXES or tuple(mesh.shape) != layout.mesh.shape:
        raise ConfigError(
            f"the mesh has {dict(zip(names, mesh.shape, strict=False))}, the layout "
            f"{dict(zip(AXES, layout.mesh.shape, strict=True))}; meshwright.make_mesh(layout) fits"
        )
    if layout.pp > 1:
        raise ConfigError(
            f"layout.pp = {layout.pp} needs a model that is cut into stages, each built on its own "
            "ranks, and a step that passes microbatches between them. Meshwright cuts the "
            "architectures that it knows: `meshwright train` with model.family = llama or neox, or "
            "model.init_from = a Hugging Face folder of one. A model of your own takes "
            "dp_replicate, dp_shard with zero, cp and tp: layout.pp = 1"
        )
    if layout.ep > 1:
        rule = f"layout.ep = {layout.ep} shares out experts of Meshwright's own models alone"
        raise ConfigError(refusal(rule, legal=["layout.ep = 1"]))
    if layout.dp_shard > 1 and not layout.zero:
        raise ConfigError(
            refusal(
                f"layout.dp_shard = {layout.dp_shard} requires layout.zero = 1, 2 or 3, "
                "but it is 0",
                legal=["layout.zero = 1", f"layout.dp_replicate = {layout.dp} with dp_shard = 1"],
            )
        )
    if layout.sp:
        raise ConfigError("layout.sp needs norms that support it, as in Meshwright's own models")


def _plan_of(model: nn.Module, plan: Mapping[str, str] | None) -> dict[str, str]:
    styles = plan if plan is not None else getattr(model, "tp_plan", None)
    if not styles:
        raise ConfigError(
            "layout.tp > 1 needs a plan: which layers to cut by column and by row, e.g. "
            '{"layers.*.mlp.up": "column", "layers.*.mlp.down": "row"}'
        )
    return {name: _STYLES.get(style, style) for name, style in styles.items() if style != _FOUND}


def _cut(model: nn.Module, mesh: DeviceMesh, plan: Mapping[str, str]) -> PartFollower:
    """Shard the layers that a plan names; return what follows sharded tensors between them.

    Raises `ConfigError` where a pattern matches no layer or a size is not divisible.
    """
    link = _link(mesh)
    tp_region = TPRegion(link, sp=False)
    modules_by_name = dict(model.named_modules())
    uses = Counter(parameter for _, parameter in model.named_parameters(remove_duplicate=False))
    # By what they were: tied parameters stay one.
    tied = dict[nn.Parameter, nn.Parameter | None].fromkeys(p for p, n in uses.items() if n > 1)
    del uses  # it would keep what is whole
    begins, ends = list[nn.Module](), list[nn.Module]()
    for pattern, style in plan.items():
        form = re.compile(re.escape(pattern).replace(r"\*", r"[^.]+"))
        names = [name for name in modules_by_name if form.fullmatch(name)]
        if not names:
            raise ConfigError(f"the plan's {pattern} fits no layer of the model")
        for name in names:
            _cut_one(name, modules_by_name[name], style, mesh, tp_region, link, tied)
            (begins if style == "column" else ends).append(modules_by_name[name])
    _refuse_half_cut(model, tied)
    GradientAgreement(model, link, [*begins, *ends])
    return PartFollower(link, begins, ends)


def _refuse_half_cut(model: nn.Module, tied: Mapping[nn.Parameter, nn.Parameter | None]) -> None:
    """Raise where a tied parameter is sharded in one layer and whole in another."""
    for name, parameter in model.named_parameters():
        if tied.get(parameter) is not None:
            raise ConfigError(
                f"{name} is tied to a layer that the plan cuts: let the plan cut its layer, too "
                '(an embedding tied to the logits by "vocab")'
            )


def _cut_one(
    name: str,
    module: nn.Module,
    style: str,
    mesh: DeviceMesh,
    tp_region: TPRegion,
    link: Link,
    tied: dict[nn.Parameter, nn.Parameter | None],
) -> None:
    """Shard one layer as `style` says, and replace its class by the tensor-parallel one."""
    kinds: dict[str, tuple[type[nn.Module], int]] = {
        "column": (nn.Linear, 0),
        "column_gathered": (nn.Linear, 0),
        "row": (nn.Linear, 1),
        "vocab": (nn.Embedding, 0),
    }
    if style not in kinds:
        raise ConfigError(refusal(f"the plan's style {style!r} for {name}", legal=list(kinds)))
    kind, dim = kinds[style]
    if not isinstance(module, kind):
        raise ConfigError(f"the plan cuts {name} by {style}, which is not an nn.{kind.__name__}")
    _refuse_uncuttable(name, module)
    for parameter_name, parameter in list(module.named_parameters(recurse=False)):
        if parameter_name == "bias" and style == "row":
            continue
        size = parameter.shape[dim]
        if size % link.size:
            legal = [f"layout.tp = {n}" for n in nearest_divisors(size, link.size)]
            rule = (
                f"layout.tp = {link.size} must divide dim {dim} of {name}.{parameter_name}: {size}"
            )
            raise ConfigError(refusal(rule, legal=legal))
        cut = tied.get(parameter)
        if cut is None:
            part = parameter.detach().chunk(link.size, dim)[link.rank].clone()
            cut = nn.Parameter(DTensor.from_local(part, mesh, [Shard(dim)], run_check=False))
        if parameter in tied:
            tied[parameter] = cut
        setattr(module, parameter_name, cut)
    if isinstance(module, nn.Embedding):
        VocabEmbedding.take_over(module, tp_region)
        return
    assert isinstance(module, nn.Linear)
    if style == "row":
        RowLinear.take_over(module, tp_region, Deferral())
        return
    ColumnLinear.take_over(module, tp_region, Deferral())
    if style == "column_gathered":
        module.register_forward_hook(lambda m, args, out: _gather(out, link))


def _refuse_uncuttable(name: str, module: nn.Module) -> None:
    """Raise for a layer whose computation a shard of its weights could not do."""
    weights = {parameter_name for parameter_name, _ in module.named_parameters(recurse=False)}
    reasons = {
        "its weight is computed from others (a parametrization such as weight_norm)": (
            is_parametrized(module) or not weights <= {"weight", "bias"} or "weight" not in weights
        ),
        "max_norm rescales its rows": getattr(module, "max_norm", None) is not None,
        "scale_grad_by_freq counts the ids of all rows": getattr(
            module, "scale_grad_by_freq", False
        ),
        "sparse gradients are not supported": getattr(module, "sparse", False),
    }
    for reason, holds in reasons.items():
        if holds:
            raise ConfigError(f"the plan cuts {name}, but {reason}: leave it out of the plan")


def _gather(x: Tensor, link: Link) -> Tensor:
    out: Tensor = _Gather.apply(x, link)  # type: ignore[no-untyped-call]
    return out


class _Gather(torch.autograd.Function):
    """All-gather the outputs of a column-parallel layer, for code that is the same on all ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, link: Link) -> Tensor:
        ctx.link = link
        parts = [torch.empty_like(x) for _ in range(link.size)]
        dist.all_gather(parts, x.contiguous(), group=link.group)
        return torch.cat(parts, -1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.chunk(ctx.link.size, -1)[ctx.link.rank], None
