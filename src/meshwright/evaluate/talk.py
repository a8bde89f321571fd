"""`TextModel`: a stored model with its tokenizer, which continues texts and answers messages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch

from meshwright.checkpoint.weights import load_model
from meshwright.data import Tokenizer, load_tokenizer
from meshwright.data.boundaries import ends_of
from meshwright.data.conversations import Message
from meshwright.data.encoders import ChatEncoder, encoder_of
from meshwright.errors import ConfigError
from meshwright.models import Transformer
from meshwright.models.generate import generate_tokens
from meshwright.spec.stored import StoredTokenizer
from meshwright.spec.training import DataFormat
from meshwright.training.run_folder import tokenizer_of


@dataclass(frozen=True)
class Sampling:
    """The settings for sampling tokens, as in `models.generate.generate_tokens`."""

    max_tokens: int = 200
    temperature: float = 0.8
    top_p: float = 0.95
    seed: int = 0


class Generation:
    """A text as it is generated; iterating yields pieces that consist of complete characters.

    `ids` are the new tokens so far, without the one that ends an answer; `count` is their number
    including that one.
    """

    def __init__(
        self,
        model: Transformer,
        tokenizer: Tokenizer,
        prompt: list[int],
        before: str | None,
        ends: Sequence[int],
        sampling: Sampling,
    ) -> None:
        """Start the generation; `before` is the text to continue, None for an answer to messages.

        Raises `ConfigError` for invalid sampling settings.
        """
        self.ids: list[int] = []
        self.count = 0
        self._tokenizer, self._ends = tokenizer, ends
        # Of a text to continue, the prompt is part of what is decoded: a character may begin in it.
        self._before = [] if before is None else prompt[len(tokenizer.bos_ids) :]
        self._shown, self._is_answer = before or "", before is None
        self._tokens = generate_tokens(
            model,
            torch.tensor([prompt]),
            sampling.max_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            seed=sampling.seed,
            eos_id=ends,
        )

    @property
    def text(self) -> str:
        """The text so far, including the prompt unless it is an answer to messages."""
        return self._tokenizer.decode([*self._before, *self.ids])

    def __iter__(self) -> Iterator[str]:
        """Yield the generated text, piece by piece."""
        for token in self._tokens:
            self.count += 1
            if self._is_answer and int(token) in self._ends:
                return
            self.ids.append(int(token))
            text = self.text
            # A character of several tokens is yielded once it is whole.
            if not text.endswith("\ufffd"):
                yield text[len(self._shown) :]
                self._shown = text


class TextModel:
    """A stored model (run, saved step, Hugging Face folder or adapters) with its tokenizer."""

    def __init__(self, folder: Path, tokenizer: str | None = None) -> None:
        """Load the tokenizer; the weights are loaded when they are first used.

        `tokenizer` is "bytes", "gpt2" or a path; None means the folder's. Raises `ConfigError`,
        DataError or `CheckpointError`.
        """
        stored = StoredTokenizer(tokenizer) if tokenizer else tokenizer_of(folder)
        self._folder, self.form = folder, stored.form
        self.tokenizer = load_tokenizer(stored.name, stored.eos, stored.bos)

    @cached_property
    def model(self) -> Transformer:
        """The model in fp32."""
        return load_model(self._folder)

    @cached_property
    def _encoder(self) -> ChatEncoder:
        encoder = encoder_of(self.tokenizer, "chat")
        assert isinstance(encoder, ChatEncoder)
        return encoder

    def continued(self, prompt: str, sampling: Sampling = Sampling()) -> Generation:
        """Return the continuation of a text; raises `ConfigError` if the prompt has no tokens."""
        ids = [*self.tokenizer.bos_ids, *map(int, self.tokenizer.encode(prompt))]
        if not ids:
            raise ConfigError("the prompt is empty: there is nothing to continue")
        return self._generation(ids, prompt, self.form, sampling)

    def answer(
        self,
        messages: Sequence[Message],
        sampling: Sampling = Sampling(),
    ) -> Generation:
        """Return the assistant's answer to messages, formatted by the chat template.

        A message is `{"role": "user", "content": TEXT}`. Raises `ConfigError` for messages that the
        template rejects.
        """
        try:
            ids = self._encoder.prompt(messages)
        except ValueError as error:
            raise ConfigError(f"the messages cannot be formatted: {error}") from error
        return self._generation(ids, None, "chat", sampling)

    def _generation(
        self, ids: list[int], before: str | None, form: DataFormat, sampling: Sampling
    ) -> Generation:
        ends = ends_of(self.tokenizer, form)
        return Generation(self.model, self.tokenizer, ids, before, ends, sampling)
