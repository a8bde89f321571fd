"""The decoder model, whole or as one pipeline stage."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Self, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from meshwright.models.blocks import Block
from meshwright.models.cache import KVCache
from meshwright.models.context import Context, MaskOf, Unpadded, causal_mask
from meshwright.models.dropout import Dropout, layer_keys
from meshwright.models.lora import freeze
from meshwright.models.norms import norm
from meshwright.models.ops import softcapped
from meshwright.models.rope import Rope, lengths_of
from meshwright.spec.model import ModelSpec
from meshwright.spec.parts import kept_in_fp32

# hidden [..., dim], weight [vocab, dim] -> what a model returns in place of logits
Project = Callable[[Tensor, Tensor], Tensor]


class Transformer(nn.Module):
    """A decoder with the parameters of `spec.parts`, in that order.

    The keys of `layers` are global layer numbers, so parameters of a stage have the names of the
    whole model. Parallelisms may replace `mask_of`, which makes the blocks' mask.
    """

    embed: nn.Embedding | None
    norm: nn.Module | None
    head: nn.Linear | None

    def __init__(self, spec: ModelSpec, max_seq_len: int = 0) -> None:
        super().__init__()
        self.spec = spec
        self.rope = Rope(spec, max_seq_len)
        # Given its weight, it draws none: a normal draw on meta imports torch's compiler (0.9 s).
        weight = torch.empty(spec.vocab_rows, spec.dim)
        self.embed = nn.Embedding(spec.vocab_rows, spec.dim, _weight=weight)
        self.embed_drop = Dropout(spec.dropout, site=0)
        names = [str(layer) for layer in range(spec.n_layers)]
        self.layers = nn.ModuleDict({name: Block(spec, self.rope, name) for name in names})
        self.norm = norm(spec)
        self.head = None
        if not spec.tie_embeddings:
            self.head = nn.Linear(spec.dim, spec.vocab_rows, bias=False)
        self.mask_of: MaskOf = causal_mask
        if spec.lora is not None:
            freeze(self)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Move or convert the tensors, except that buffers which need fp32 are not converted below
        it.

        PyTorch calls it for `to`, `bfloat16`, `half`, `cuda` and the like.
        """
        names = kept_in_fp32(self.spec)
        fp32_buffers = {name: buffer for name, buffer in self.named_buffers() if name in names}
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, before in fp32_buffers.items():
            after = self.get_buffer(name)
            if torch.finfo(after.dtype).bits < 32:
                owner, _, last = name.rpartition(".")
                self.get_submodule(owner).register_buffer(last, before.to(after.device))
        return self

    @property
    def blocks(self) -> list[Block]:
        """The blocks in order; in a pipeline stage, those of the stage."""
        return cast(list[Block], list(self.layers.values()))

    def keep(self, layers: Iterable[int], *, first: bool, last: bool) -> Self:
        """Remove the modules that a pipeline stage does not need; return the model itself.

        `layers` are the stage's layer numbers. The last stage of a model with tied embeddings keeps
        the embedding, as its head.
        """
        stage_layers = {str(layer) for layer in layers}
        for name in [name for name in self.layers if name not in stage_layers]:
            del self.layers[name]
        if not last:
            self.norm = self.head = None
        if not first and not (last and self.spec.tie_embeddings):
            self.embed = None
        return self

    def init_tables(self, device: torch.device | str, length: int | None = None) -> None:
        """Compute the rotary tables now, for sequences of `length`; otherwise the first forward
        does.

        None: the length with which the model was built. Longer sequences extend the tables. If
        forwards get a part of each sequence, the whole sequence's length must be given here or to
        `build_model`.
        """
        length = self.rope.row if length is None else length
        if length > 0:
            self.rope.build(torch.device(device), length)

    def forward(
        self,
        input_ids: Tensor,
        segments: Tensor | None = None,
        cache: KVCache | None = None,
        positions: Tensor | None = None,
        keys: Tensor | None = None,
        places: Tensor | None = None,
        unpadded: Unpadded | None = None,
        lengths: Tensor | None = None,
        documents: Tensor | None = None,
        project: Project | None = None,
    ) -> Tensor:
        """Return logits `[batch, seq, vocab]` for int64 token ids `[batch, seq]`.

        A stage without the embedding takes hidden states `[batch, seq, dim]`, one without the final
        norm returns them. `segments` int `[batch, seq]`: tokens attend within equal ones only.
        `cache` has the earlier positions. `positions` int64 `[seq]`: the rotary positions where
        they are not 0, 1, 2, ...; they do not affect the mask, and `init_tables` must have covered
        them. `keys` and `places`, for dropout, and `unpadded` as in `Context`. `lengths` int64
        `[batch, seq of attention]`: for longrope, the token count of each token's document; None:
        derived from `segments`, or the whole sequence's. `documents` int `[batch, seq of
        attention]`: segments for recurrences, where a parallelism has replaced `segments` by
        another form. `project`, given the last hidden states and the matrix of the head, tied or
        not, computes what is returned in place of logits.
        """
        x = self.hidden(
            *(input_ids, segments, cache, positions, keys, places, unpadded, lengths, documents)
        )
        if self.norm is None:
            return x
        return self.logits(x) if project is None else project(x, self.head_weight)

    def hidden(
        self,
        input_ids: Tensor,
        segments: Tensor | None = None,
        cache: KVCache | None = None,
        positions: Tensor | None = None,
        keys: Tensor | None = None,
        places: Tensor | None = None,
        unpadded: Unpadded | None = None,
        lengths: Tensor | None = None,
        documents: Tensor | None = None,
    ) -> Tensor:
        """Return the input of the head `[batch, seq, dim]`; arguments as for `forward`."""
        mask = self.mask_of(input_ids, segments, cache)
        if lengths is None and segments is not None and self.mask_of is causal_mask:
            lengths = lengths_of(segments)
        is_long = self.rope.is_long(lengths)
        if documents is None and self.mask_of is causal_mask:
            documents = segments
        context = Context(mask, positions, cache, keys, places, unpadded, is_long, documents)
        x = input_ids
        if not x.is_floating_point():
            x = _scaled(self._embedded(input_ids), self.spec.embedding_scale)
            x = self.embed_drop(x, context)
            if self.spec.lora is not None and torch.is_grad_enabled():
                # The embedding is frozen; the first layer's backward is as every other's.
                x = x.requires_grad_()
        cached = 0 if cache is None else cache.length
        self.rope.reach(cached + x.shape[1], x.device, cached, mixed_lengths=is_long is not None)
        for name, block in self.layers.items():
            if keys is not None and self.spec.drops:
                # Here rather than in the block: a number of its own would recompile each block.
                context = context._replace(keys=layer_keys(keys, int(name)))
            x = block(x, context)
        if cache is not None:
            cache.length += x.shape[1]
        # Of what the head multiplies, so that all logits are divided, also those made in parts.
        return x if self.norm is None else _scaled(self.norm(x), 1 / self.spec.logits_divisor)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits `[..., vocab]` of hidden states `[..., dim]` after the final norm."""
        logits = F.linear(hidden, self.head_weight)[..., : self.spec.vocab_size]
        return softcapped(logits, self.spec.logits_softcap)

    @property
    def head_weight(self) -> Tensor:
        """The matrix `[padded vocab, dim]` of the head; the embedding's if tied."""
        if self.head is not None:
            return self.head.weight
        if self.norm is None or self.embed is None:
            raise TypeError("this pipeline stage has no head")
        return self.embed.weight

    def _embedded(self, input_ids: Tensor) -> Tensor:
        if self.embed is None:
            raise TypeError("this pipeline stage has no embedding: it takes hidden states")
        out: Tensor = self.embed(input_ids)
        return out


def _scaled(x: Tensor, factor: float) -> Tensor:
    return x if factor == 1.0 else x * factor


def build_model(
    spec: ModelSpec, device: torch.device | str = "meta", max_seq_len: int = 0
) -> Transformer:
    """Return the model of `spec`; on a device other than meta its weights are uninitialised.

    `max_seq_len` is the length of its sequences, 0 if unknown: rotary tables are first built for
    it, and extended when needed; `Rope` says how longrope depends on it.
    """
    with torch.device("meta"):
        model = Transformer(spec, max_seq_len)
    return model if torch.device(device).type == "meta" else model.to_empty(device=device)
