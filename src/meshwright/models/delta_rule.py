"""The gated delta rule by chunks of tokens, forward and backward: arXiv:2412.06464, section 3.

Each head has a state, a matrix `[key_dim, value_dim]`. A token with key k, value v, decay g <= 0
and strength b makes of a state S `exp(g) S + k (b (v - exp(g) S' k))'`, and reads it with its
query. What the tokens of a chunk write is the solution of a triangular system; only states pass
from chunk to chunk, by `models.chunks`. Kept for the backward are the arguments and each chunk's
first state; the rest is computed again, chunk by chunk, so that temporary memory does not grow with
the sequence.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from meshwright.models.chunks import (
    Decays,
    Reads,
    StateRule,
    back,
    by_key_head,
    by_token,
    differentiate,
    empty_state,
    last_state,
    outer,
    pairs,
    scan,
    scan_back,
    through,
    to_first_state,
)
from meshwright.models.ops import widened

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

    def of_chunk(tokens: slice, first: Tensor) -> tuple[Tensor, Tensor]:
        chunk = _Chunk.of(query, key, value, decay, strength, segments, tokens)
        written = chunk.written(first)[0]
        return chunk.reads.read(first, written), chunk.reads.next(first, written)

    return scan(key, value, state, of_chunk)


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

    def of_chunk(
        tokens: slice, to_out: Tensor, first: Tensor, to_next: Tensor
    ) -> tuple[Tensor, ...]:
        return _Chunk.of(*given, segments, tokens).backward(to_out, first, to_next)

    return scan_back(given, grad, to_last, states, of_chunk)  # type: ignore[return-value]


@torch.library.custom_op(
    "meshwright::delta_rule_ends",
    mutates_args=(),
    schema="(Tensor query, Tensor key, Tensor value, Tensor decay, Tensor strength,"
    " Tensor? segments=None) -> (Tensor, Tensor)",
)
def delta_rule_ends(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor,
    strength: Tensor,
    segments: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the transition of the tokens, and the last state after a first one of zero.

    The transition `[batch, key_heads, key_dim, heads / key_heads, key_dim]` is a matrix for each
    head: what the tokens make of a state that is the unit matrix if all values are zero. Both are
    computed as one state, whose values have the dims of both.
    """
    batch, _, heads, key_dim = key.shape
    shared, value_dim = value.shape[2] // heads, value.shape[3]
    wide = torch.promote_types(value.dtype, torch.float32)
    unit = torch.eye(key_dim, key_dim + value_dim, dtype=wide, device=key.device)
    first = unit[:, None].expand(batch, heads, key_dim, shared, key_dim + value_dim)
    values = F.pad(value, (key_dim, 0))

    def of_chunk(tokens: slice, state: Tensor) -> Tensor:
        chunk = _Chunk.of(query, key, values, decay, strength, segments, tokens)
        return chunk.reads.next(state, chunk.written(state)[0])

    last = last_state(key, first, of_chunk)
    return last[..., :key_dim].contiguous(), last[..., key_dim:].contiguous()


@delta_rule_ends.register_fake
def _empty_ends(
    query: Tensor, key: Tensor, value: Tensor, *_: Tensor | None
) -> tuple[Tensor, Tensor]:
    state = empty_state(key, value)
    return state.new_empty(*state.shape[:4], key.shape[3]), state


@torch.library.custom_op(
    "meshwright::delta_rule_starts",
    mutates_args=(),
    schema="(Tensor grad, Tensor query, Tensor key, Tensor value, Tensor decay, Tensor strength,"
    " Tensor? segments=None) -> Tensor",
)
def delta_rule_starts(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor,
    strength: Tensor,
    segments: Tensor | None = None,
) -> Tensor:
    """Return the gradient of the initial state for that of the output, `grad`, alone."""
    given = query, key, value, decay, strength

    def of_chunk(tokens: slice, to_out: Tensor, to_next: Tensor) -> Tensor:
        return _Chunk.of(*given, segments, tokens).to_first(to_out, to_next)

    return to_first_state(grad, key, of_chunk)


@delta_rule_starts.register_fake
def _empty_start(grad: Tensor, query: Tensor, key: Tensor, *_: Tensor | None) -> Tensor:
    return empty_state(key, grad)


@torch.library.custom_op("meshwright::delta_rule_passed", mutates_args=())
def delta_rule_passed(transition: Tensor, state: Tensor, backwards: bool) -> Tensor:
    """Return a state times a piece's transition, or with `backwards` a gradient times its
    transpose.
    """
    matrix = transition.transpose(2, 3)
    by_head = (matrix.mT if backwards else matrix) @ state.transpose(2, 3)
    return by_head.transpose(2, 3).contiguous()


@delta_rule_passed.register_fake
def _empty_passed(transition: Tensor, state: Tensor, backwards: bool) -> Tensor:
    return torch.empty_like(state)


class _Chunk(NamedTuple):
    """The inputs of the tokens of a chunk, grouped by key head, in fp32 at least.

    query and key `[batch, key_heads, seq, key_dim]` in `reads` are normalized, and `lengths` are
    their divisors' inverses; value `[batch, key_heads, seq, shared, value_dim]`, strength alike
    with 1.
    """

    reads: Reads
    value: Tensor
    strength: Tensor
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
        """Return the chunk of some tokens of a call."""
        heads = key.shape[2]
        decays = Decays.of(decay, heads, segments, tokens)
        q, q_inverse = _unit(query[:, tokens])
        k, k_inverse = _unit(key[:, tokens])
        strengths = by_key_head(strength[:, tokens, :, None], heads)
        reads = Reads(q * query.shape[-1] ** -0.5, k, decays)
        value = by_key_head(value[:, tokens], heads)
        return cls(reads, value, strengths, (q_inverse, k_inverse))

    def system(self) -> Tensor:
        """Return the products of keys `[batch, key_heads, shared, i, j]`, decayed, for j < i."""
        key = self.reads.key
        return ((key @ key.mT)[:, :, None] * self.reads.decays.within).tril_(-1)

    def written(self, state: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return four tensors: what tokens write, the value minus the state's, `system`, the keys'
        reads.

        `state` is the state before the chunk. The first is `strength * (v - what k reads)`,
        including earlier writes of the chunk; the second is `value - enters * read`; the last are
        what keys read of `state`.
        """
        read = through(self.reads.key, state)
        missing = self.value - self.reads.decays.enters * read
        system = self.system()
        weighed = system * self.strength.transpose(2, 3)
        written = _solved(weighed, self.strength * missing, upper=False)
        return written, missing, system, read

    def to_first(self, grad: Tensor, to_next: Tensor) -> Tensor:
        """Return the gradient of the state before the chunk; arguments as for `backward`."""
        (q, k, decays), strength = self.reads, self.strength
        from_next = through(k, to_next)
        to_written = self.reads.to_written(self.reads.scores(), grad, from_next)
        system = self.system() * strength.transpose(2, 3)
        right = _solved(system.mT, to_written, upper=True)
        to_first = decays.passes * to_next + outer(q, decays.enters * grad)
        return to_first.sub_(outer(k, strength * decays.enters * right))

    def backward(self, grad: Tensor, state: Tensor, to_next: Tensor) -> tuple[Tensor, ...]:
        """Return the gradients of the five inputs, each `[batch, seq, ...]`, and of the initial
        state.

        `grad` is the gradient of the output, `state` the state before the chunk, `to_next` the
        gradient of the state after it.
        """
        (q, k, decays), strength = self.reads, self.strength
        written, missing, system, read = self.written(state)
        by_row, from_next = strength.transpose(2, 3), through(k, to_next)
        scores = self.reads.scores()
        to_written = self.reads.to_written(scores, grad, from_next)
        right = _solved((system * by_row).mT, to_written, upper=True)
        grads = self.reads.backward(grad, state, to_next, written, scores, from_next)
        # Through the system: each right side has what it is solved for, times minus the solution.
        to_system = pairs(right, written).neg_().tril_(-1)
        to_row = to_system * system
        seen = decays.enters * strength * (right * read).sum(-1, keepdim=True)
        grads.decayed.pairs.add_(to_row * by_row)
        grads.decayed.entering.sub_(seen)
        to_strength = (right * missing).sum(-1, keepdim=True)
        to_strength += to_row.sum(-1).transpose(2, 3)[..., None]
        among = (to_system.mul_(decays.within).mul_(by_row)).sum(2)
        missing_grad = strength * decays.enters * right
        to_k = grads.key + (among + among.mT) @ k - back(missing_grad, state)
        to_state = grads.state - outer(k, missing_grad)
        scale = q.shape[-1] ** -0.5
        to_q = _through_unit(grads.query * scale, q / scale, self.lengths[0])
        to_k = _through_unit(to_k, k, self.lengths[1])
        to_v, to_decays, to_strength = map(
            by_token, (strength * right, grads.decayed.to_decay(), to_strength)
        )
        return to_q, to_k, to_v, to_decays[..., 0], to_strength[..., 0], to_state


def _unit(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return heads `[batch, heads, seq, dim]` normalized to length 1, and the factors applied."""
    x = widened(x.transpose(1, 2))
    inverse = x.square().sum(-1, keepdim=True).add_(_EPS).rsqrt_()
    return x * inverse, inverse


def _through_unit(grad: Tensor, unit: Tensor, inverse: Tensor) -> Tensor:
    """Return the gradient of heads `[batch, seq, heads, dim]` from that of `_unit`'s result."""
    along = (grad * unit).sum(-1, keepdim=True)
    return (grad - unit * along).mul_(inverse).transpose(1, 2)


def _solved(system: Tensor, values: Tensor, *, upper: bool) -> Tensor:
    """Return the solution of triangular systems whose diagonals are taken to be ones."""
    solve = torch.linalg.solve_triangular
    solution: Tensor = solve(system, values.transpose(2, 3), upper=upper, unitriangular=True)
    return solution.transpose(2, 3)


differentiate(delta_rule, delta_rule_backward)
DELTA_RULE: Final = StateRule(
    delta_rule, delta_rule_backward, delta_rule_ends, delta_rule_starts, delta_rule_passed
)
