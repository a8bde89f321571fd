"""Converts models to and from Hugging Face folders; the result appears only if it is verified."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

import torch
from torch import Tensor

from meshwright.checkpoint.adapters import AdapterSource, merge, write_adapter
from meshwright.checkpoint.draft import Draft
from meshwright.checkpoint.hf_check import (
    TEXT,
    Check,
    checks_by_transformers,
    difference_of,
    failed,
    logits_of,
    same_ids,
    same_logits,
    same_tensors,
    sample_ids,
)
from meshwright.checkpoint.weights import load_model, write_weights
from meshwright.data import Tokenizer, load_tokenizer
from meshwright.data.hf_tokenizer import TOKENIZER, copy_tokenizer, hf_tokenizer
from meshwright.errors import ConfigError, MeshwrightError
from meshwright.models import Transformer
from meshwright.models.hf import load_hf, write_hf
from meshwright.program.shards import whole
from meshwright.spec.model import ModelSpec
from meshwright.spec.parts import kept_in_fp32, parts
from meshwright.spec.stored import find_step
from meshwright.spec.training import DataFormat

StoredType = Literal["fp32", "bf16"]
DTYPES: Final = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Exchanged:
    """The result of a conversion: the new folder and the checks of it.

    `out` exists only if all `checks` passed. `files` has the size of each file in bytes.
    `not_checked` is the reason why transformers did not check it, or "". `rounding` is the largest
    change of a logit by rounding the weights, relative to the largest logit; None: not rounded.
    """

    source: Path
    out: Path
    parameters: int
    dtype: StoredType
    tokenizer: str | None
    files: Mapping[str, int]
    checks: tuple[Check, ...]
    not_checked: str
    rounding: float | None = None

    @property
    def passed(self) -> bool:
        """Whether all checks passed."""
        return all(check.passed for check in self.checks)

    def as_dict(self) -> dict[str, Any]:
        """Return the result as JSON-ready values."""
        return {
            "source": str(self.source),
            "out": str(self.out),
            "passed": self.passed,
            "parameters": self.parameters,
            "dtype": self.dtype,
            "tokenizer": self.tokenizer,
            "files": dict(self.files),
            "bytes": sum(self.files.values()),
            "checks": [check.as_dict() for check in self.checks],
            "not_checked": self.not_checked or None,
            "rounding": self.rounding,
        }


def export_hf(
    source: Path,
    out: Path,
    tokenizer: Tokenizer | None,
    dtype: StoredType = "fp32",
    max_shard_bytes: int = 5 * 10**9,
    form: DataFormat = "text",
) -> Exchanged:
    """Write the model of a run, step or Hugging Face folder as a new Hugging Face folder.

    Merges adapters into the weights. `form` is the `data.format` that the model was trained on,
    which determines the end-of-text token: a model of conversations uses its chat template's.

    Weights are in `dtype`, in files of at most `max_shard_bytes`, with configs, and the tokenizer's
    files if there is one. `out` appears only after Meshwright, and transformers if installed, have
    loaded it and computed the model's logits; else `Exchanged.passed` is false. Raises
    `ConfigError` if `out` is not new or empty and as `write_hf`, `CheckpointError` as `load_model`
    and for disk errors.
    """
    with Draft(out) as draft:
        model = merge(load_model(source))
        _check_vocabulary(model.spec, tokenizer)
        files = hf_tokenizer(tokenizer, model.spec.context, form)
        fp32_names = kept_in_fp32(model.spec)
        state = {
            name: tensor if name in fp32_names else tensor.to(DTYPES[dtype])
            for name, tensor in model.state_dict().items()
        }
        write_hf(
            model.spec,
            state,
            draft.path,
            max_shard_bytes=max_shard_bytes,
            bos_token_id=files.bos_token_id,
            eos_token_id=files.eos_token_id,
        )
        for name, content in files.files.items():
            (draft.path / name).write_bytes(content)
        ends = files.eos_token_id
        eos_id = None if form == "text" else (ends[0] if isinstance(ends, list) else ends)
        checked = _check_export(draft.path, model, state, tokenizer, eos_id, dtype)
        done = Exchanged(
            source=find_step(source) or source,
            out=out,
            parameters=_count(model),
            dtype=dtype,
            tokenizer=None if tokenizer is None else tokenizer.name,
            files=_sizes(draft.path),
            checks=checked.checks,
            not_checked=checked.not_checked,
            rounding=None if dtype == "fp32" else checked.rounding,
        )
        if done.passed:
            draft.publish()
    return done


def export_adapter(source: Path, out: Path, base: str | None, dtype: StoredType) -> Exchanged:
    """Write the adapters of a run or step as a new PEFT folder, in `dtype`.

    `base` is where PEFT finds the base model. `out` appears only after it has been read back bit
    for bit; else `Exchanged.passed` is false. Raises `ConfigError` if `out` is not new or empty,
    `CheckpointError` if the model has no adapters, and as `load_model`.
    """
    with Draft(out) as draft:
        model = load_model(source)
        write_adapter(model, draft.path, base, DTYPES[dtype])
        state = {
            part.name: model.get_parameter(part.name).detach().to(DTYPES[dtype])
            for part in parts(model.spec)
            if part.is_adapter
        }
        read = AdapterSource(draft.path, model.spec)
        reloaded = {
            name: read(name, tuple(tensor.shape), whole(tuple(tensor.shape)))
            for name, tensor in state.items()
        }
        claim = f"matrices read back are the run's, stored in {dtype}"
        done = Exchanged(
            source=find_step(source) or source,
            out=out,
            parameters=sum(tensor.numel() for tensor in state.values()),
            dtype=dtype,
            tokenizer=None,
            files=_sizes(draft.path),
            checks=(same_tensors(claim, reloaded, state),),
            not_checked="adapters are for a base model that is not in the folder",
        )
        if done.passed:
            draft.publish()
    return done


def import_hf(source: Path, out: Path) -> Exchanged:
    """Write a Hugging Face folder's model as step 0 of a new folder, for `model.init_from`.

    Weights are converted to fp32; the tokenizer's files are copied if there is a tokenizer.json.
    `out` appears only after it has been read back bit for bit and transformers, if installed, has
    computed the same logits from `source`; else `Exchanged.passed` is false. Raises `ConfigError`
    if `out` is not new or empty, and as `load_hf`.
    """
    with Draft(out) as draft:
        model = load_hf(source, dtype=torch.float32)
        state = model.state_dict()
        write_weights(draft.path, model.spec, state, {"imported_from": str(source)})
        file = source / TOKENIZER
        if file.is_file():
            copy_tokenizer(file, draft.path)
        reloaded = load_model(draft.path).state_dict()
        checks = [
            same_tensors("tensors read back are those of the folder, in fp32", reloaded, state)
        ]
        ids = sample_ids(model.spec, None)
        transformers_checks, not_checked = checks_by_transformers(
            source, ids, logits_of(model, ids), None
        )
        done = Exchanged(
            source=source,
            out=out,
            parameters=_count(model),
            dtype="fp32",
            tokenizer=TOKENIZER if file.is_file() else None,
            files=_sizes(draft.path),
            checks=(*checks, *transformers_checks),
            not_checked=not_checked,
        )
        if done.passed:
            draft.publish()
    return done


def _check_vocabulary(spec: ModelSpec, tokenizer: Tokenizer | None) -> None:
    if tokenizer is not None and tokenizer.vocab_size > spec.vocab_size:
        raise ConfigError(
            f"the tokenizer {tokenizer.name} has {tokenizer.vocab_size} entries, but the model's "
            f"vocab_size is {spec.vocab_size}: it was trained with another one"
        )


class _Checked(NamedTuple):
    """The checks of an export, why some are missing, and the change of logits by rounding."""

    checks: tuple[Check, ...]
    not_checked: str
    rounding: float | None


def _check_export(
    folder: Path,
    model: Transformer,
    state: Mapping[str, Tensor],
    tokenizer: Tokenizer | None,
    eos_id: int | None,
    dtype: StoredType,
) -> _Checked:
    """Load an exported folder and compare it with the model, after loading `state` into the
    model.
    """
    ids = sample_ids(model.spec, tokenizer)
    checks = []
    try:
        if tokenizer is not None:
            own_tokenizer = load_tokenizer(str(folder))
            observed = [*own_tokenizer.bos_ids, *own_tokenizer.encode(TEXT), own_tokenizer.eos_id]
            claim = "ids by the tokenizer of the folder are those of training"
            checks.append(same_ids(claim, observed, tokenizer, eos_id))
        reloaded = load_hf(folder, dtype=torch.float32)
    except MeshwrightError as error:
        checks.append(failed("the folder can be loaded here", None, error))
        return _Checked(tuple(checks), "", None)
    claim = f"tensors are the model's, stored in {dtype}"
    checks.append(same_tensors(claim, reloaded.state_dict(), state))
    before = logits_of(model, ids)
    model.load_state_dict(state)  # what is stored: rounding may swap experts, which is not a fault
    expected, logits = logits_of(model, ids), logits_of(reloaded, ids)
    claim = "logits of the folder loaded here are the model's"
    claim += "" if dtype == "fp32" else f", with weights in {dtype}"
    checks.append(same_logits(claim, logits.values, expected, 0.0))
    del reloaded  # the memory of a whole model, which transformers loads next
    by_transformers, not_checked = checks_by_transformers(folder, ids, logits, tokenizer, eos_id)
    return _Checked((*checks, *by_transformers), not_checked, difference_of(expected, before))


def _count(model: Transformer) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def _sizes(folder: Path) -> dict[str, int]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.stat().st_size for path in files}
