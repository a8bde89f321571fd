"""Sampling from a model, token by token."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from meshwright.errors import CheckpointError, ConfigError, refusal
from meshwright.models.cache import KVCache
from meshwright.models.transformer import Transformer


def generate(
    model: Transformer,
    input_ids: Tensor,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_p: float = 1.0,
    seed: int = 0,
    eos_id: int | Sequence[int] | None = None,
) -> Tensor:
    """Return the prompts with their sampled continuations, int64 `[batch, prompt + new]`.

    Arguments and errors as for `generate_tokens`.
    """
    new = list(generate_tokens(model, input_ids, max_new_tokens, temperature, top_p, seed, eos_id))
    return torch.cat([input_ids, *(token[:, None] for token in new)], dim=1)


def generate_tokens(
    model: Transformer,
    input_ids: Tensor,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_p: float = 1.0,
    seed: int = 0,
    eos_id: int | Sequence[int] | None = None,
) -> Iterator[Tensor]:
    """Yield the next token of each sequence, int64 `[batch]`, as it is sampled.

    `input_ids` int64 `[batch, prompt]`, prompts of equal length. `temperature` 0 is greedy; `top_p`
    samples from the smallest set of likeliest tokens whose probability reaches it. After `eos_id`
    (or any of several), a sequence repeats it; sampling ends when all sequences have ended. Raises
    `ConfigError` at once where a setting is out of range or prompt and new tokens exceed the
    model's context.
    """
    _check(model, input_ids, max_new_tokens, temperature, top_p)
    return _tokens(model, input_ids, max_new_tokens, temperature, top_p, seed, eos_id)


def _tokens(
    model: Transformer,
    input_ids: Tensor,
    max_new_tokens: int,
    temperature: float,
    top_p: float,
    seed: int,
    eos_id: int | Sequence[int] | None,
) -> Iterator[Tensor]:
    generator = torch.Generator(device="cpu").manual_seed(seed)
    capacity = input_ids.shape[1] + max_new_tokens
    cache = KVCache(capacity)
    ended = torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)
    ends = None
    if eos_id is not None:
        ids = [eos_id] if isinstance(eos_id, int) else list(eos_id)
        ends = torch.tensor(ids, device=input_ids.device)
    row = new = input_ids
    for _ in range(max_new_tokens):
        if cache.length and model.rope.starts_anew(cache.length, row.shape[1]):
            cache, new = KVCache(capacity), row  # what it holds is rotated otherwise
        token = sample(_next_logits(model, new, cache), temperature, top_p, generator)
        token = token.to(input_ids.device)
        if ends is not None:
            token = torch.where(ended, row[:, -1], token)
            ended |= torch.isin(token, ends)
        yield token
        if ends is not None and bool(ended.all()):
            return
        new = token[:, None]
        row = torch.cat((row, new), dim=1)


@torch.no_grad()
def _next_logits(model: Transformer, new: Tensor, cache: KVCache) -> Tensor:
    """Return the logits `[batch, vocab]` after the newest token only."""
    return model.logits(model.hidden(new, cache=cache)[:, -1])


def sample(logits: Tensor, temperature: float, top_p: float, generator: torch.Generator) -> Tensor:
    """Return one token per row of logits `[batch, vocab]`, int64 `[batch]` on the CPU.

    Drawn on the CPU in fp32, so that a seed gives the same tokens on every device. Raises
    `CheckpointError` for logits that are not finite.
    """
    logits = logits.float().cpu()
    if not torch.isfinite(logits).all():
        raise CheckpointError("the model's logits are not finite: its weights are damaged")
    if temperature == 0:
        return logits.argmax(-1)
    probabilities = torch.softmax(logits / temperature, -1)
    if top_p < 1:
        probabilities = nucleus(probabilities, top_p)
    return torch.multinomial(probabilities, 1, generator=generator).squeeze(1)


def nucleus(probabilities: Tensor, top_p: float) -> Tensor:
    """Return probabilities `[batch, vocab]` with 0 outside the smallest likeliest set reaching
    `top_p`.

    The rest is not rescaled. arXiv:1904.09751, section 3.1.
    """
    ordered, order = probabilities.sort(dim=-1, descending=True)
    before = ordered.cumsum(-1) - ordered
    likely = torch.where(before < top_p, ordered, torch.zeros_like(ordered))
    return torch.zeros_like(probabilities).scatter(-1, order, likely)


def _check(
    model: Transformer, input_ids: Tensor, new: int, temperature: float, top_p: float
) -> None:
    if input_ids.ndim != 2 or input_ids.shape[1] == 0:
        raise ConfigError(
            f"a prompt must have the shape [batch, tokens] with at least one token, but it has "
            f"{list(input_ids.shape)}"
        )
    if new < 0:
        raise ConfigError(refusal(f"max_new_tokens = {new} must not be negative", legal=[0]))
    if not temperature >= 0 or temperature == float("inf"):
        raise ConfigError(
            refusal(f"temperature = {temperature} must be finite and not negative", legal=[0, 1])
        )
    if not 0 < top_p <= 1:
        raise ConfigError(refusal(f"top_p = {top_p} must be above 0 and at most 1", legal=[1]))
    largest, vocab = int(input_ids.max()), model.spec.vocab_size
    if largest >= vocab or int(input_ids.min()) < 0:
        raise ConfigError(
            f"the prompt has token {largest}, the model's vocabulary is 0..{vocab - 1}"
        )
    prompt, context = input_ids.shape[1], model.spec.context
    if prompt + new > context:
        raise ConfigError(
            refusal(
                f"a prompt of {prompt} tokens and max_new_tokens = {new} exceed the model's "
                f"context of {context}",
                legal=[f"max_new_tokens = {context - prompt}"] if prompt < context else [],
                hint="" if prompt < context else f"Crop the prompt to {context - new} tokens",
            )
        )
