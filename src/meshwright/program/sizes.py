"""The sizes of a rank's part of a microbatch, after sharding by tp, sp and cp."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

from meshwright.program.lower import Program
from meshwright.program.target import Route, Target

# Bytes of an element in the precision of the products.
ELEMENT_BYTES: Final[Mapping[str, int]] = {"fp32": 4, "bf16": 2, "fp16": 2}
_WIDE: Final = 4  # bytes of fp32
_LEAST_SHARE: Final = 32


class Sizes(NamedTuple):
    """Local sizes of one microbatch: `tokens` in attention and matmuls, `stream` in the residual
    stream.

    `rows` are sequences, and `span` is the length of a sequence over all cp ranks. `heads`,
    `kv_heads`, `ffn`, `expert_ffn`, `shared_ffn` and `vocab` are this tp rank's shares. `head_dim`
    is that of attention's matmuls, which may be padded (`ModelSpec.core_dim`). This rank sends
    `routed` tokens to experts, in `pairs` of a token and an expert; its experts receive `received`
    pairs, which differ if experts are divided over ranks. `element` is in bytes.
    """

    rows: int
    tokens: int
    stream: int
    span: int
    dim: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    element: int
    pairs: int
    routed: int
    received: int
    expert_ffn: int
    shared_ffn: int

    @classmethod
    def of(cls, program: Program) -> Sizes:
        """Return the sizes of a program, the same on every rank."""
        model, layout = program.model, program.layout
        routed = layout.microbatch * (program.stream if layout.folds > 1 else program.sequence)
        pairs = routed * model.top_k
        return cls(
            rows=layout.microbatch,
            tokens=layout.microbatch * program.sequence,
            stream=layout.microbatch * program.stream,
            span=program.train.seq_len,
            dim=model.dim,
            heads=model.n_heads // layout.tp,
            kv_heads=model.n_kv_heads // layout.tp,
            head_dim=model.core_dim,
            ffn=model.ffn_dim // layout.tp,
            vocab=model.vocab_rows // layout.tp,
            element=ELEMENT_BYTES[program.train.precision],
            pairs=pairs,
            routed=routed,
            received=received(program, pairs),
            expert_ffn=model.expert_width // layout.expert_tp,
            shared_ffn=model.shared_ffn_dim // layout.tp,
        )

    @property
    def stream_bytes(self) -> int:
        """Bytes of the residual stream on this rank."""
        return self.stream * self.dim * self.element

    @property
    def whole_bytes(self) -> int:
        """Bytes of the input of column-parallel layers: the residual stream gathered over tp."""
        return self.tokens * self.dim * self.element

    @property
    def least_moved(self) -> int:
        """Bytes of the smallest tensor that activation offload moves: 1/32 of the residual stream.

        Smaller ones, such as the scales of norms, would cost a copy each and free next to nothing.
        Integers stay as well, because the host and the kernels of routers need them.
        """
        return -(-self.stream_bytes // _LEAST_SHARE)

    @property
    def routed_bytes(self) -> int:
        """Bytes of the tokens that this rank routes to experts."""
        return self.routed * self.dim * self.element

    def product(self, inner: int, outer: int) -> float:
        """Return the FLOPs of a matmul of all tokens with a matrix `[outer, inner]`."""
        return 2.0 * self.tokens * inner * outer

    @property
    def expert_product(self) -> float:
        """FLOPs of the matmul of the received pairs with one of an expert's matrices."""
        return 2.0 * self.received * self.dim * self.expert_ffn


def received(program: Program, pairs: int) -> int:
    """Return the (token, expert) pairs that the busiest rank receives if each rank sends `pairs`.

    A token selects an expert at most once, so a rank receives at most all tokens with each of its
    experts.
    """
    model, layout = program.model, program.layout
    if layout.ep == 1 or not model.top_k:
        return pairs
    limit = layout.ep * min(model.top_k, model.experts // layout.ep) / model.top_k
    return round(pairs * min(program.target.imbalance, limit))


def loss_rows(tokens: int, element: int, target: Target) -> int:
    """Return the number of tokens whose logits are computed together.

    It is enough for efficient matmuls. In half precision (`element` 2 bytes), it is at least a
    quarter of all, because each round rounds the gradient of the head's weight.
    """
    minimum, rounds = target.traits.least_loss_tokens, 16 if element == _WIDE else 4
    return -(-tokens // min(max(tokens // minimum, 1), rounds))


def fuses_loss(element: int, tp: int, target: Target) -> bool:
    """Whether the compiler fuses loss and gradient into one kernel, without logits in fp32."""
    return target.compiled and tp == 1 and element < _WIDE


def loss_element(element: int, *, capped: bool = False, fused: bool = False) -> int:
    """Return the bytes per logit: in fp32, and rounded to `element` bytes for matmuls.

    With a soft cap (`capped`), its slopes are stored too. `fused` is as in `fuses_loss`: only
    logits and their gradient exist, in `element` bytes each.
    """
    if fused:
        return 2 * element
    return _WIDE + (0 if element == _WIDE else element) + _WIDE * capped


def loss_workspace(sizes: Sizes, rows: int, products: Route, *, is_frozen: bool = False) -> int:
    """Return the workspace in bytes of the matmul for the head's weight gradient.

    `rows` are the tokens of a round; the first one creates the gradient, further ones add to it. 0
    if the head `is_frozen`.
    """
    if sizes.element != _WIDE or is_frozen:
        return 0
    shape = sizes.vocab, rows, sizes.dim
    adding = products.room(*shape, adds=True) if rows < sizes.tokens else 0
    return max(products.room(*shape), adding)
