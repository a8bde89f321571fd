"""Answers the requests of lm-evaluation-harness tasks, without importing that library.

The rules are those of its `HFLM`: how a request longer than the model's context is cut, what
precedes a text without a context, and where a continuation ends.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import torch

from meshwright.data import IGNORE, Tokenizer
from meshwright.errors import ConfigError, refusal
from meshwright.evaluate.perplexity import score
from meshwright.models import Transformer
from meshwright.models.generate import generate_tokens

NEW_TOKENS: Final = 256  # where a task does not say
_NEW_TOKENS_NAMES: Final = ("max_gen_toks", "max_new_tokens", "max_tokens")
_KNOWN: Final = {"until", "do_sample", "temperature", "top_p", *_NEW_TOKENS_NAMES}


class Ask(NamedTuple):
    """A request for the log-likelihood of the ids `wanted` after the ids `context`.

    The context has at least one id.
    """

    context: Sequence[int]
    wanted: Sequence[int]


class Ending(NamedTuple):
    """How to continue a text: with how many tokens, how to sample, and at which `stops` to end.

    Stop strings are not part of the continuation. A temperature of 0 takes the likeliest token.
    """

    stops: tuple[str, ...]
    new_tokens: int = NEW_TOKENS
    temperature: float = 0.0
    top_p: float = 1.0

    @staticmethod
    def of(asked: Mapping[str, Any]) -> Ending:
        """Return the settings in a task's `generation_kwargs`.

        Raises `ConfigError` for unknown ones.
        """
        if unknown := set(asked) - _KNOWN:
            raise ConfigError(
                refusal(
                    f"generation_kwargs of the task: {', '.join(sorted(unknown))} cannot be had",
                    legal=sorted(_KNOWN),
                )
            )
        until = asked.get("until") or ()
        new = [int(asked[name]) for name in _NEW_TOKENS_NAMES if asked.get(name) is not None]
        sampled = asked.get("do_sample", float(asked.get("temperature", 0.0)) > 0)
        return Ending(
            (until,) if isinstance(until, str) else tuple(until),
            new[0] if new else NEW_TOKENS,
            float(asked.get("temperature", 1.0)) if sampled else 0.0,
            float(asked.get("top_p", 1.0)) if sampled else 1.0,
        )


def answer(
    model: Transformer, asks: Sequence[Ask], max_length: int, batch_tokens: int
) -> list[tuple[float, bool]]:
    """Return (log-likelihood in nats, whether it is the greedy choice) for each request.

    A context is truncated on the left if it and the wanted ids exceed `max_length` inputs. Requests
    of about the same length share a batch of at most `batch_tokens` inputs. Raises `ConfigError` if
    no ids are wanted, or more than `max_length`.
    """
    rows = [_inputs(ask, max_length) for ask in asks]
    order = sorted(range(len(asks)), key=lambda index: -len(rows[index]))
    answers: list[tuple[float, bool]] = [(0.0, True)] * len(asks)
    for batch in _batches(order, [len(row) for row in rows], batch_tokens):
        longest = len(rows[batch[0]])
        inputs = torch.zeros(len(batch), longest, dtype=torch.int64)
        targets = torch.full_like(inputs, IGNORE)
        for position, index in enumerate(batch):
            row, wanted = rows[index], asks[index].wanted
            inputs[position, : len(row)] = torch.tensor(row)
            targets[position, len(row) - len(wanted) : len(row)] = torch.tensor(wanted)
        lengths = torch.tensor([len(rows[index]) for index in batch])
        scores = score(model, inputs, targets, lengths=lengths)
        greedy = (scores.greedy | (targets == IGNORE)).all(1).tolist()
        for index, nats, likeliest in zip(batch, scores.nats.sum(1).tolist(), greedy, strict=True):
            answers[index] = (-nats, likeliest)
    return answers


def rolling(ids: Sequence[int], prefix: int, max_length: int) -> list[Ask]:
    """Return requests that together score each id of a text once.

    The first id follows `prefix`. Each request has at most `max_length` inputs; the last one has as
    many even if it scores only a few ids.
    """
    sequence = [prefix, *ids]
    asks = []
    for start in range(0, len(ids), max_length):
        stop = min(start + max_length, len(ids))
        first = max(0, stop - max_length)
        asks.append(Ask(sequence[first : start + 1], sequence[start + 1 : stop + 1]))
    return asks


def continued(
    model: Transformer,
    tokenizer: Tokenizer,
    prompt: Sequence[int],
    ending: Ending,
    max_length: int,
    ends: Collection[int],
    unseen: Collection[int] = (),
) -> str:
    """Return what the model generates after a prompt, until a stop string or one of the ids `ends`.

    Ids in `unseen` are not part of the text. The prompt is truncated on the left to leave space for
    `ending.new_tokens`.
    """
    room = max_length - ending.new_tokens
    if room < 1:
        rule = f"max_gen_toks = {ending.new_tokens} leaves no room for a prompt in {max_length}"
        raise ConfigError(refusal(f"{rule} tokens", legal=[f"at most {max_length - 1}"]))
    inputs = torch.tensor([prompt[-room:]], device=model.head_weight.device)
    new: list[int] = []
    text = ""
    for token in generate_tokens(
        model, inputs, ending.new_tokens, ending.temperature, ending.top_p
    ):
        if int(token) in ends:
            break
        new += [int(token)] if int(token) not in unseen else []
        text = tokenizer.decode(new)
        if any(stop in text for stop in ending.stops if stop):
            break
    for stop in ending.stops:
        text = text.split(stop)[0] if stop else text
    return text


def _inputs(ask: Ask, max_length: int) -> list[int]:
    if not 0 < len(ask.wanted) <= max_length:
        raise ConfigError(
            f"a task wants {len(ask.wanted)} tokens at once; the model reads 1 to {max_length}"
        )
    return [*ask.context, *ask.wanted][-(max_length + 1) : -1]


def _batches(order: Sequence[int], lengths: Sequence[int], tokens: int) -> Iterator[list[int]]:
    """Yield consecutive groups of `order` whose padded size is at most `tokens`.

    `order` has indices of rows, by decreasing length.
    """
    start = 0
    while start < len(order):
        rows = max(1, tokens // max(1, lengths[order[start]]))
        yield list(order[start : start + rows])
        start += rows
