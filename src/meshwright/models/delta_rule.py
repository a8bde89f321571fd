"""The gated delta rule by chunks of tokens, forward and backward: arXiv:2412.06464, section 3.

Each head has a state, a matrix `[key_dim, value_dim]`. A token with key k, value v, log-decay g <=
0 and strength b turns a state S into `exp(g) S + k (b (v - exp(g) S' k))'`, and its query reads the
new state. What the tokens of a chunk write is the solution of a triangular system; only states pass
from chunk to chunk. Value heads that share a key head share its matmuls. The backward has the
arguments and the state before each chunk, and recomputes the rest chunk by chunk, so that temporary
memory does not grow with the sequence.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from meshwright.models.ops import widened
from meshwright.spec.recurrences import DELTA_CHUNK

# Added to the squares of queries and keys before they are divided by their length.
_EPS: Final = 1e-6


@torch.library.custom_op(
    "meshwright::delta_rule",
    mutates_args=(),
    schema="(Tensor query, Tensor key, Tensor value, Tensor decay, Tensor strength,"
    " Tensor? segments=None, Tensor? state=None) -> (Tensor, Tensor, Tensor)",
)
def delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor,
    strength: Tensor,
    segments: Tensor | None = None,
    state: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the output of each token's query, the state before each chunk, and the last state.

    query and key `[batch, seq, key_heads, key_dim]` are normalized to length 1, and query divided
    by `sqrt(key_dim)`; all computation is in fp32 at least. value `[batch, seq, heads, value_dim]`;
    the output has its shape and dtype. decay (its logarithm) and strength `[batch, seq, heads]`.
    Where `segments` int `[batch, seq]` change, the state restarts from zero. `state` `[batch,
    key_heads, key_dim, heads / key_heads, value_dim]` is the initial state; None: zero.
    """
    shape = _state_shape(key, value)
    wide = torch.promote_types(value.dtype, torch.float32)
    last = value.new_zeros(shape, dtype=wide) if state is None else state.to(wide, copy=True)
    states = value.new_empty((_chunks(key), *shape), dtype=wide)
    out = torch.empty_like(value, memory_format=torch.contiguous_format)
    for index, tokens in enumerate(_slices(key)):
        states[index] = last
        chunk = _Chunk.of(query, key, value, decay, strength, segments, tokens)
        written = chunk.written(last)[0]
        read = chunk.decays.enters * _through(chunk.query, last)
        read += _mixed(chunk.scores(), written)
        out[:, tokens] = read.transpose(1, 2).flatten(2, 3)
        last = last * chunk.decays.passes + _outer(chunk.key, chunk.decays.leaves * written)
    return out, states, last


@torch.library.custom_op(
    "meshwright::delta_rule_backward",
    mutates_args=(),
    schema="(Tensor? grad, Tensor? to_last, Tensor query, Tensor key, Tensor value, Tensor decay,"
    " Tensor strength, Tensor? segments, Tensor states)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def delta_rule_backward(
    grad: Tensor | None,
    to_last: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor,
    strength: Tensor,
    segments: Tensor | None,
    states: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of query, key, value, decay, strength and the initial state.

    `grad` and `to_last` are the gradients of the output and of the last state; None: zero. `states`
    are those before each chunk, from `delta_rule`.
    """
    given = query, key, value, decay, strength
    grads = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in given]
    to_state = torch.zeros_like(states[0]) if to_last is None else to_last.to(states.dtype)
    grad = torch.zeros_like(value) if grad is None else grad
    for index, tokens in reversed(list(enumerate(_slices(key)))):
        chunk = _Chunk.of(*given, segments, tokens)
        to_out = _by_key_head(grad[:, tokens], key.shape[2])
        *chunk_grads, to_state = chunk.backward(to_out, states[index], to_state)
        for total, chunk_grad in zip(grads, chunk_grads, strict=True):
            total[:, tokens] = chunk_grad
    return *grads, to_state  # type: ignore[return-value]


class _Decays(NamedTuple):
    """The factors by which writes and states have decayed, within one chunk.

    `within` `[batch, key_heads, shared, i, j]`: what token j wrote, when token i reads it. Per
    token, `[batch, key_heads, seq, shared, 1]`: `enters`, the chunk's initial state at the token;
    `leaves`, what the token wrote at the chunk's end. `passes`: the initial state at the chunk's
    end.
    """

    within: Tensor
    enters: Tensor
    leaves: Tensor
    passes: Tensor

    @classmethod
    def of(
        cls, decay: Tensor, key_heads: int, segments: Tensor | None, before: Tensor | None
    ) -> _Decays:
        """Return the factors for log-decays `[batch, seq, heads]` of a chunk.

        `before` is the segment of the token before the chunk, None without segments.
        """
        sums = torch.unflatten(widened(decay).cumsum(1), 2, (key_heads, -1)).permute(0, 2, 3, 1)
        seen = torch.ones(sums.shape[-1], sums.shape[-1], dtype=torch.bool, device=sums.device)
        seen = seen.tril_()
        if segments is not None:
            together = segments[:, :, None] == segments[:, None, :]
            seen = (seen & together)[:, None, None]
        # Masked before the exponential, which would overflow where a later token is ahead.
        within = (sums[..., None] - sums[..., None, :]).masked_fill_(~seen, -torch.inf).exp_()
        by_token = sums.transpose(2, 3)[..., None]
        end = by_token[:, :, -1:]
        enters, leaves, passes = by_token.exp(), (end - by_token).exp_(), end.exp()
        if segments is not None and before is not None:
            last = segments[:, -1:]
            leaves *= _mask(segments == last)
            enters *= _mask(segments == before[:, None])
            passes *= _mask(last == before[:, None])
        return cls(within, enters, leaves, passes)


class _Chunk(NamedTuple):
    """The inputs of the tokens of a chunk, grouped by key head, in fp32 at least.

    query and key `[batch, key_heads, seq, key_dim]` are normalized; `lengths` are the factors of
    both normalizations. value `[batch, key_heads, seq, shared, value_dim]`, strength `[batch,
    key_heads, seq, shared, 1]`.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    strength: Tensor
    decays: _Decays
    lengths: tuple[Tensor, Tensor]

    @classmethod
    def of(
        cls,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        decay: Tensor,
        strength: Tensor,
        segments: Tensor | None,
        tokens: slice,
    ) -> _Chunk:
        """Return the chunk of `tokens`, a slice of the sequence, from the arguments of
        `delta_rule`.
        """
        heads, before = key.shape[2], None
        if segments is not None:  # the first state is of the first token's segment
            before = segments[:, max(tokens.start - 1, 0)]
            segments = segments[:, tokens]
        decays = _Decays.of(decay[:, tokens], heads, segments, before)
        q, q_inverse = _unit(query[:, tokens])
        k, k_inverse = _unit(key[:, tokens])
        strengths = _by_key_head(strength[:, tokens, :, None], heads)
        q = q * query.shape[-1] ** -0.5
        value = _by_key_head(value[:, tokens], heads)
        return cls(q, k, value, strengths, decays, (q_inverse, k_inverse))

    def scores(self) -> Tensor:
        """Return the decayed query-key scores `[batch, key_heads, shared, i, j]`."""
        return (self.query @ self.key.mT)[:, :, None] * self.decays.within

    def system(self) -> Tensor:
        """Return the decayed key-key products `[batch, key_heads, shared, i, j]`, 0 unless
        j < i.
        """
        return ((self.key @ self.key.mT)[:, :, None] * self.decays.within).tril_(-1)

    def written(self, state: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return four tensors: what tokens write, the value minus the state's, `system`, the keys'
        reads.

        `state` is the state before the chunk. The first is `strength * (v - what k reads)`,
        including earlier writes of the chunk; the second is `value - enters * read`; the last are
        what keys read of `state`.
        """
        read = _through(self.key, state)
        missing = self.value - self.decays.enters * read
        system = self.system()
        weighed = system * self.strength.transpose(2, 3)
        written = _solved(weighed, self.strength * missing, upper=False)
        return written, missing, system, read

    def backward(self, grad: Tensor, state: Tensor, to_next: Tensor) -> tuple[Tensor, ...]:
        """Return the gradients of the five inputs, each `[batch, seq, ...]`, and of the initial
        state.

        `grad` is the gradient of the output, `state` the state before the chunk, `to_next` the
        gradient of the state after it.
        """
        q, k, strength, decays = self.query, self.key, self.strength, self.decays
        written, missing, system, read = self.written(state)
        scores = self.scores()
        by_row = strength.transpose(2, 3)
        from_next = _through(k, to_next)
        to_written = _mixed(scores.mT, grad).add_(decays.leaves * from_next)
        right = _solved((system * by_row).mT, to_written, upper=True)
        to_scores = _pairs(grad, written)
        to_system = _pairs(right, written).neg_().tril_(-1)
        # Through the decays: of what was decayed, row sums minus column sums.
        to_row = to_system * system
        moved = to_scores * scores + to_row * by_row
        entering = (grad * _through(q, state)).sum(-1, keepdim=True)
        entering = decays.enters * entering.sub_(strength * (right * read).sum(-1, keepdim=True))
        leaving = decays.leaves * (written * from_next).sum(-1, keepdim=True)
        to_sums = (moved.sum(-1) - moved.sum(-2)).transpose(2, 3)[..., None] + entering - leaving
        passing = decays.passes * (state * to_next).sum((2, 4), keepdim=True)
        to_sums[:, :, -1:] += leaving.sum(2, keepdim=True) + passing
        to_decay = to_sums.flip(2).cumsum(2).flip(2)
        to_strength = (right * missing).sum(-1, keepdim=True)
        to_strength += to_row.sum(-1).transpose(2, 3)[..., None]
        # Of the products of queries and keys, over the heads that share them.
        across = (to_scores * decays.within).sum(2)
        among = (to_system.mul_(decays.within).mul_(by_row)).sum(2)
        read_grad, missing_grad = decays.enters * grad, strength * decays.enters * right
        to_q = across @ k + _back(read_grad, state)
        to_k = across.mT @ q + (among + among.mT) @ k
        to_k += _back(decays.leaves * written, to_next) - _back(missing_grad, state)
        to_state = decays.passes * to_next + _outer(q, read_grad) - _outer(k, missing_grad)
        scale = q.shape[-1] ** -0.5
        to_q = _through_unit(to_q * scale, q / scale, self.lengths[0])
        to_k = _through_unit(to_k, k, self.lengths[1])
        by_head = (strength * right, to_decay, to_strength)
        to_v, to_decay, to_strength = (x.transpose(1, 2).flatten(2, 3) for x in by_head)
        return to_q, to_k, to_v, to_decay[..., 0], to_strength[..., 0], to_state


def _slices(x: Tensor) -> Iterator[slice]:
    """Yield the slice of tokens of each chunk of x `[batch, seq, ...]`; the last chunk may be
    shorter.
    """
    for start in range(0, x.shape[1], DELTA_CHUNK):
        yield slice(start, min(start + DELTA_CHUNK, x.shape[1]))


def _chunks(x: Tensor) -> int:
    return -(-x.shape[1] // DELTA_CHUNK)


def _state_shape(key: Tensor, value: Tensor) -> tuple[int, ...]:
    heads = key.shape[2]
    return key.shape[0], heads, key.shape[3], value.shape[2] // heads, value.shape[3]


def _unit(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return heads `[batch, heads, seq, dim]` normalized to length 1, and the factors applied."""
    x = widened(x.transpose(1, 2))
    inverse = x.square().sum(-1, keepdim=True).add_(_EPS).rsqrt_()
    return x * inverse, inverse


def _through_unit(grad: Tensor, unit: Tensor, inverse: Tensor) -> Tensor:
    """Return the gradient of heads `[batch, seq, heads, dim]` from that of `_unit`'s result."""
    along = (grad * unit).sum(-1, keepdim=True)
    return (grad - unit * along).mul_(inverse).transpose(1, 2)


def _by_key_head(x: Tensor, key_heads: int) -> Tensor:
    """Return x `[batch, seq, heads, dim]` as `[batch, key_heads, seq, shared, dim]`."""
    return torch.unflatten(widened(x), 2, (key_heads, -1)).transpose(1, 2)


def _mask(tokens: Tensor) -> Tensor:
    """Return a mask `[batch, seq]` as `[batch, 1, seq, 1, 1]`."""
    return tokens[:, None, :, None, None]


def _through(x: Tensor, state: Tensor) -> Tensor:
    """Return the matrix product of queries or keys `[..., seq, key_dim]` with a state."""
    return torch.unflatten(x @ state.flatten(-2), -1, state.shape[-2:])


def _outer(x: Tensor, values: Tensor) -> Tensor:
    """Return the sum over tokens of the outer products of keys `[..., seq, key_dim]` and values."""
    return torch.unflatten(x.mT @ values.flatten(-2), -1, values.shape[-2:])


def _back(values: Tensor, state: Tensor) -> Tensor:
    """Return the gradient of x for `_through(x, state)`, given that of its result, `values`."""
    return values.flatten(-2) @ state.flatten(-2).mT


def _mixed(matrix: Tensor, values: Tensor) -> Tensor:
    """Return a matrix `[..., shared, i, j]` times values `[..., seq, shared, value_dim]`."""
    return (matrix @ values.transpose(2, 3)).transpose(2, 3)


def _pairs(a: Tensor, b: Tensor) -> Tensor:
    """Return `a @ b'` over the value dim `[..., shared, i, j]`; both `[..., seq, shared,
    value_dim]`.
    """
    return a.transpose(2, 3) @ b.transpose(2, 3).mT


def _solved(system: Tensor, values: Tensor, *, upper: bool) -> Tensor:
    """Return the solution of triangular systems whose diagonals are taken to be ones."""
    solve = torch.linalg.solve_triangular
    solution: Tensor = solve(system, values.transpose(2, 3), upper=upper, unitriangular=True)
    return solution.transpose(2, 3)


@delta_rule.register_fake
def _(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor,
    strength: Tensor,
    segments: Tensor | None = None,
    state: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    shape = _state_shape(key, value)
    wide = torch.promote_types(value.dtype, torch.float32)
    states = value.new_empty((_chunks(key), *shape), dtype=wide)
    out = torch.empty_like(value, memory_format=torch.contiguous_format)
    return out, states, value.new_empty(shape, dtype=wide)


@delta_rule_backward.register_fake
def _(
    grad: Tensor | None,
    to_last: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor,
    strength: Tensor,
    segments: Tensor | None,
    states: Tensor,
) -> tuple[Tensor, ...]:
    given = query, key, value, decay, strength
    grads = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in given]
    return *grads, torch.empty_like(states[0])


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, state = inputs
    ctx.save_for_backward(*tensors, output[1])
    ctx.continues = state is not None
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad: Tensor | None, _: Any, to_last: Tensor | None) -> Any:
    *grads, to_state = delta_rule_backward(grad, to_last, *ctx.saved_tensors)
    return *grads, None, to_state if ctx.continues else None


delta_rule.register_autograd(_backward, setup_context=_keep)
