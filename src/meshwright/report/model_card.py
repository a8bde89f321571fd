"""The model card of a pushed model: what was trained on what, and what was verified.

A card is read by strangers: local folders are given by their last part, without those above.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from meshwright.report.figure import finite
from meshwright.report.record import RunRecord
from meshwright.spec.hub import HubId, hub_id
from meshwright.units import format_count
from meshwright.version import __version__

_BUILT_IN: Final = {
    "stdlib": "Python's standard library (the built-in corpus)",
    "tinystories": "[TinyStories](https://huggingface.co/datasets/roneneldan/TinyStories)",
}
_LICENSE: Final = (
    "Not stated by the command that wrote this card. The licenses of the data and of the initial "
    "weights apply; add `license:` to the metadata above."
)


@dataclass(frozen=True)
class Claim:
    """A claim that was checked; `error` and `tolerance` are None if it is not a number."""

    text: str
    passed: bool
    error: float | None = None
    tolerance: float | None = None

    def __str__(self) -> str:
        within = ""
        if self.tolerance:
            within = f" (error {self.error:.1e}, tolerance {self.tolerance:.0e})"
        return f"- {'passed' if self.passed else '**FAILED**'}: {self.text}{within}"


@dataclass(frozen=True)
class StatedProof:
    """What `meshwright prove --json` has written about a layout: its label and claims."""

    layout: str
    claims: tuple[Claim, ...]


@dataclass(frozen=True)
class CardFacts:
    """What is pushed, beyond the run's own record.

    `manifest` is that of the step, empty if there is none; `base` where the weights began, or None.
    """

    repository: str
    parameters: int
    dtype: str
    tokenizer: str | None
    is_adapter: bool
    base: str | None
    checks: tuple[Claim, ...]
    not_checked: str
    manifest: Mapping[str, Any] = field(default_factory=dict)
    proof: StatedProof | None = None


def model_card(run: RunRecord | None, facts: CardFacts) -> str:
    """Return the card as Markdown with the Hub's metadata; its license is left to the user."""
    name = facts.repository.partition("/")[2]
    lines = [*_metadata(facts), f"# {name}", "", _summary(run, facts), ""]
    lines += ["| | |", "|---|---|"]
    lines += [f"| {key} | {value} |" for key, value in _table(run, facts)]
    lines += ["", "## Verified", "", *_verified(run, facts)]
    lines += ["", "## License", "", _LICENSE]
    return "\n".join(lines) + "\n"


def _metadata(facts: CardFacts) -> list[str]:
    """Return the lines of YAML that the Hub reads, without a license."""
    base = None if facts.base is None else _repository(facts.base)
    return [
        "---",
        f"library_name: {'peft' if facts.is_adapter else 'transformers'}",
        "pipeline_tag: text-generation",
        *([f"base_model: {base.repository}"] if base is not None else []),
        "tags:",
        "- meshwright",
        *(["- lora"] if facts.is_adapter else []),
        "---",
        "",
    ]


def _repository(name: str) -> HubId | None:
    """Return the Hub id that initial weights were named by; None for a folder here."""
    identifier = hub_id(name)
    return identifier if identifier is not None and not Path(name).exists() else None


def _summary(run: RunRecord | None, facts: CardFacts) -> str:
    kind = "LoRA adapters" if facts.is_adapter else "A language model"
    family = "" if run is None else f" of the {run.values['model']['family']} family"
    return (
        f"{kind} of {format_count(facts.parameters)} parameters{family}, trained and exported by "
        f"Meshwright, which wrote this page from the run's record."
    )


def _table(run: RunRecord | None, facts: CardFacts) -> Iterator[tuple[str, str]]:
    yield "Initial weights", "random" if facts.base is None else shown_name(facts.base)
    if run is not None:
        yield from _trained(run, facts)
    elif "layout" in facts.manifest:
        yield "Layout", f"`{facts.manifest['layout']}` on {facts.manifest['world']} ranks"
    if facts.tokenizer is not None:
        yield "Tokenizer", shown_name(facts.tokenizer)
    step = facts.manifest.get("step")
    if step:
        asked = "" if run is None else f" of {run.start.get('steps', '?')}"
        tokens = facts.manifest.get("tokens")
        seen = "" if tokens is None else f", {format_count(tokens)} tokens"
        yield "Step", f"{step}{asked}{seen}"
    if run is not None and step:
        for name, kind in (("Training loss", "step"), ("Held-out loss", "eval")):
            if (last := _loss(run, kind, step)) is not None:
                yield name, f"{last[1]:.4f} nats per token at step {last[0]}"
    yield "Files", f"{facts.dtype} weights in safetensors"
    versions = [f"exported by Meshwright {__version__}"]
    if run is not None and "torch" in run.start:
        versions.append(f"trained with PyTorch {run.start['torch']}")
    yield "Versions", ", ".join(versions)


def _trained(run: RunRecord, facts: CardFacts) -> Iterator[tuple[str, str]]:
    data, train = run.values["data"], run.values["train"]
    sources = [data["source"]] if isinstance(data["source"], str) else list(data["source"])
    weights = data.get("weights") or [None] * len(sources)
    yield (
        "Data",
        ", ".join(
            shown_name(source) + ("" if weight is None else f" (weight {weight:g})")
            for source, weight in zip(sources, weights, strict=True)
        )
        + ("; conversations" if data.get("format") == "chat" else ""),
    )
    yield "Batch", f"{train['batch']} sequences of {train['seq_len']} tokens, {train['precision']}"
    optimizer = run.values["optimizer"]
    yield "Optimizer", f"{optimizer['name']}, peak learning rate {optimizer['lr']:g}"
    if run.layout is not None:
        device = run.machine.get("name", "unknown devices")
        # The step may have been saved on another layout than that on which the run was resumed.
        label = facts.manifest.get("layout", run.layout.label)
        world = facts.manifest.get("world", run.layout.world)
        yield "Layout", f"`{label}` on {world} ranks: {device}"


def _loss(run: RunRecord, kind: str, step: int) -> tuple[int, float] | None:
    """Return the last finite loss of a kind of event up to a step, with its step."""
    losses = [
        (int(event["step"]), loss)
        for event in run.by_step(kind)
        if event["step"] <= step and (loss := finite(event.get("loss"))) is not None
    ]
    return losses[-1] if losses else None


def _verified(run: RunRecord | None, facts: CardFacts) -> Iterator[str]:
    yield "The files, before they were pushed:"
    yield ""
    yield from map(str, facts.checks)
    if facts.not_checked:
        yield f"- not checked by transformers: {facts.not_checked}"
    yield ""
    if facts.proof is None:
        yield (
            "The layout's training was not compared with one device for this card "
            "(`meshwright prove`)."
        )
        return
    yield (
        f"Training on `{facts.proof.layout}`, compared with one process on a small model of the "
        "same kind (`meshwright prove`):"
    )
    yield ""
    yield from map(str, facts.proof.claims)


def shown_name(name: str) -> str:
    """Return the name of a source, tokenizer or model for strangers: a path's last part."""
    if name in _BUILT_IN:
        return _BUILT_IN[name]
    identifier = hub_id(name)
    if identifier is not None and not Path(name).exists():
        return f"[{identifier}](https://huggingface.co/{identifier.repository})"
    if name.startswith("hf:") and not Path(name.removeprefix("hf:")).is_absolute():
        return f"`{name}`"
    return f"`{Path(name).name}`" if "/" in name else f"`{name}`"
