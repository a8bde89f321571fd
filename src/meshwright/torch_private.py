"""All that Meshwright uses of PyTorch's private API, by name, and the versions that were tested.

A private name may move or go in any release. No other module names one: `from
meshwright.torch_private import NAME` looks it up when it is imported, and says what is missing in
which version. A feature that can be left out asks `missing` first.
"""

# ruff: noqa: F401
from __future__ import annotations

import functools
import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import torch

from meshwright.errors import MeshwrightError

if TYPE_CHECKING:
    from torch import _C as C
    from torch import _dynamo as dynamo
    from torch import _foreach_mul_ as foreach_mul_
    from torch import _foreach_norm as foreach_norm
    from torch import _grouped_mm as grouped_mm
    from torch import _softmax_backward_data as softmax_backward_data
    from torch._dynamo import config as dynamo_config
    from torch._dynamo import trace_rules
    from torch._inductor.custom_graph_pass import CustomGraphPass
    from torch._inductor.utils import fresh_cache
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
    from torch.distributed import _symmetric_memory as symmetric_memory
    from torch.distributed._composable.replicate_with_fsdp import ReplicateModule, replicate
    from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllocMixin
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
    from torch.distributed.tensor._sharding_prop import ShardingPropagator
    from torch.distributed.tensor.placement_types import _StridedShard as StridedShard
    from torch.optim.optimizer import (
        _global_optimizer_post_hooks as global_optimizer_post_hooks,
    )
    from torch.testing._internal.distributed.fake_pg import FakeStore
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._python_dispatch import _disable_current_modes as disable_current_modes
    from torch.utils._pytree import (
        tree_flatten,
        tree_iter,
        tree_leaves,
        tree_map,
        tree_unflatten,
    )
    from torch.utils.checkpoint import _VersionWrapper as VersionWrapper

    EventType: Any
    abort_process_group: Any
    c10d_state: Any
    current_graph_task_id: Any
    execution_engine: Any
    resolve_process_group: Any

# The newest release of torch that the tests have run with; pyproject.toml allows none above it.
TESTED: Final = (2, 13)

_FSDP: Final = "torch.distributed.fsdp._fully_shard"
# Each name here, with its module and its name there; no name is the module itself.
NAMES: Final[dict[str, tuple[str, str]]] = {
    "C": ("torch._C", ""),
    "dynamo": ("torch._dynamo", ""),
    "dynamo_config": ("torch._dynamo.config", ""),
    "symmetric_memory": ("torch.distributed._symmetric_memory", ""),
    "trace_rules": ("torch._dynamo.trace_rules", ""),
    "foreach_mul_": ("torch", "_foreach_mul_"),
    "foreach_norm": ("torch", "_foreach_norm"),
    "grouped_mm": ("torch", "_grouped_mm"),
    "softmax_backward_data": ("torch", "_softmax_backward_data"),
    "current_graph_task_id": ("torch._C", "_current_graph_task_id"),
    "EventType": ("torch._C._profiler", "_EventType"),
    "execution_engine": ("torch.autograd", "Variable._execution_engine"),
    "CustomGraphPass": ("torch._inductor.custom_graph_pass", "CustomGraphPass"),
    "fresh_cache": ("torch._inductor.utils", "fresh_cache"),
    "FakeTensor": ("torch._subclasses.fake_tensor", "FakeTensor"),
    "FakeTensorMode": ("torch._subclasses.fake_tensor", "FakeTensorMode"),
    "FakeStore": ("torch.testing._internal.distributed.fake_pg", "FakeStore"),
    "ReplicateModule": (
        "torch.distributed._composable.replicate_with_fsdp",
        "ReplicateModule",
    ),
    "replicate": ("torch.distributed._composable.replicate_with_fsdp", "replicate"),
    "abort_process_group": ("torch.distributed.distributed_c10d", "_abort_process_group"),
    "c10d_state": ("torch.distributed.distributed_c10d", "_world"),
    "resolve_process_group": ("torch.distributed.distributed_c10d", "_resolve_process_group"),
    "DefaultAllocMixin": (f"{_FSDP}._fsdp_collectives", "DefaultAllocMixin"),
    "FSDPParam": (f"{_FSDP}._fsdp_param", "FSDPParam"),
    "FSDPParamGroup": (f"{_FSDP}._fsdp_param_group", "FSDPParamGroup"),
    "ShardingPropagator": ("torch.distributed.tensor._sharding_prop", "ShardingPropagator"),
    "StridedShard": ("torch.distributed.tensor.placement_types", "_StridedShard"),
    "global_optimizer_post_hooks": ("torch.optim.optimizer", "_global_optimizer_post_hooks"),
    "TorchDispatchMode": ("torch.utils._python_dispatch", "TorchDispatchMode"),
    "disable_current_modes": ("torch.utils._python_dispatch", "_disable_current_modes"),
    **{
        name: ("torch.utils._pytree", name)
        for name in ("tree_flatten", "tree_iter", "tree_leaves", "tree_map", "tree_unflatten")
    },
    "VersionWrapper": ("torch.utils.checkpoint", "_VersionWrapper"),
}


class MissingInTorch(MeshwrightError):
    """A private name that the installed PyTorch does not have."""


def __getattr__(name: str) -> Any:
    """Return a name of `NAMES`; raise `MissingInTorch` if this PyTorch has it not."""
    if name not in NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, attribute = NAMES[name]
    try:
        path = attribute.split(".") if attribute else []
        value = functools.reduce(getattr, path, importlib.import_module(module))
    except (ImportError, AttributeError) as error:
        where = f"{module}.{attribute}".rstrip(".")
        raise MissingInTorch(
            f"PyTorch {torch.__version__} has no {where}, which this needs: Meshwright's tests "
            f"have seen PyTorch up to {'.'.join(map(str, TESTED))}. Install that, or a newer "
            "Meshwright"
        ) from error
    globals()[name] = value
    return value


def missing(*names: str) -> str | None:
    """Return why a feature that needs such names is not there, None if it is."""
    for name in names:
        try:
            __getattr__(name)
        except MissingInTorch as error:
            return str(error)
    return None


@contextmanager
def replaced(owner: Any, name: str, make: Any) -> Iterator[None]:
    """Set an attribute to `make(its value)` inside of a `with` block."""
    before = vars(owner).get(name, getattr(owner, name))
    setattr(owner, name, make(before))
    try:
        yield
    finally:
        setattr(owner, name, before)
