"""The interface of a model to lm-evaluation-harness, which the extra `lm-eval` installs."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lm_eval import simple_evaluate
from lm_eval.api.model import TemplateLM
from lm_eval.tasks import TaskManager

from meshwright.data import Tokenizer
from meshwright.data.boundaries import ends_of
from meshwright.data.hf_tokenizer import hf_tokenizer
from meshwright.errors import ConfigError, nearest, refusal
from meshwright.evaluate.requests import Ask, Ending, answer, continued, rolling
from meshwright.models import Transformer


class MeshwrightLM(TemplateLM):  # type: ignore[misc]  # of an extra, without types
    """A model and its tokenizer in the interface of lm-evaluation-harness.

    Reads at most `max_length` inputs at a time, in batches of at most `batch_tokens`. A text
    without a context is preceded by the tokenizer's BOS token, or by the end-of-document token if
    it has none. Generation stops at the ids `ends`; None means those of the tokenizer and its
    files.
    """

    def __init__(
        self,
        model: Transformer,
        tokenizer: Tokenizer,
        max_length: int,
        batch_tokens: int,
        ends: Sequence[int] | None = None,
    ) -> None:
        super().__init__()
        self.model = model
        self.tokens = tokenizer
        self.max_length = max_length
        self.batch_tokens = batch_tokens
        bos = hf_tokenizer(tokenizer, max_length).bos_token_id
        self._prefix = tokenizer.eos_id if bos is None else bos
        self._ends = ends_of(tokenizer) if ends is None else ends
        self._special = _special_ids(tokenizer)

    @property
    def eot_token_id(self) -> int:
        """The id of the token that ends a document."""
        return self.tokens.eos_id

    @property
    def prefix_token_id(self) -> int:
        """The id of the token before a text without a context."""
        return self._prefix

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **kwargs: Any
    ) -> list[int]:
        """Return the ids of a text, after BOS ids unless `add_special_tokens` is False."""
        ids = self.tokens.encode(string)
        return ids if add_special_tokens is False else [*self.tokens.bos_ids, *ids]

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], **kwargs: Any
    ) -> list[tuple[float, bool]]:
        asks = [Ask(context, wanted) for _, context, wanted in requests]
        return answer(self.model, asks, self.max_length, self.batch_tokens)

    def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> list[float]:
        """Return the log-likelihood of each whole text, in nats."""
        asks = [
            rolling(self.tok_encode(request.args[0]), self._prefix, self.max_length)
            for request in requests
        ]
        flat = iter(
            answer(
                self.model,
                [ask for text_asks in asks for ask in text_asks],
                self.max_length,
                self.batch_tokens,
            )
        )
        return [sum(next(flat)[0] for _ in text_asks) for text_asks in asks]

    def generate_until(self, requests: Any, disable_tqdm: bool = False) -> list[str]:
        """Return the continuation of each prompt, generated one at a time."""
        return [
            continued(
                self.model,
                self.tokens,
                self.tok_encode(prompt),
                Ending.of(asked),
                self.max_length,
                self._ends,
                self._special,
            )
            for prompt, asked in (request.args for request in requests)
        ]


def run_tasks(
    lm: MeshwrightLM,
    names: Sequence[str],
    include: Path | None = None,
    num_fewshot: int | None = None,
    limit: int | None = None,
) -> dict[str, Any]:
    """Run tasks of lm-evaluation-harness, and return its report.

    `names` may also be tasks in YAML files under `include`. `num_fewshot` None means that of the
    task. Raises `ConfigError` for an unknown task.
    """
    manager = TaskManager(include_path=None if include is None else str(include))
    for name in names:
        if name not in manager.all_tasks:
            legal = nearest(name, manager.all_tasks, 3)
            raise ConfigError(refusal(f"--tasks {name}: there is no such task", legal=legal))
    with contextlib.redirect_stdout(sys.stderr):  # ours is for the result
        results = simple_evaluate(
            model=lm,
            tasks=list(names),
            num_fewshot=num_fewshot,
            limit=limit,
            bootstrap_iters=1000,
            log_samples=False,
            task_manager=manager,
        )
    assert results is not None, "this process is rank 0"
    return dict(results)


def _special_ids(tokenizer: Tokenizer) -> set[int]:
    """Return the ids of all special tokens."""
    from tokenizers import Tokenizer as Backend

    backend = Backend.from_str(tokenizer.to_json().decode())
    added = backend.get_added_tokens_decoder()
    return {id_ for id_, token in added.items() if token.special}
