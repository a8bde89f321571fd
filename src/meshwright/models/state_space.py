"""The state-space recurrence of Mamba-2 by chunks, forward and backward: arXiv:2405.21060.

Each head has a state, a matrix `[key_dim, value_dim]`. A token with key k (B), value v (x), decay
g <= 0 and step d makes of a state S `exp(g) S + k (d v)'`, reads it with its query (C), and adds
its own value times a skip of the head (D). Heads of a group share queries and keys. Only states
pass from chunk to chunk, by `models.chunks`. Kept for the backward are the arguments and each
chunk's first state.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import torch
from torch import Tensor

from meshwright.models.chunks import (
    Decays,
    Reads,
    StateRule,
    by_key_head,
    by_token,
    differentiate,
    empty_state,
    last_state,
    outer,
    scan,
    scan_back,
    through,
    to_first_state,
)
from meshwright.models.ops import widened


@torch.library.custom_op(
    "meshwright::state_space",
    mutates_args=(),
    schema="(Tensor query, Tensor key, Tensor value, Tensor decay, Tensor step, Tensor skip,"
    " Tensor? segments=None, Tensor? state=None) -> (Tensor, Tensor, Tensor)",
)
def state_space(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor,
    step: Tensor,
    skip: Tensor,
    segments: Tensor | None = None,
    state: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return what queries read with skips, the state before each chunk, and the last state.

    query and key `[batch, seq, groups, key_dim]`, value `[batch, seq, heads, value_dim]`, of which
    the result has shape and dtype; all is computed in fp32 at least. decay (of the logarithm) and
    step `[batch, seq, heads]`, skip `[heads]`. Where `segments` int `[batch, seq]` change, the
    state is zero again. `state` `[batch, groups, key_dim, heads / groups, value_dim]` is the first
    one; None: zero.
    """
    skips = widened(skip)[:, None]

    def of_chunk(tokens: slice, first: Tensor) -> tuple[Tensor, Tensor]:
        chunk = _Chunk.of(query, key, value, decay, step, segments, tokens)
        written = chunk.step * chunk.value
        read = chunk.reads.read(first, written).addcmul_(widened(value[:, tokens]), skips)
        return read, chunk.reads.next(first, written)

    return scan(key, value, state, of_chunk)


@torch.library.custom_op(
    "meshwright::state_space_backward",
    mutates_args=(),
    schema="(Tensor? grad, Tensor? to_last, Tensor query, Tensor key, Tensor value, Tensor decay,"
    " Tensor step, Tensor skip, Tensor? segments, Tensor states)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def state_space_backward(
    grad: Tensor | None,
    to_last: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor,
    step: Tensor,
    skip: Tensor,
    segments: Tensor | None,
    states: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of query, key, value, decay, step, skip and the first state.

    `grad` and `to_last` are those of the result and the last state; None: zero.
    """
    given = query, key, value, decay, step
    to_skip = torch.zeros_like(skip, dtype=states.dtype)
    skips = widened(skip).view(key.shape[2], 1, -1, 1)

    def of_chunk(
        tokens: slice, to_out: Tensor, first: Tensor, to_next: Tensor
    ) -> tuple[Tensor, ...]:
        chunk = _Chunk.of(*given, segments, tokens)
        to_skip.add_((to_out * chunk.value).sum((0, 2, 4)).flatten())
        return chunk.backward(to_out, skips, first, to_next)

    *grads, to_state = scan_back(given, grad, to_last, states, of_chunk)
    return *grads, to_skip.to(skip.dtype), to_state  # type: ignore[return-value]


@torch.library.custom_op(
    "meshwright::state_space_ends",
    mutates_args=(),
    schema="(Tensor query, Tensor key, Tensor value, Tensor decay, Tensor step, Tensor skip,"
    " Tensor? segments=None) -> (Tensor, Tensor)",
)
def state_space_ends(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor,
    step: Tensor,
    skip: Tensor,
    segments: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return what is left after the tokens of a state before them, and the last state.

    The first is a number of each head, `[batch, groups, 1, heads / groups, 1]`; the last state is
    that after a first one of zero.
    """
    batch, _, groups, key_dim = key.shape
    shared, value_dim = value.shape[2] // groups, value.shape[3]
    wide = torch.promote_types(value.dtype, torch.float32)
    transition = torch.ones(batch, groups, 1, shared, 1, dtype=wide, device=key.device)
    first = torch.zeros(batch, groups, key_dim, shared, value_dim, dtype=wide, device=key.device)

    def of_chunk(tokens: slice, state: Tensor) -> Tensor:
        chunk = _Chunk.of(query, key, value, decay, step, segments, tokens)
        transition.mul_(chunk.reads.decays.passes)
        return chunk.reads.next(state, chunk.step * chunk.value)

    return transition, last_state(key, first, of_chunk)


@state_space_ends.register_fake
def _empty_ends(
    query: Tensor, key: Tensor, value: Tensor, *_: Tensor | None
) -> tuple[Tensor, Tensor]:
    state = empty_state(key, value)
    batch, groups, _dim, shared, _values = state.shape
    return state.new_empty(batch, groups, 1, shared, 1), state


@torch.library.custom_op(
    "meshwright::state_space_starts",
    mutates_args=(),
    schema="(Tensor grad, Tensor query, Tensor key, Tensor value, Tensor decay, Tensor step,"
    " Tensor skip, Tensor? segments=None) -> Tensor",
)
def state_space_starts(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor,
    step: Tensor,
    skip: Tensor,
    segments: Tensor | None = None,
) -> Tensor:
    """Return the gradient of the first state for that of the result, `grad`, alone."""

    def of_chunk(tokens: slice, to_out: Tensor, to_next: Tensor) -> Tensor:
        q, _, decays = _Chunk.of(query, key, value, decay, step, segments, tokens).reads
        return decays.passes * to_next + outer(q, decays.enters * to_out)

    return to_first_state(grad, key, of_chunk)


@state_space_starts.register_fake
def _empty_start(grad: Tensor, query: Tensor, key: Tensor, *_: Tensor | None) -> Tensor:
    return empty_state(key, grad)


def _passed(transition: Tensor, state: Tensor, backwards: bool) -> Tensor:
    return transition * state


class _Chunk(NamedTuple):
    """The tokens of a chunk, in fp32 at least.

    value `[batch, groups, seq, shared, value_dim]`, step alike with 1.
    """

    reads: Reads
    value: Tensor
    step: Tensor

    @classmethod
    def of(
        cls,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        decay: Tensor,
        step: Tensor,
        segments: Tensor | None,
        tokens: slice,
    ) -> _Chunk:
        """Return the chunk of some tokens of a call."""
        groups = key.shape[2]
        decays = Decays.of(decay, groups, segments, tokens)
        q, k = (widened(x[:, tokens].transpose(1, 2)) for x in (query, key))
        steps = by_key_head(step[:, tokens, :, None], groups)
        return cls(Reads(q, k, decays), by_key_head(value[:, tokens], groups), steps)

    def backward(
        self, grad: Tensor, skip: Tensor, state: Tensor, to_next: Tensor
    ) -> tuple[Tensor, ...]:
        """Return the gradients of a call's arguments, as `[batch, seq, ...]`, and of the state.

        `grad` is that of the result, `to_next` that of the state after the chunk.
        """
        written, scores = self.step * self.value, self.reads.scores()
        from_next = through(self.reads.key, to_next)
        to_written = self.reads.to_written(scores, grad, from_next)
        grads = self.reads.backward(grad, state, to_next, written, scores, from_next)
        to_step = (to_written * self.value).sum(-1, keepdim=True)
        to_value = to_written.mul_(self.step).addcmul_(grad, skip)
        to_v, to_decays, to_steps = map(by_token, (to_value, grads.decayed.to_decay(), to_step))
        to_q, to_k = grads.query.transpose(1, 2), grads.key.transpose(1, 2)
        return to_q, to_k, to_v, to_decays[..., 0], to_steps[..., 0], grads.state


differentiate(state_space, state_space_backward)
STATE_SPACE: Final = StateRule(
    state_space, state_space_backward, state_space_ends, state_space_starts, _passed
)
