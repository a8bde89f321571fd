"""Checks that an exported folder contains the source's model, also as transformers reads it."""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from meshwright.data import Tokenizer
from meshwright.models import Transformer
from meshwright.models.routers import Router
from meshwright.spec.model import ModelSpec
from meshwright.spec.stored import HF_CONFIG, read_object

SEQ_LEN: Final = 128
# Largest difference of two logits over the largest logit. Logits of the same weights by the same
# code must be equal. transformers takes the same sums in another order: 1e-6 was seen, and 1e-5 of
# a model of 24 layers with wild first weights.
TOLERANCE_TRANSFORMERS: Final = 1e-4
# Two experts whose scores for a token are this close may change places in another order of sums.
CLOSE: Final = 1e-5
OLDEST_TRANSFORMERS: Final = (4, 57)

TEXT: Final = """\
The tide had gone out further than anyone in the village could remember, and the boats lay on their
sides like sleeping cattle. "It'll come back," said the old pilot, who had seen 73 winters there;
"it always does." Nobody believed him -- not this time. By 4:15 p.m. the first of the children had
walked out to the wreck of the Margarethe, a mile and a half (2.4 km) from the harbour wall.

    def tides(moon: float, sun: float = 0.46) -> list[float]:
        # 12.42 hours from one high water to the next
        return [moon * math.cos(2 * math.pi * t / 12.42) + sun for t in range(24)]

Von der Düne aus sah man, wie das Licht über dem Watt zitterte. Le garçon répéta sa question à voix
basse. Они молчали. 潮が満ちてくる。 🌊 Ten minutes later the water was at their knees.
"""


@dataclass(frozen=True)
class Check:
    """The result of one check of a folder: `observed` must equal `expected`, within `tolerance`.

    A `tolerance` of None requires equality. `first_divergence` describes the first difference.
    """

    claim: str
    expected: Any
    observed: Any
    tolerance: float | None
    passed: bool
    first_divergence: str | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return the check as a JSON-ready verdict: a number that is not finite becomes a
        string.
        """
        observed = self.observed
        if isinstance(observed, float) and not math.isfinite(observed):
            observed = str(observed)
        return {**asdict(self), "observed": observed, "layout": {}}


def sample_ids(spec: ModelSpec, tokenizer: Tokenizer | None) -> Tensor:
    """Return token ids int64 `[3, seq]` to compare models with.

    Two sequences are a text, one covers the whole vocabulary. Without a tokenizer, all three cover
    it, in different orders.
    """
    length = min(SEQ_LEN, spec.context)
    spread = torch.arange(length) * spec.vocab_size // length
    if tokenizer is None:
        return torch.stack([spread, spread.flip(0), spread.roll(length // 2)])
    ids = tokenizer.encode(TEXT)
    ids *= -(-2 * length // len(ids))
    return torch.cat([torch.tensor(ids[: 2 * length]).view(2, length), spread[None]])


class Logits(NamedTuple):
    """Logits fp32 `[batch, seq, vocab]`, and the tokens whose expert selection is within rounding.

    `close` bool `[batch, seq]`: in some layer an expert is selected by a margin below `CLOSE`.
    """

    values: Tensor
    close: Tensor


@torch.no_grad()
def logits_of(model: Transformer, ids: Tensor) -> Logits:
    """Run a model on token ids `[batch, seq]`; return logits and router margins."""
    close = torch.zeros_like(ids, dtype=torch.bool)

    def note(router: Router, args: tuple[Any, ...], _: Any) -> None:
        close.logical_or_(router.margin(args[0]).view_as(ids) < CLOSE)

    routers = [module for module in model.modules() if isinstance(module, Router)]
    hooks = [router.register_forward_hook(note) for router in routers]
    try:
        logits: Tensor = model(ids)
    finally:
        for hook in hooks:
            hook.remove()
    return Logits(logits.float(), close)


def difference_of(observed: Logits, expected: Logits) -> float:
    """Return the largest difference of two logits, relative to the largest expected logit."""
    difference = (observed.values - expected.values).abs().max()
    return float(difference / expected.values.abs().max().clamp_min(1e-30))


def same_tensors(
    claim: str, observed: Mapping[str, Tensor], expected: Mapping[str, Tensor]
) -> Check:
    """Check that tensors are equal bit for bit in fp32; `observed` of the check counts
    differences.
    """
    different = [
        name
        for name in sorted({*observed, *expected})
        if name not in observed
        or name not in expected
        or not _equal(observed[name], expected[name])
    ]
    first = different[0] if different else None
    return Check(claim, 0, len(different), None, not different, first)


def _equal(observed: Tensor, expected: Tensor) -> bool:
    # As integers: a NaN is itself, and 0.0 is not -0.0.
    if observed.shape != expected.shape:
        return False
    observed_bits, expected_bits = (
        tensor.detach().float().view(torch.int32) for tensor in (observed, expected)
    )
    return torch.equal(observed_bits, expected_bits)


def same_logits(claim: str, observed: Tensor, expected: Logits, tolerance: float) -> Check:
    """Check that logits differ by at most `tolerance`, relative to the largest expected logit.

    `first_divergence` is where they differ most. If a sequence first differs at a token that is
    `close`, rounding may have selected another expert, which affects all later tokens: that token
    and the later ones are left out.
    """
    values = expected.values
    difference = (observed - values).abs() / values.abs().max().clamp_min(1e-30)
    swapped = (difference.amax(-1) > tolerance) & expected.close
    left_out = swapped.cumsum(1) > 0
    difference = difference.masked_fill(left_out[..., None], 0)
    error = difference.max().item()
    passed = error <= tolerance and not bool(left_out.all())  # not so where it is NaN
    first = None
    if not passed:
        index = torch.unravel_index(difference.nan_to_num(torch.inf).argmax(), difference.shape)
        first = "row {}, position {}, token {}".format(*map(int, index))
    return Check(claim, 0.0, error, tolerance, passed, first)


def checks_by_transformers(
    folder: Path,
    ids: Tensor,
    expected: Logits,
    tokenizer: Tokenizer | None,
    eos_id: int | None = None,
) -> tuple[list[Check], str]:
    """Check that transformers loads the same model, and the same tokenizer if there is one.

    `expected` are Meshwright's logits of `ids`; `eos_id` is the folder's, None for the tokenizer's.
    Runs no code of the folder. Returns the checks, and the reason if none could be made.
    """
    try:
        version = str(_transformers().__version__)
    except ImportError as error:
        return [], f"transformers cannot be imported ({error})"
    reason = _too_old(version, folder)
    if reason:
        return [], reason
    claim = f"logits of transformers {version} are those of the folder loaded here"
    try:
        observed = _their_logits(folder, ids)
        checks = [same_logits(claim, observed, expected, TOLERANCE_TRANSFORMERS)]
    except Exception as error:  # whatever a library that reads a wrong folder may raise
        checks = [failed(claim, TOLERANCE_TRANSFORMERS, error)]
    if tokenizer is not None:
        checks.append(_their_ids(folder, tokenizer, version, eos_id))
    return checks, ""


def _too_old(version: str, folder: Path) -> str:
    """Return why this version of transformers cannot read the folder correctly, or ""."""
    numbers = tuple(int(part) for part in version.split(".")[:2])
    if numbers < OLDEST_TRANSFORMERS:
        oldest = ".".join(map(str, OLDEST_TRANSFORMERS))
        return f"transformers {version} is older than {oldest}"
    config = read_object(folder / HF_CONFIG)
    if numbers < (5, 0) and "rope_parameters" in config and "rope_theta" not in config:
        return f"transformers {version} does not read the rope_parameters of {HF_CONFIG}"
    return ""


@torch.no_grad()
def _their_logits(folder: Path, ids: Tensor) -> Tensor:
    transformers = _transformers()
    with _quiet(transformers.utils.logging):
        model, loading = transformers.AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=torch.float32,
            use_safetensors=True,
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
            attn_implementation="eager",
        )
    # Plain products: its fast kernels take only some shapes, which says nothing about the folder.
    if hasattr(model, "set_experts_implementation"):  # since transformers 5
        model.set_experts_implementation("eager")
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if loading.get(kind):
            raise ValueError(f"{kind.replace('_', ' ')}: {sorted(map(str, loading[kind]))[:3]}")
    logits: Tensor = model.eval()(ids).logits
    return logits


def _their_ids(folder: Path, tokenizer: Tokenizer, version: str, eos_id: int | None) -> Check:
    claim = f"ids by the tokenizer of transformers {version} are those of training"
    try:
        loaded = _transformers().AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
        plain = {"add_special_tokens": False, "split_special_tokens": True}
        ids = loaded(TEXT, **plain, verbose=False)["input_ids"]  # longer than the context or not
        letter, with_special = loaded("a", **plain)["input_ids"], loaded("a")["input_ids"]
        starts = range(len(with_special) - len(letter) + 1)
        begin = with_special[
            : next(n for n in starts if with_special[n : n + len(letter)] == letter)
        ]
        return same_ids(claim, [*begin, *ids, loaded.eos_token_id], tokenizer, eos_id)
    except Exception as error:  # as above
        return failed(claim, None, error)


def same_ids(
    claim: str, observed: Sequence[int], tokenizer: Tokenizer, eos_id: int | None = None
) -> Check:
    """Check that `observed` are the tokenizer's ids of `TEXT`, with those before and after it.

    `eos_id` is the expected last id, None for the tokenizer's. `observed` of the check counts the
    leading ids that are equal.
    """
    end = tokenizer.eos_id if eos_id is None else eos_id
    expected = [*tokenizer.bos_ids, *tokenizer.encode(TEXT), end]
    pairs = enumerate(zip(observed, expected, strict=False))
    equal = next(
        (index for index, pair in pairs if pair[0] != pair[1]), min(len(observed), len(expected))
    )
    passed = list(observed) == expected
    first = None if passed else f"token {equal}"
    return Check(claim, len(expected), equal, None, passed, first)


def failed(claim: str, tolerance: float | None, error: Exception) -> Check:
    """Return a check that failed with an error, which becomes its `observed`."""
    text = " ".join(str(error).split())
    observed = f"{type(error).__name__}: {text:.300}"
    return Check(claim, None, observed, tolerance, False)


@contextmanager
def _quiet(logging: Any) -> Iterator[None]:
    """Within this context, disable transformers' progress bars."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _transformers() -> Any:
    return importlib.import_module("transformers")
