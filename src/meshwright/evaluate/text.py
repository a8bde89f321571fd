"""The text for an evaluation: what the model's run held out, or any other."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from meshwright.checkpoint.commit import read_manifest
from meshwright.data import Tokenizer, load_tokenizer, open_data
from meshwright.data.dataset import Dataset, Say, refuse_changed
from meshwright.data.view import TokenView
from meshwright.errors import ConfigError, DataError, refusal
from meshwright.evaluate.windows import Conversations, Windows, check_windows
from meshwright.spec.stored import find_step
from meshwright.spec.training import DataFormat, DataSpec
from meshwright.training.run_folder import Job, RunFolder, read_job

Packing = Literal["stream", "documents"]
# Tokens of a batch: enough to fill the device, few enough for its memory.
BATCH_TOKENS: Final = {"cpu": 4096, "cuda": 32768}


@dataclass(frozen=True)
class Text:
    """A stream of tokens to evaluate on, and how the model's run reads such streams.

    `seq_len` is that of the run's training, None for a model without a run. `begin` are the ids
    that such a model expects before every text; a run reads rows from anywhere in a document.
    """

    name: str
    view: TokenView
    tokenizer: Tokenizer
    seq_len: int | None
    packing: Packing = "stream"
    seed: int = 0
    form: DataFormat = "text"
    begin: tuple[int, ...] = ()


def run_of(folder: Path) -> Job | None:
    """Return the run of a folder, or of its step; None for any other folder."""
    for path in (folder, *folder.resolve().parents[:2]):
        if RunFolder(path).plan.is_file() and RunFolder(path).config.is_file():
            return read_job(path)
    return None


def held_out(folder: Path, vocab_size: int, say: Say | None = None) -> Text:
    """Return the documents that the run of a model has held out.

    Raises `ConfigError` where the model is of no run, its run has held nothing out, or was trained
    on a stream or a blend; DataError
    where its data is not what the newest step was trained on.
    """
    job = run_of(folder)
    if job is None:
        raise ConfigError(f"{folder} is not a run, so it has no held-out text; give --source")
    data = open_data(job.config.data, job.cache, vocab_size, say)
    step = find_step(folder)
    trained_on = {} if step is None else read_manifest(step).get("identity", {})
    refuse_changed(
        {key: trained_on[key] for key in data.identity if key in trained_on}, data.identity
    )
    if not isinstance(data, Dataset) or len(data.parts) > 1:
        kind = "a stream" if job.config.data.streaming else "a blend"
        raise ConfigError(
            f"{folder} was trained on {kind}, which has no single held-out text; give --source"
        )
    if data.tokens("validation") < 2:
        raise ConfigError(
            f"{folder} held nothing out (data.validation = {data.spec.validation}); give --source"
        )
    name = f"held-out documents of {', '.join(data.spec.sources)}"
    return Text(
        name,
        data.parts[0].validation,
        data.tokenizer,
        job.config.train.seq_len,
        data.spec.packing,
        data.spec.seed,
        data.spec.format,
    )


def windows_of(
    text: Text,
    seq_len: int,
    context: int,
    stride: int | None = None,
    packing: Packing | None = None,
) -> Windows | Conversations:
    """Return the rows of a text with `seq_len` inputs, each `stride` tokens after the one before.

    `context` is what the model leaves for them. The stride is `seq_len` and the packing the text's
    unless given. Raises `ConfigError` for values out of range, and for either of a conversation.
    """
    step = seq_len if stride is None else stride
    check_windows(seq_len, step, context)
    if text.form == "text":
        how = packing or text.packing
        return Windows(text.view, seq_len, step, how, text.seed, text.begin)
    if step != seq_len or packing == "stream":
        rule = "--stride and --packing stream cut texts, and conversations are read whole"
        raise ConfigError(refusal(rule, legal=["no such option"]))
    return Conversations(text.view, seq_len, text.seed)


def given(
    folder: Path,
    spec: DataSpec,
    cache: Path,
    vocab_size: int,
    say: Say | None = None,
) -> Text:
    """Return all documents of `spec.sources`, tokenized by `spec.tokenizer`.

    Text is prepared under `cache` like that of a run. Raises DataError if a source is a store of
    another tokenizer, and as `open_data` does.
    """
    all_of_it = {"validation": 0.0, "streaming": False, "weights": None}
    data = open_data(spec.model_copy(update=all_of_it), cache, vocab_size, say)
    assert isinstance(data, Dataset)
    asked = load_tokenizer(spec.tokenizer, spec.eos, spec.bos)
    if data.tokenizer.digest != asked.digest:
        raise DataError(
            f"{', '.join(spec.sources)} was prepared with the tokenizer {data.tokenizer.name!r}, "
            f"but the model has {asked.name!r}; prepare the text with that one"
        )
    job = run_of(folder)
    name = ", ".join(spec.sources)
    if job is None:
        tokenizer, form = data.tokenizer, data.spec.format
        view, packing = data.parts[0].train, data.spec.packing
        return Text(name, view, tokenizer, None, packing, form=form, begin=tokenizer.bos_ids)
    config = job.config
    return Text(
        name,
        data.parts[0].train,
        data.tokenizer,
        config.train.seq_len,
        config.data.packing if spec.format == "text" else spec.packing,
        config.data.seed,
        spec.format,
    )
