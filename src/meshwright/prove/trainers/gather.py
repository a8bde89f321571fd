"""Reads whole parameters and gradients from the model of any engine, and the axes of its device
meshes.

`full_tensor()` of a DTensor communicates over the axes that shard it, and trusts the placement
"Replicate" on the others. So every rank calls it and keeps its own result: copies that should be
equal can then be compared.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from meshwright.comm.values import gather_values
from meshwright.prove.trainers.observed import GatheredTensor, MeshAxis, RankCopy

# Axes along which plain tensors are the same: those that wrappers of data parallelism have here.
_REPLICATED: Final = ("dp", "replicate")
# What wrappers put before or between the parts of a parameter's name.
_WRAPPERS: Final = ("_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod")
# Axes whose ranks read different parts of the same rows.
SEQUENCE_AXES: Final = {"cp", "context", "context_parallel", "sequence", "ulysses", "sp"}


def wrapped_in(module: nn.Module) -> nn.Module | None:
    """Return the module that a wrapper holds: DDP, FSDP1, a checkpoint wrapper, torch.compile or an
    engine; None if `module` is not a wrapper.
    """
    for name in ("module", *_WRAPPERS):
        inner = module._modules.get(name)
        is_wrapper = name != "module" or isinstance(module, DistributedDataParallel)
        is_wrapper |= type(module).__module__.startswith("megatron.core.distributed")
        if inner is not None and (is_wrapper or hasattr(module, "optimizer")):
            return inner
    return None


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the model inside of all wrappers."""
    while (inner := wrapped_in(model)) is not None:
        model = inner
    return model


def clean_names(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return a model's parameters by their names without the parts that wrappers add."""
    return {_clean_name(model, name): p for name, p in model.named_parameters()}


def _clean_name(model: nn.Module, name: str) -> str:
    module, parts = model, list[str]()
    for part in name.split("."):
        inner = module._modules.get(part)
        if inner is None or inner is not wrapped_in(module):
            parts.append(part)
        module = module if inner is None else inner
    return ".".join(parts)


def whole(tensor: Tensor) -> Tensor:
    """Return a copy of the whole tensor on the CPU, as this rank sees it; a collective for a
    DTensor.
    """
    tensor = tensor.detach()
    if isinstance(tensor, DTensor):
        tensor = tensor.full_tensor()
    return tensor.cpu().clone()


def sharding_axes(tensor: Tensor) -> tuple[str, ...]:
    """Return the names of the mesh axes that shard a tensor; empty for a plain tensor."""
    if not isinstance(tensor, DTensor):
        return ()
    names = _axis_names(tensor.device_mesh)
    return tuple(
        name
        for name, placement in zip(names, tensor.placements, strict=True)
        if not placement.is_replicate() and not placement.is_partial()
    )


class ModelReader:
    """Reads a model's whole parameters and gradients by name, from DDP, FSDP1, FSDP2, DTensor,
    Megatron or DeepSpeed.
    """

    def __init__(self, model: nn.Module) -> None:
        self.root, self.model = model, unwrapped(model)
        self._is_fsdp1 = any(_is_fsdp1(module) for module in model.modules())
        self.is_deepspeed = type(model).__module__.startswith("deepspeed")

    def parameters(self) -> dict[str, nn.Parameter]:
        """Return the trained parameters by name, without the parts of names that wrappers add."""
        return {name: p for name, p in clean_names(self.model).items() if p.requires_grad}

    def whole_bytes(self) -> int:
        """Return the bytes of all trained parameters, unsharded; a collective with FSDP1."""
        size = sum(
            getattr(p, "ds_numel", p.numel()) * p.element_size() for p in self.parameters().values()
        )
        return sum(gather_values(size)) if self._is_fsdp1 else size

    def prints(self) -> dict[int, tuple[float, float]]:
        """Return the sum and norm of each local parameter, by its id: an update changes them.

        Empty for engines that hold the parameters elsewhere between forwards.
        """
        if self._is_fsdp1 or self.is_deepspeed:
            return {}
        return {id(p): _print_of(p) for p in self.model.parameters() if p.requires_grad}

    def is_unlabelled_shard(self, parameter: Tensor) -> bool:
        """Whether a plain tensor is a shard, as in FSDP1, Megatron, DeepSpeed's ZeRO-3 or
        AutoTP.
        """
        is_marked = bool(getattr(parameter, "tensor_model_parallel", False))
        is_zero3 = hasattr(parameter, "ds_id")
        return self._is_fsdp1 or is_marked or is_zero3

    @torch.no_grad()
    def weights(self) -> dict[str, Tensor]:
        """Return copies of the whole weights on the CPU by name, gathered one at a time; a
        collective.
        """
        with self._summoned(gradients=False):
            by_name = {}
            for name, parameter in self.parameters().items():
                by_name[name] = whole(_of_deepspeed(parameter, "safe_get_full_fp32_param"))
            return by_name

    @torch.no_grad()
    def gradients(self) -> dict[str, Tensor | None]:
        """Return copies of the whole gradients on the CPU by name, None for parameters without one;
        a collective.
        """
        with self._summoned(gradients=True):
            by_name = dict[str, Tensor | None]()
            for name, parameter in self.parameters().items():
                gradient = _gradient(parameter)
                by_name[name] = None if gradient is None else whole(gradient)
            return by_name

    def sharded_over(self) -> dict[str, tuple[str, ...]]:
        """Return the names of the mesh axes that shard each parameter."""
        return {name: sharding_axes(tensor) for name, tensor in self.parameters().items()}

    @contextmanager
    def _summoned(self, gradients: bool) -> Iterator[None]:
        if not self._is_fsdp1:
            yield
            return
        from torch.distributed.fsdp import FullyShardedDataParallel

        with FullyShardedDataParallel.summon_full_params(
            self.root, writeback=False, with_grads=gradients
        ):
            yield

    def axes(self) -> list[MeshAxis]:
        """Return the axes of all device meshes and process groups of the model, with the groups of
        all ranks; a collective.
        """
        ranks = dict[str, tuple[int, ...]]()
        for parameter in self.parameters().values():
            if isinstance(parameter, DTensor):
                mesh = parameter.device_mesh
                for dim, name in enumerate(_axis_names(mesh)):
                    ranks.setdefault(name, tuple(dist.get_process_group_ranks(mesh.get_group(dim))))
        for module in self.root.modules():
            for name, group in _groups(module).items():
                ranks.setdefault(name, tuple(dist.get_process_group_ranks(group)))
        for name, group in _groups_of_megatron().items():
            ranks.setdefault(name, tuple(dist.get_process_group_ranks(group)))
        return assembled_axes(gather_values(ranks))


def assembled_axes(by_rank: Sequence[Mapping[str, tuple[int, ...]]]) -> list[MeshAxis]:
    """Merge the groups that each rank knows into the axes of the run; the last axis is all ranks,
    unless another one is.
    """
    names = list(dict.fromkeys(name for axis_ranks in by_rank for name in axis_ranks))
    axes = list[MeshAxis]()
    for name in names:
        groups = {tuple(sorted(axis_ranks[name])) for axis_ranks in by_rank if name in axis_ranks}
        if len({len(group) for group in groups}) == 1:
            axes.append(MeshAxis(name, tuple(sorted(groups))))
    everyone = tuple(range(len(by_rank)))
    if all(axis.groups != (everyone,) for axis in axes):
        axes.append(MeshAxis("all ranks", (everyone,)))
    return [axis for axis in axes if axis.size > 1]


def shared_copies(tensors: Mapping[str, Tensor | None]) -> dict[str, dict[str, list[int]]]:
    """Return, for each tensor, the ranks that have each distinct value, by its digest; a
    collective.

    The digest of a missing tensor is "none".
    """
    ranks_of = dict[str, dict[str, list[int]]]()
    for rank, digests in enumerate(gather_values({n: digest(t) for n, t in tensors.items()})):
        for name, value in digests.items():
            ranks_of.setdefault(name, {}).setdefault(value, []).append(rank)
    return ranks_of


def digest(tensor: Tensor | None) -> str:
    """Return the SHA-256 of a tensor's shape, dtype and bits as hex; "none" for None."""
    if tensor is None:
        return "none"
    head = f"{tuple(tensor.shape)} {tensor.dtype}".encode()
    bits = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.sha256(head + bits.numpy().tobytes()).hexdigest()


def assembled(
    gathered: GatheredTensor, shape: torch.Size, axes: Sequence[MeshAxis]
) -> GatheredTensor | None:
    """Concatenate plain tensors that are shards to the whole tensor of `shape`; None if it is
    uncertain how.

    The shapes say which dim is sharded. Exactly one axis must have the matching size; if several
    have, the one named "tp", since other axes shard by DTensor or FSDP. Axes of data parallelism
    never do: their ranks have the same plain tensors.
    """
    by_rank = gathered.by_rank()
    values = {rank: value for rank, value in by_rank.items() if value is not None}
    if all(value.shape == shape for value in values.values()):
        return gathered
    local = next(iter(values.values())).shape
    dims = [d for d in range(len(shape)) if len(local) == len(shape) and local[d] != shape[d]]
    if len(values) != len(by_rank) or len(dims) != 1 or len({v.shape for v in values.values()}) > 1:
        return None
    able = [axis for axis in axes if axis.name not in _REPLICATED]
    fitting = [axis for axis in able if axis.size * local[dims[0]] == shape[dims[0]]]
    fitting = [axis for axis in fitting if axis.name == "tp"] or fitting
    if len(fitting) != 1:
        return None
    copies = tuple(
        RankCopy(group, torch.cat([values[rank] for rank in group], dims[0]))
        for group in fitting[0].groups
    )
    return GatheredTensor(copies, (*gathered.sharded_over, fitting[0].name))


def _print_of(parameter: nn.Parameter) -> tuple[float, float]:
    local = parameter.detach()
    local = local._local_tensor if isinstance(local, DTensor) else local
    values = local.flatten().double()
    return float(values.sum()), float(values.norm())


def have_changed(before: Mapping[int, Any], after: Mapping[int, Any]) -> bool:
    """Whether any parameter in both dicts of `ModelReader.prints` has other numbers."""
    return any(before.get(key, value) != value for key, value in after.items())


def _axis_names(mesh: Any) -> tuple[str, ...]:
    if mesh.mesh_dim_names is not None:
        return tuple(mesh.mesh_dim_names)
    return ("shard",) if mesh.ndim == 1 else tuple(f"axis {dim}" for dim in range(mesh.ndim))


def _groups(module: nn.Module) -> dict[str, Any]:
    """Return the process groups of a DDP, FSDP1 or DeepSpeed wrapper by axis name; empty for other
    modules.
    """
    if isinstance(module, DistributedDataParallel):
        return {"dp": module.process_group}
    if _is_fsdp1(module):
        replicas = getattr(module, "_inter_node_pg", None)
        return {"shard": module.process_group} | ({"replicate": replicas} if replicas else {})
    if type(module).__module__.startswith("deepspeed") and hasattr(module, "data_parallel_group"):
        tp_group = getattr(module.mpu, "get_tensor_model_parallel_group", lambda: None)()
        return {"dp": module.data_parallel_group} | ({"tp": tp_group} if tp_group else {})
    return {}


def _groups_of_megatron() -> dict[str, Any]:
    """Return the process groups of Megatron-Core, if the program has made any."""
    state = sys.modules.get("megatron.core.parallel_state")
    if state is None or not state.is_initialized():
        return {}
    return {
        "tp": state.get_tensor_model_parallel_group(),
        "cp": state.get_context_parallel_group(),
        "dp": state.get_data_parallel_group(),
        "ep": state.get_expert_model_parallel_group(),
    }


def _is_fsdp1(module: nn.Module) -> bool:
    fsdp = sys.modules.get("torch.distributed.fsdp.fully_sharded_data_parallel")
    return fsdp is not None and isinstance(module, fsdp.FullyShardedDataParallel)


def _of_deepspeed(parameter: nn.Parameter, read: str) -> Tensor:
    """Return what a function of `deepspeed.utils`, such as "safe_get_full_fp32_param", reads of a
    parameter; the parameter if its ZeRO does not hold it.
    """
    if not hasattr(parameter, "_hp_mapping") and not hasattr(parameter, "ds_id"):
        return parameter
    from deepspeed import utils

    tensor = getattr(utils, read)(parameter)
    return parameter if tensor is None else tensor


def _gradient(parameter: nn.Parameter) -> Tensor | None:
    """Return a parameter's gradient: `.grad`, Megatron's `main_grad`, or DeepSpeed's; None if there
    is none.
    """
    if hasattr(parameter, "_hp_mapping") or hasattr(parameter, "ds_id"):
        from deepspeed.utils import safe_get_full_grad

        gradient: Tensor | None = safe_get_full_grad(parameter)
        return gradient
    main = getattr(parameter, "main_grad", None)
    return parameter.grad if parameter.grad is not None else main
