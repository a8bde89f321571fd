"""The first forward under cp: checks that a user's model computes the same on sharded sequences.

Attention is not the only operation along a sequence. A model may number its tokens itself, use
convolutions, shift its labels, or have its own attention code; on sharded sequences, each of these
silently gives wrong results. So before the first forward, some tokens of its batch are computed
both sharded and whole, and the inputs and outputs of each attention and the model's output are
compared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from meshwright.comm.groups import Link
from meshwright.errors import ConfigError
from meshwright.layout import Layout
from meshwright.parallel.context_parallel.context import positions
from meshwright.parallel.data_parallel.gradients import local_shard
from meshwright.parallel.data_parallel.sharded import reshard
from meshwright.parallel.user_models.own_attention import Call, OwnAttention
from meshwright.torch_private import tree_flatten, tree_leaves, tree_unflatten

TOKENS: Final = 512  # at most so many tokens of one row are computed both ways
_HOW = (
    "Cut each row by at = meshwright.positions(layout, seq_len): model(inputs[:, at], "
    "position_ids=at[None]), targets[:, at]"
)
_UNCALLED = (
    "It calls F.scaled_dot_product_attention nowhere, which is what cp replaces (transformers: "
    'attn_implementation="sdpa"). '
)


def check_first(model: nn.Module, attention: OwnAttention, layout: Layout, link: Link) -> None:
    """Register a check on the model's first forward, which raises `ConfigError` on every rank.

    A collective over the world, like the forward.
    """
    is_under_way = False

    def check(module: nn.Module, args: Any, kwargs: Any) -> None:
        nonlocal is_under_way
        if is_under_way:
            return
        is_under_way = True
        try:
            _BothWays(module, attention, layout, link).check(args, kwargs)
            handle.remove()
        finally:
            is_under_way = False

    handle = model.register_forward_pre_hook(check, with_kwargs=True, prepend=True)


class _ShareAndWhole(NamedTuple):
    """Arguments of a forward for a short sequence: this rank's shard (`cut`), and all (`uncut`)."""

    cut: tuple[Any, Any]
    uncut: tuple[Any, Any]


class _BothWays:
    def __init__(
        self, model: nn.Module, attention: OwnAttention, layout: Layout, link: Link
    ) -> None:
        self._model, self._attention, self._layout, self._link = model, attention, layout, link
        self._at = torch.empty(0, dtype=torch.int64)
        self._off = dict[str, Tensor]()
        self._bound = torch.finfo(torch.float32).eps ** 0.5
        self._calls = 0

    def check(self, args: Any, kwargs: Any) -> None:
        """Run the model on a rank's shard and on the whole short sequence, and compare."""
        rows = self._short_row(args, kwargs)
        outs = list[Tensor]()

        def keep(call: Call, attend: Callable[[Call], Tensor]) -> Tensor:
            self._refuse_together(self._attention.refused(call), call.query.device)
            out = attend(call)
            if out.shape[2] != len(self._at):
                raise ConfigError(
                    f"layout.cp = {self._link.size}: attention sees {out.shape[2]} tokens where "
                    f"the model was given {len(self._at)} along dim 1. {_HOW}"
                )
            operands.extend(call[:3])
            outs.append(out)
            return out

        def compare(call: Call, attend: Callable[[Call], Tensor]) -> Tensor:
            out, index = F.scaled_dot_product_attention(**call._asdict()), self._calls
            self._calls += 1
            if index >= len(outs):
                return out
            cut_operands = (*operands[3 * index : 3 * index + 3], outs[index])
            for name, cut, uncut in zip(
                ("queries", "keys", "values", "output"), cut_operands, (*call[:3], out), strict=True
            ):
                self._compare(f"the {name} of attention {index + 1}", cut, uncut, dim=2)
            # Rounding errors of layers must not add up: the next layer gets the same input.
            return self._gathered(outs[index], 2)

        operands = list[Tensor]()
        with _as_evaluated(self._model), _without_zeros(self._model):
            cut = self._forward(keep, rows.cut)
            uncut = self._forward(compare, rows.uncut)
        self._compare_results(tree_leaves(cut), tree_leaves(uncut))
        self._judge()

    def _forward(self, watch: Any, arguments: tuple[Any, Any]) -> Any:
        self._attention.watch = watch
        try:
            return self._model(*arguments[0], **arguments[1])
        finally:
            self._attention.watch = None
            reshard(self._model)  # no backward does

    def _refuse_together(self, wrong: str | None, device: torch.device) -> None:
        """Raise on all ranks if any rank has a reason, so that none waits for it."""
        flag = torch.tensor(int(wrong is not None), device=device)
        dist.all_reduce(flag, dist.ReduceOp.MAX)
        if flag.item():
            raise ConfigError(wrong or "another rank was refused: its own error says why")

    def _short_row(self, args: Any, kwargs: Any) -> _ShareAndWhole:
        """Return arguments with the first tokens of the first sequence; raises if sharded
        wrongly.
        """
        leaves, form = tree_flatten((args, kwargs))
        tokens = next(
            (leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim() > 1), None
        )
        if tokens is None:
            raise ConfigError(f"the model was given no tokens `[batch, seq / cp]`. {_HOW}")
        rows, n = tokens.shape[:2]
        self._agree_on(rows, n, tokens.device)
        cp, rank, kind = self._link.size, self._link.rank, self._layout.cp_kind
        positions(kind, n * cp, cp, rank)  # raises where it does not cut
        _refuse_by_length(self._model, n * cp)
        short = min(n * cp, max(TOKENS // (2 * cp), 1) * 2 * cp)
        self._at = positions(kind, short, cp, rank).to(tokens.device)
        cut, uncut, gathered = list(leaves), list(leaves), list[Tensor]()
        for index, leaf in enumerate(leaves):
            dim = _token_dim(leaf, n)
            if dim is None:
                continue
            first = leaf.detach()[:1] if dim and leaf.shape[0] == rows else leaf.detach()
            full = self._gathered(first, dim)
            gathered.append(full)
            uncut[index] = full.narrow(dim, 0, short)
            cut[index] = uncut[index].index_select(dim, self._at)
        self._refuse_wrong_cut(gathered, n)
        numbered = kwargs.get("position_ids")
        if isinstance(numbered, Tensor) and numbered.dim() == 2 and numbered.shape[1] == n:
            self._refuse_varlen(self._gathered(numbered, 1))
        return _ShareAndWhole(tree_unflatten(cut, form), tree_unflatten(uncut, form))

    def _agree_on(self, rows: int, n: int, device: torch.device) -> None:
        """Raise if ranks have different numbers of sequences or tokens."""
        bounds = torch.tensor([rows, n, -rows, -n], device=device)
        dist.all_reduce(bounds, dist.ReduceOp.MAX, group=self._link.group)
        largest, smallest = bounds[:2].tolist(), [-x for x in bounds[2:].tolist()]
        if largest != smallest:
            raise ConfigError(
                f"the ranks of cp have rows x tokens of {smallest} up to {largest}: all have the "
                f"same rows, and as many tokens of each. {_HOW}"
            )

    def _refuse_wrong_cut(self, gathered: list[Tensor], n: int) -> None:
        """Raise if all ranks have the same tokens, or positions in a wrong order."""
        cp, kind = self._link.size, self._layout.cp_kind
        shares = [
            torch.stack([x.flatten()[positions(kind, n * cp, cp, rank)] for rank in range(cp)])
            for x in gathered
            if x.numel() == n * cp
        ]
        if shares and all(bool((share == share[0]).all()) for share in shares):
            raise ConfigError(f"every rank of cp = {cp} was given the same tokens. {_HOW}")
        for tensor in gathered:
            if tensor.numel() != n * cp or tensor.is_floating_point() or tensor.dtype == torch.bool:
                continue
            steps = tensor.flatten().sort().values.diff()
            if bool((steps == 1).all()) and not bool((tensor.flatten().diff() == 1).all()):
                raise ConfigError(
                    f"positions are cut in another order than layout.cp_kind = {kind} has. {_HOW}"
                )

    def _refuse_varlen(self, numbered: Tensor) -> None:
        """Raise if positions restart within a sequence, which means packed documents in
        transformers.

        A rank's shard may lie in one document, so that transformers makes no mask for it.
        """
        if not bool((numbered.diff() == 1).all()):
            raise ConfigError(
                f"position_ids restart within a row: layout.cp = {self._link.size} attends to "
                "the whole row, and would not tell packed documents apart. `meshwright train` "
                "does; or layout.cp = 1"
            )

    def _gathered(self, local: Tensor, dim: int) -> Tensor:
        """All-gather a tensor that is sharded by tokens along `dim`, in the order of tokens."""
        cp, kind, n = self._link.size, self._layout.cp_kind, local.shape[dim]
        parts = [torch.empty_like(local, memory_format=torch.contiguous_format) for _ in range(cp)]
        dist.all_gather(parts, local.contiguous(), group=self._link.group)
        order = torch.cat([positions(kind, n * cp, cp, rank) for rank in range(cp)])
        return torch.cat(parts, dim).index_select(dim, order.argsort().to(local.device))

    def _compare(self, name: str, cut: Tensor, uncut: Tensor, dim: int) -> None:
        """Record the largest difference of any token, relative to the mean norm of tokens."""
        wide = torch.promote_types(cut.dtype, torch.float32)
        expected = uncut.index_select(dim, self._at).to(wide).movedim(dim, 0).flatten(1)
        size = expected.norm(dim=1).mean().clamp(min=torch.finfo(wide).tiny)
        actual = cut.to(wide).movedim(dim, 0).flatten(1)
        same = actual.shape == expected.shape
        off = (
            (actual - expected).norm(dim=1).max() / size if same else size.new_tensor(float("inf"))
        )
        self._enter(name, off, cut.dtype)

    def _compare_results(self, cut: list[Any], uncut: list[Any]) -> None:
        short = len(self._at) * self._link.size
        for cut_output, uncut_output in zip(cut, uncut, strict=True):
            if not isinstance(cut_output, Tensor) or not cut_output.is_floating_point():
                continue
            if (
                uncut_output.dim() > 1
                and uncut_output.shape[1] == short
                and cut_output.shape[1] == len(self._at)
            ):
                self._compare("the output of the model", cut_output, uncut_output, dim=1)
            elif uncut_output.dim() == 0:
                total = cut_output.clone()
                dist.all_reduce(total, group=self._link.group)
                size = uncut_output.abs().clamp(min=torch.finfo(cut_output.dtype).tiny)
                off = (
                    torch.stack([total - uncut_output, total / self._link.size - uncut_output])
                    .abs()
                    .min()
                )
                self._enter("the loss that the model returns", off / size, cut_output.dtype)

    def _enter(self, name: str, off: Tensor, dtype: torch.dtype) -> None:
        self._bound = max(self._bound, torch.finfo(dtype).eps ** 0.5)
        self._off[name] = torch.nan_to_num(off.double(), nan=float("inf"))

    def _judge(self) -> None:
        """Raise on all ranks if any has found a difference."""
        if not self._off:
            return
        worst = torch.stack(list(self._off.values()))
        dist.all_reduce(worst, dist.ReduceOp.MAX)
        for name, off in zip(self._off, worst.tolist(), strict=True):
            if off > self._bound:
                hint = "" if self._calls else _UNCALLED
                raise ConfigError(
                    f"the model differs with its rows cut over cp = {self._link.size}: {name} "
                    f"differs by {off:.2g} of its size from that of whole rows. {hint}Something "
                    "besides causal attention mixes tokens of a row: positions that the model "
                    "numbers itself instead of those it is given; a convolution or a recurrence; "
                    "labels that it shifts (compute the loss outside of the model, from targets "
                    f"that are cut like the inputs). {_HOW}"
                )


def _token_dim(leaf: Any, n: int) -> int | None:
    """Return the dim of an argument along which its `n` tokens lie, or None."""
    if not isinstance(leaf, Tensor) or leaf.dim() == 0:
        return None
    dim = min(leaf.dim() - 1, 1)
    return dim if leaf.shape[dim] == n else None


def _refuse_by_length(model: nn.Module, row_length: int) -> None:
    """Raise for a transformers model whose behaviour depends on the sequence length.

    From its shard, a rank cannot tell how long the sequence is.
    """
    config: Any = getattr(model, "config", None)
    for name in ("sliding_window", "attention_chunk_size"):
        window = getattr(config, name, None)
        if isinstance(window, int) and window < row_length:
            raise ConfigError(
                f"the model's {name} = {window} is less than the row of {row_length} tokens, and "
                f"cp attends to the whole row: use rows of up to {window} tokens, or layout.cp = 1"
            )
    kinds = [getattr(config, name, None) for name in ("rope_parameters", "rope_scaling")]
    for kind in _words(kinds):
        if kind in ("dynamic", "longrope"):
            raise ConfigError(
                f"the model's rope_type = {kind} rotates by the length of the row, which no rank "
                "of cp sees: layout.cp = 1"
            )


def _words(value: Any) -> Iterator[str]:
    """Yield the strings in nested mappings and lists."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from _words(list(value.values()))
    elif isinstance(value, list):
        for item in value:
            yield from _words(item)


@contextmanager
def _as_evaluated(model: nn.Module) -> Iterator[None]:
    """Within this context, disable dropout and gradients; restore modes and buffers afterwards."""
    modes = {module: module.training for module in model.modules()}
    buffers = [(buffer, buffer._version, buffer.clone()) for buffer in model.buffers()]
    model.eval()
    try:
        with torch.no_grad():
            yield
            for buffer, version, before in buffers:
                if buffer._version != version:
                    buffer.copy_(before)
    finally:
        for module, mode in modes.items():
            module.training = mode


@contextmanager
def _without_zeros(model: nn.Module) -> Iterator[None]:
    """Within this context, fill parameters that are all zero, which would hide a branch's faults.

    Ranks that have the same shard fill it with the same values.
    """
    filled = [
        shard
        for shard in (local_shard(parameter.detach()) for parameter in model.parameters())
        if shard.is_floating_point() and shard.numel() and not shard.count_nonzero()
    ]
    try:
        with torch.no_grad():
            for shard in filled:
                index = torch.arange(shard.numel(), device=shard.device)
                shard.copy_((0.02 * (index % 7 - 2)).view_as(shard))
        yield
    finally:
        with torch.no_grad():
            for shard in filled:
                shard.zero_()
