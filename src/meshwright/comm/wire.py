"""What a rank really sends and computes: `Wire` records its messages, `WorkCounter` its FLOPs.

Both are dispatch modes, so they see every operation that reaches the kernels, in the forward, the
backward and a recomputed forward, and those that torch's own data parallelism issues. For an
operation inside of another one's kernel, they see the outer one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, NamedTuple

import torch.distributed as dist
from torch import Tensor

from meshwright.comm import shared
from meshwright.comm.groups import Groups
from meshwright.models import blockwise
from meshwright.program.attention import ScoreBounds, causal_scores
from meshwright.program.collectives import collectives
from meshwright.program.lower import Program
from meshwright.program.ring import causal_pieces
from meshwright.program.update import matrix_gathers
from meshwright.spec.recurrences import (
    chunk_flops,
    delta_ends_flops,
    state_space_ends_flops,
    state_space_flops,
)
from meshwright.torch_private import TorchDispatchMode, resolve_process_group, tree_leaves

# Axes in the order in which a group's name is looked for.
_AXES: Final = (
    *("tp", "cp", "pp", "ep", "shard", "expert_shard", "replicate", "expert_replicate"),
    *("data", "ends", "world"),
)

# The operation, and its argument that is a message: `program.collectives.Collective` says which.
# An all-gather of the functional kind returns it instead.
MESSAGES: Final[Mapping[str, tuple[str, str]]] = {
    "c10d::_allgather_base_": ("all_gather", "output_tensor"),
    "c10d::allgather_": ("all_gather", "output_tensors"),
    "c10d::_reduce_scatter_base_": ("reduce_scatter", "input_tensor"),
    "c10d::reduce_scatter_": ("reduce_scatter", "input_tensors"),
    "c10d::allreduce_": ("all_reduce", "tensors"),
    "c10d::allreduce_coalesced_": ("all_reduce", "tensors"),
    "c10d::alltoall_base_": ("all_to_all", "input"),
    "c10d::alltoall_": ("all_to_all", "input_tensors"),
    "c10d::send": ("send", "tensors"),
    "c10d::recv_": ("recv", "tensors"),
    "c10d::recv_any_source_": ("recv", "tensors"),
    "_c10d_functional::all_gather_into_tensor": ("all_gather", ""),
    "_c10d_functional::all_gather_into_tensor_out": ("all_gather", ""),
    "_c10d_functional::reduce_scatter_tensor": ("reduce_scatter", "input"),
    "_c10d_functional::all_reduce": ("all_reduce", "input"),
    "_c10d_functional::all_reduce_": ("all_reduce", "input"),
    "_c10d_functional::all_to_all_single": ("all_to_all", "input"),
}
# A channel's operators are like the functional ones.
_SPACES: Final = ("c10d", "_c10d_functional", "_c10d_functional_autograd", "symm_mem", shared.SPACE)
# Only waits for what was recorded when it began.
_WAITS: Final = ("_c10d_functional::wait_tensor", f"{shared.SPACE}::wait_tensor")


class WireMessage(NamedTuple):
    """A message of this rank: kind, axis, bytes as in `program.collectives.Collective`.

    Along `ep`, where the router decides the size, the bytes are 0. Other operations of torch that
    send are recorded by name.
    """

    kind: str
    axis: str
    bytes: int


class Wire(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the messages of ordinary and functional collectives, sends and receives.

    `messages` counts them. Groups of one rank send nothing and are left out, although torch's data
    parallelism reduces over them, too.
    """

    def __init__(self, groups: Groups) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.messages: Counter[WireMessage] = Counter()
        self._axes = _named(groups)

    def axis(self, name: str) -> str:
        """Return the axis under which messages along this one are recorded.

        Axes of one rank share a group, which sends nothing; it counts as the first of them in
        `_AXES`.
        """
        group = self._axes.get(name)
        return name if group is None else self._first(group)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run an operation, and record it if it is a collective."""
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if func.namespace in _SPACES:
            self._note(func, _bound(func, args, kwargs), out)
        return out

    def _note(self, func: Any, values: Mapping[str, Any], out: Any) -> None:
        name = func._schema.name
        group = _group(values)
        if name in _WAITS or (group is not None and group.size() == 1):
            return
        like = name.replace(f"{shared.SPACE}::", "_c10d_functional::")
        kind, message = MESSAGES.get(like, (name, ""))
        tensors: Any = dict(values)
        if like in MESSAGES:
            tensors = values[message] if message else out
        sent = [leaf for leaf in tree_leaves(tensors) if isinstance(leaf, Tensor)]
        message_bytes = sum(tensor.numel() * tensor.element_size() for tensor in sent)
        self.messages[_message(kind, self._axis_of(group), message_bytes)] += 1

    def _axis_of(self, group: dist.ProcessGroup | None) -> str:
        if group is None:
            return "unknown"
        known = self._first(group.group_name)
        return known or f"ranks {dist.get_process_group_ranks(group)}"

    def _first(self, group: str) -> str:
        return next((axis for axis in _AXES if self._axes.get(axis) == group), "")


def expected_messages(
    program: Program, rank: int, wire: Wire, *, updates: bool = False
) -> Counter[WireMessage]:
    """Return the messages of a rank in a step according to the program, with axes as `wire` names
    them.

    With `updates`, includes those of the optimizer's update, which comes after the gradients.
    """
    expected: Counter[WireMessage] = Counter()
    of_update = matrix_gathers(program, program.layout.mesh.coordinates(rank)) if updates else ()
    for message in (*collectives(program, rank), *of_update):
        key = _message(message.kind, wire.axis(message.axis), message.bytes)
        expected[key] += message.count
    return expected


def _message(kind: str, axis: str, size: int) -> WireMessage:
    return WireMessage(kind, axis, 0 if axis == "ep" else size)


def message_differences(
    expected: Counter[WireMessage], observed: Counter[WireMessage]
) -> Iterator[str]:
    """Yield sentences about messages whose observed count differs from the expected one."""
    for message in sorted(expected | observed):
        if expected[message] != observed[message]:
            yield (
                f"{message.kind} of {message.bytes} bytes over {message.axis}: "
                f"{observed[message]} where the program has {expected[message]}"
            )


def _named(groups: Groups) -> Mapping[str, str]:
    """Return the group name of each axis that has a group."""
    links = {"tp": groups.tp, "cp": groups.cp, "pp": groups.pp, "data": groups.data}
    links["ends"] = groups.ends
    names = {axis: link.name for axis, link in links.items() if link.group is not None}
    for axis in ("shard", "replicate"):
        names[axis] = groups.parameters.get_group(axis).group_name
        if groups.experts is not None:
            names[f"expert_{axis}"] = groups.experts.parameters.get_group(axis).group_name
    if groups.experts is not None:
        names["ep"] = groups.experts.ep.name
    if dist.is_initialized():
        names["world"] = dist.group.WORLD.group_name  # type: ignore[union-attr]
    return names


def _bound(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return an operation's arguments by name."""
    names = [argument.name for argument in func._schema.arguments]
    return {**dict(zip(names, args, strict=False)), **kwargs}


def _group(values: Mapping[str, Any]) -> dist.ProcessGroup | None:
    """Return the process group among a collective's arguments: an object, or its name."""
    if "process_group" in values:
        group: dist.ProcessGroup = dist.ProcessGroup.unbox(values["process_group"])
        return group
    name = values.get("group_name")
    if isinstance(name, str):
        resolve: Any = resolve_process_group
        named: dist.ProcessGroup = resolve(name)
        return named
    return name if isinstance(name, dist.ProcessGroup) else None


# Matrix products, and where the two factors are among the arguments.
_PRODUCTS: Final[Mapping[str, int]] = {
    "aten::mm": 0,
    "aten::addmm": 1,
    "aten::addmm_": 1,
    "aten::linear": 0,
    "aten::_grouped_mm": 0,
}
# Batched ones occur in attention alone, where no kernel takes its mask.
_BATCHED: Final[Mapping[str, int]] = {"aten::bmm": 0, "aten::baddbmm": 1}
# PyTorch's kernels and our own operators: causal attention, and attention inside documents.
_ATTENTION: Final = "aten::_scaled_dot_product_"
_CAPPED: Final = f"{blockwise.SPACE}::capped_attention"  # all pairs, as the products it is made of
_BLOCKS: Final = f"{blockwise.SPACE}::attention"
_DOCUMENTS: Final = f"{blockwise.SPACE}::attend_varlen"
# Products of the forward and of the backward for each pair of query and key.
_FORWARD, _BACKWARD = 2, 5
# The FLOPs of a token of recurrences, and how often an operator has them.
_RECURRENCES: Final[Mapping[str, tuple[Callable[[int, int, int, int], float], float]]] = {
    f"{blockwise.SPACE}::{name}{suffix}": (flops, times)
    for name, of_all, of_ends, of_starts in (
        ("delta_rule", chunk_flops, delta_ends_flops, chunk_flops),
        ("state_space", state_space_flops, state_space_ends_flops, state_space_ends_flops),
    )
    for suffix, flops, times in (
        ("", of_all, 1.0),
        ("_backward", of_all, _BACKWARD / _FORWARD),
        ("_ends", of_ends, 1.0),
        ("_starts", of_starts, 1.0),
    )
}
# A state times the transition of a piece.
_PASSED: Final = f"{blockwise.SPACE}::delta_rule_passed"


class WorkCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the FLOPs of this rank's matmuls, `2 m n k` each, and of its attention.

    Attention has two matmuls forward and five backward over the pairs of query and key: half of the
    pairs if the kernel is causal, fewer if it knows a window, otherwise all. Packed sequences count
    as if each were one document, which is an upper bound. Matmuls while `in_update` is set are
    those of the optimizer.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.products = 0.0
        self.attention = 0.0
        self.update = 0.0
        self.in_update = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run an operation, and add its FLOPs."""
        name = func._schema.name
        if self.in_update and (name in _PRODUCTS or name in _BATCHED):
            self.update += _product(name, args, {**_PRODUCTS, **_BATCHED}[name])
        elif name in _PRODUCTS:
            self.products += _product(name, args, _PRODUCTS[name])
        elif name in _BATCHED:
            self.attention += _product(name, args, _BATCHED[name])
        elif name.startswith((_ATTENTION, _CAPPED, _BLOCKS, _DOCUMENTS)):
            self.attention += _attention(name, _bound(func, args, kwargs or {}))
        elif name in _RECURRENCES:
            self.attention += _recurrence(name, _bound(func, args, kwargs or {}))
        elif name == _PASSED:
            transition, state, *_ = args
            self.attention += 2.0 * transition.numel() * state.shape[-1]
        return func(*args, **(kwargs or {}))


def _product(name: str, args: tuple[Any, ...], index: int) -> float:
    left, right = args[index], args[index + 1]
    outer: int = right.shape[0] if name == "aten::linear" else right.shape[-1]
    return 2.0 * int(left.numel()) * outer


def _recurrence(name: str, values: Mapping[str, Any]) -> float:
    """Return the FLOPs of an operator of a recurrence; its backward counts 2.5 times its forward,
    as for attention."""
    key, value = values["key"], values["value"]
    batch, length, key_heads, key_dim = map(int, key.shape)
    heads, value_dim = map(int, value.shape[2:])
    flops, times = _RECURRENCES[name]
    return batch * length * flops(heads, key_heads, key_dim, value_dim) * times


def _attention(name: str, values: Mapping[str, Any]) -> float:
    q, k = values["query"], values["key"]
    matmuls = _BACKWARD if name.endswith("_backward") else _FORWARD
    queries, keys = int(q.shape[2]), int(k.shape[2])
    bounds = ScoreBounds(values.get("window") or None, values.get("cap") or None)
    if name.startswith(_DOCUMENTS):
        pieces = causal_pieces(keys, bounds)
        pairs = sum(piece.pairs(bounds.cap is not None) for piece in pieces)
    elif name.startswith(_BLOCKS):
        pairs = causal_scores(keys, bounds.window)
    else:
        pairs = queries * keys * (0.5 if values.get("is_causal") else 1.0)
    return 2.0 * matmuls * pairs * int(q.numel()) / queries
