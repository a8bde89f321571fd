"""Chunks of tokens of a recurrence whose state each token decays, writes to and reads.

Each head has a state, a matrix `[key_dim, value_dim]`. A token with decay g <= 0 makes of a state S
`exp(g) S + k w'`, where k is its key and w what it writes, and reads it with its query. Heads of
values that share a head of keys share its products. `models.delta_rule` and `models.state_space`
differ in what a token writes: the rest, forward and backward, is here. Their operators return what
tokens read, the state before each chunk, and the last state; the backward gets the arguments and
the states, and computes everything else again, chunk by chunk. A piece of a row makes of a state S
before it `transition S + ended`: `ends` returns both, so that pieces may be computed beside each
other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from meshwright.models.ops import widened
from meshwright.spec.recurrences import CHUNK


class Decays(NamedTuple):
    """How much is left: `within` `[batch, key_heads, shared, i, j]` at i of what j wrote, and by
    token `[batch, key_heads, seq, shared, 1]` of the first state at a token (`enters`) and of a
    token at the end (`leaves`); `passes` is that of the first state at the end.
    """

    within: Tensor
    enters: Tensor
    leaves: Tensor
    passes: Tensor

    @classmethod
    def of(cls, decay: Tensor, key_heads: int, segments: Tensor | None, tokens: slice) -> Decays:
        """Return those of some tokens of decays `[batch, seq, heads]`, segments `[batch, seq]`."""
        steps = torch.unflatten(widened(decay[:, tokens]), 2, (key_heads, -1)).permute(0, 2, 3, 1)
        size = steps.shape[-1]
        seen = torch.ones(size, size, dtype=torch.bool, device=steps.device).tril_()
        before = None
        if segments is not None:  # the first state is of the segment of the token before
            before = segments[:, max(tokens.start - 1, 0)]
            segments = segments[:, tokens]
            together = segments[:, :, None] == segments[:, None, :]
            seen = (seen & together)[:, None, None]
        # Sums from j to i by themselves: as differences of two sums from the start, those of few
        # tokens would lose the digits that the decays of many tokens before them take up.
        within = steps[..., None].expand(*steps.shape, size).tril(-1).cumsum_(-2)
        within = within.masked_fill_(~seen, -torch.inf).exp_()
        leaves = within[..., -1, :].transpose(2, 3)[..., None]
        enters = steps.cumsum(-1).exp_().transpose(2, 3)[..., None]
        passes = enters[:, :, -1:].clone()
        if segments is not None and before is not None:
            enters *= _mask(segments == before[:, None])
            passes *= _mask(segments[:, -1:] == before[:, None])
        return cls(within, enters, leaves, passes)


class StateRule(NamedTuple):
    """A recurrence: its operators, and how its states pass a piece of a row.

    `forward` and `backward` are as for `differentiate`. `ends` takes the inputs of `forward` and
    segments, and returns the transition and the last state of a piece whose first state is zero.
    `starts` takes the gradient for the output, then the same, and returns the gradient for the
    first state, where that for the last one is zero. `passed` takes a transition, and a state
    before the piece or, if its last argument is true, a gradient for the state after it; it returns
    the part of the state after it, or of the gradient for the state before it.
    """

    forward: Any
    backward: Any
    ends: Any
    starts: Any
    passed: Callable[[Tensor, Tensor, bool], Tensor]


def recur(
    rule: StateRule, inputs: Sequence[Tensor], segments: Tensor | None, state: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return what the tokens of a recurrence read, and the last state."""
    read, _, last = rule.forward(*inputs, segments, state)
    return read, last


class Decayed(NamedTuple):
    """Gradients times what was decayed, by where: `pairs` of tokens `[batch, key_heads, shared, i,
    j]`, and the others as in `Decays`.

    A decay applies to all that passes its token. What passes it is added up without differences of
    sums, in which the small gradients of strong decays would be lost.
    """

    pairs: Tensor
    entering: Tensor
    leaving: Tensor
    passing: Tensor

    def to_decay(self) -> Tensor:
        """Return the gradient of decays `[batch, key_heads, seq, shared, 1]`."""
        after = self.pairs.flip(-2).cumsum(-2).flip(-2)
        passing_by = after.tril_(-1).sum(-1).transpose(2, 3)[..., None]
        passing_by += self.entering.flip(2).cumsum(2).flip(2) + self.passing
        passing_by[:, :, 1:] += self.leaving[:, :, :-1].cumsum(2)
        return passing_by


class Gradients(NamedTuple):
    """The gradients of a chunk: of query and key `[batch, key_heads, seq, key_dim]`, and of the
    first state.
    """

    query: Tensor
    key: Tensor
    state: Tensor
    decayed: Decayed


class Reads(NamedTuple):
    """The queries and keys of a chunk's tokens `[batch, key_heads, seq, key_dim]`, and its decays.

    What tokens write and read is `[batch, key_heads, seq, shared, value_dim]`.
    """

    query: Tensor
    key: Tensor
    decays: Decays

    def scores(self) -> Tensor:
        """Return the decayed products of queries and keys `[batch, key_heads, shared, i, j]`."""
        return (self.query @ self.key.mT)[:, :, None] * self.decays.within

    def read(self, state: Tensor, written: Tensor) -> Tensor:
        """Return what tokens read, `[batch, seq, heads, value_dim]`."""
        read = self.decays.enters * through(self.query, state)
        read += mixed(self.scores(), written)
        return by_token(read)

    def next(self, state: Tensor, written: Tensor) -> Tensor:
        """Return the state after the chunk."""
        return state * self.decays.passes + outer(self.key, self.decays.leaves * written)

    def to_written(self, scores: Tensor, grad: Tensor, from_next: Tensor) -> Tensor:
        """Return the gradient of what tokens write; `from_next` is `through(key, to_next)`."""
        return mixed(scores.mT, grad).add_(self.decays.leaves * from_next)

    def backward(
        self,
        grad: Tensor,
        state: Tensor,
        to_next: Tensor,
        written: Tensor,
        scores: Tensor,
        from_next: Tensor,
    ) -> Gradients:
        """Return the gradients for what is written; `grad` is that of what tokens read."""
        q, k, decays = self.query, self.key, self.decays
        to_scores = pairs(grad, written)
        entering = decays.enters * (grad * through(q, state)).sum(-1, keepdim=True)
        leaving = decays.leaves * (written * from_next).sum(-1, keepdim=True)
        passing = decays.passes * (state * to_next).sum((2, 4), keepdim=True)
        decayed = Decayed(to_scores * scores, entering, leaving, passing)
        # Of the products of queries and keys, over the heads that share them.
        across = to_scores.mul_(decays.within).sum(2)
        read_grad = decays.enters * grad
        to_q = across @ k + back(read_grad, state)
        to_k = across.mT @ q + back(decays.leaves * written, to_next)
        return Gradients(to_q, to_k, decays.passes * to_next + outer(q, read_grad), decayed)


def scan(
    key: Tensor,
    value: Tensor,
    state: Tensor | None,
    step: Callable[[slice, Tensor], tuple[Tensor, Tensor]],
) -> tuple[Tensor, Tensor, Tensor]:
    """Return what tokens read, the state before each chunk, and the last state.

    `state` is the first one; None: zero. `step` takes a chunk's tokens and first state, and returns
    what the tokens read and the next state.
    """
    out, states, last = _results(key, value)
    last = last.zero_() if state is None else last.copy_(state)
    for index, tokens in enumerate(_slices(key)):
        states[index] = last
        out[:, tokens], last = step(tokens, last)
    return out, states, last


def last_state(key: Tensor, state: Tensor, step: Callable[[slice, Tensor], Tensor]) -> Tensor:
    """Return the last state; `step` takes a chunk's tokens and first state, and returns the next
    one."""
    for tokens in _slices(key):
        state = step(tokens, state)
    return state


def to_first_state(
    grad: Tensor, key: Tensor, step: Callable[[slice, Tensor, Tensor], Tensor]
) -> Tensor:
    """Return the gradient for the first state; `grad` is that for what tokens read.

    `step` takes a chunk's tokens, the gradient for what they read by key head, and that for the
    next state, and returns that for the chunk's first state.
    """
    to_state = empty_state(key, grad).zero_()
    for tokens in reversed(list(_slices(key))):
        to_state = step(tokens, by_key_head(grad[:, tokens], key.shape[2]), to_state)
    return to_state


def scan_back(
    inputs: Sequence[Tensor],
    grad: Tensor | None,
    to_last: Tensor | None,
    states: Tensor,
    step: Callable[[slice, Tensor, Tensor, Tensor], tuple[Tensor, ...]],
) -> tuple[Tensor, ...]:
    """Return the gradients for query, key, value and further inputs, and for the first state.

    Inputs are `[batch, seq, ...]`; `grad` and `to_last` are the gradients for the results of
    `scan`, None: zero. `step` takes a chunk's tokens, the gradient for what they read by key head,
    the chunk's first state and the gradient for the next one, and returns those for its inputs and
    first state.
    """
    _, key, value, *_ = inputs
    grads = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in inputs]
    to_state = torch.zeros_like(states[0]) if to_last is None else to_last.to(states.dtype)
    grad = torch.zeros_like(value) if grad is None else grad
    for index, tokens in reversed(list(enumerate(_slices(key)))):
        to_out = by_key_head(grad[:, tokens], key.shape[2])
        *chunk_grads, to_state = step(tokens, to_out, states[index], to_state)
        for total, chunk_grad in zip(grads, chunk_grads, strict=True):
            total[:, tokens] = chunk_grad
    return *grads, to_state


def differentiate(forward: Any, backward: Any) -> None:
    """Give the custom operator of a recurrence its shapes while tracing, and its gradient.

    Both are of `torch.library.custom_op`. `forward` takes query, key, value, further inputs,
    segments and the first state, and returns as `scan`. `backward` takes the gradients for the
    output and the last state, the arguments of `forward` but for the state, and the states.
    """

    def results(query: Tensor, key: Tensor, value: Tensor, *_: Tensor | None) -> Any:
        return _results(key, value)

    def gradients(grad: Tensor | None, to_last: Tensor | None, *saved: Tensor) -> Any:
        *inputs, _, states = saved
        grads = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in inputs]
        return *grads, torch.empty_like(states[0])

    def keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        *tensors, state = inputs
        ctx.save_for_backward(*tensors, output[1])
        ctx.continues = state is not None
        ctx.mark_non_differentiable(output[1])
        ctx.set_materialize_grads(False)

    def through_all(ctx: Any, grad: Tensor | None, _: Any, to_last: Tensor | None) -> Any:
        *grads, to_state = backward(grad, to_last, *ctx.saved_tensors)
        return *grads, None, to_state if ctx.continues else None

    forward.register_fake(results)
    backward.register_fake(gradients)
    forward.register_autograd(through_all, setup_context=keep)


def empty_state(key: Tensor, value: Tensor) -> Tensor:
    """Return an uninitialized state for keys and values `[batch, seq, heads, dim]`."""
    return _results(key, value)[2]


def _results(key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return uninitialized results of `scan`; states are in fp32 at least."""
    batch, _, heads, key_dim = key.shape
    shape = batch, heads, key_dim, value.shape[2] // heads, value.shape[3]
    wide = torch.promote_types(value.dtype, torch.float32)
    count = -(-key.shape[1] // CHUNK)
    out = torch.empty_like(value, memory_format=torch.contiguous_format)
    states = value.new_empty((count, *shape), dtype=wide)
    return out, states, value.new_empty(shape, dtype=wide)


def _slices(x: Tensor) -> Iterator[slice]:
    """Yield the tokens of each chunk of x `[batch, seq, ...]`; the last may have fewer."""
    for start in range(0, x.shape[1], CHUNK):
        yield slice(start, min(start + CHUNK, x.shape[1]))


def by_token(x: Tensor) -> Tensor:
    """Return x `[batch, key_heads, seq, shared, dim]` as `[batch, seq, heads, dim]`."""
    return x.transpose(1, 2).flatten(2, 3)


def by_key_head(x: Tensor, key_heads: int) -> Tensor:
    """Return x `[batch, seq, heads, dim]` as `[batch, key_heads, seq, shared, dim]`."""
    return torch.unflatten(widened(x), 2, (key_heads, -1)).transpose(1, 2)


def _mask(tokens: Tensor) -> Tensor:
    """Return a mask `[batch, seq]` as `[batch, 1, seq, 1, 1]`."""
    return tokens[:, None, :, None, None]


def through(x: Tensor, state: Tensor) -> Tensor:
    """Return what queries or keys `[..., seq, key_dim]` read of a state."""
    return torch.unflatten(x @ state.flatten(-2), -1, state.shape[-2:])


def outer(x: Tensor, values: Tensor) -> Tensor:
    """Return the sum over a chunk's tokens of the outer products of keys and values, undecayed.

    `x` is [..., seq, key_dim], `values` [..., seq, *value_dims]; the sum is
    [..., key_dim, *value_dims], in their dtype.
    """
    return torch.unflatten(x.mT @ values.flatten(-2), -1, values.shape[-2:])


def back(values: Tensor, state: Tensor) -> Tensor:
    """Return the gradient of queries or keys from that of what they read of a state."""
    return values.flatten(-2) @ state.flatten(-2).mT


def mixed(matrix: Tensor, values: Tensor) -> Tensor:
    """Return a matrix `[..., shared, i, j]` times values `[..., seq, shared, value_dim]`."""
    return (matrix @ values.transpose(2, 3)).transpose(2, 3)


def pairs(a: Tensor, b: Tensor) -> Tensor:
    """Return the products `[..., shared, i, j]` of values with values."""
    return a.transpose(2, 3) @ b.transpose(2, 3).mT
