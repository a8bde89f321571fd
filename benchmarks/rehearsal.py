"""Rehearse layouts and seeded faults on the stand-in for a GPU, and write what was checked.

Run as `python -m benchmarks.rehearsal --page docs/gpu-rehearsal.md`, or with `--only TEXT` for the
kinds alone whose words have a text, without a page.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from meshwright.layout import Layout
from meshwright.simulate.on_standin import Watched, out_of_order, watch
from meshwright.spec.lora import Lora
from meshwright.spec.resolve import model_spec
from meshwright.spec.training import OptimizerSpec, TrainSpec

SIZES = {"dim": 64, "n_layers": 4, "n_heads": 4, "vocab_size": 128, "ffn_dim": 128}
PLAIN = model_spec(**SIZES, n_kv_heads=2)
MODELS = {
    "llama": PLAIN,
    "tied": PLAIN.model_copy(update={"tie_embeddings": True}),
    "dropout": PLAIN.model_copy(update={"dropout": 0.1}),
    "adapters": PLAIN.model_copy(update={"lora": Lora(rank=4, alpha=8.0)}),
    "windows": model_spec(
        family="gemma2", **SIZES, layer_pattern=[{"window": 16}, {}], attention_softcap=5.0
    ),
    "sinks": model_spec(family="gpt_oss", **SIZES, n_kv_heads=2, experts=4, top_k=2),
    "neox": model_spec(family="neox", **SIZES),
    "experts": model_spec(
        family="qwen2_moe", **SIZES, experts=4, top_k=2, expert_ffn_dim=64, shared_ffn_dim=64
    ),
}
# More ranks than these are rehearsed by the first and the last alone.
MOST_RANKS = 4


class Kind(NamedTuple):
    """What is rehearsed: a layout, the precision, whether rows hold several documents, a model."""

    label: str
    precision: str = "bf16"
    packed: bool = False
    model: str = "llama"

    @property
    def words(self) -> str:
        """All of it."""
        rows = "packed" if self.packed else "plain"
        return f"{self.label} {self.precision} {rows} {self.model}"


KINDS = (
    # One rank: accumulation, recomputation, precisions, the optimizer on the host.
    Kind("mb2"),
    Kind("mb4", "fp32"),
    Kind("mb2", "fp16", model="dropout"),
    Kind("mb2 recompute-selective", packed=True),
    Kind("mb2 recompute-full", model="neox"),
    Kind("mb2", "fp32", packed=True),
    Kind("mb2 recompute-selective", packed=True, model="windows"),
    Kind("tp2 sp mb2", packed=True, model="sinks"),
    Kind("mb2 recompute-selective", model="windows"),
    Kind("shard2 zero3 mb2", model="sinks"),
    Kind("mb2 offload-optimizer"),
    Kind("mb2 offload-activations"),
    Kind("mb2 recompute-full offload-activations", "fp32", packed=True),
    Kind("mb2 recompute-selective offload-activations", model="dropout"),
    # Data: replicas, each stage of ZeRO by FSDP2, both.
    Kind("dp2 mb2"),
    Kind("dp2 mb2", "fp16", model="tied"),
    Kind("shard2 zero1 mb2"),
    Kind("shard2 zero2 mb2", "fp16"),
    Kind("shard2 zero3 mb2 recompute-full", packed=True),
    Kind("shard2 zero3 mb2", "fp32", model="tied"),
    Kind("shard2 zero3 mb2", model="adapters"),
    Kind("dp2 shard2 zero1 mb1"),
    Kind("dp2 shard2 zero3 mb1", model="dropout"),
    Kind("shard2 zero2 mb2 offload-optimizer"),
    Kind("shard2 zero3 mb2 offload-params"),
    Kind("shard2 zero3 mb2 recompute-full offload-activations"),
    # Tensor and sequence parallelism.
    Kind("tp2 mb2", "fp16"),
    Kind("tp2 sp mb2"),
    Kind("tp2 sp mb2 recompute-full", packed=True),
    Kind("tp4 mb2", model="neox"),
    Kind("shard2 zero3 tp2 sp mb2 recompute-selective"),
    Kind("tp2 sp mb2 offload-activations"),
    Kind("dp2 tp2 mb2", "fp32", model="tied"),
    # Context parallelism.
    Kind("cp2-ring mb2", packed=True),
    Kind("cp2-ring mb2 recompute-selective", "fp16"),
    Kind("cp2-ring mb2 recompute-selective", "fp32", packed=True),
    Kind("cp4-ring mb2", packed=True, model="windows"),
    Kind("cp2-ulysses mb2", packed=True),
    Kind("shard2 zero3 cp2-ring mb1"),
    Kind("zero2 cp2-ulysses mb2 recompute-full"),
    Kind("cp2-ring tp2 sp mb2"),
    Kind("cp2-ring mb2 offload-activations"),
    # Every schedule, with each kind of data parallelism.
    Kind("pp2 naive mb2"),
    Kind("pp2 gpipe mb1", "fp16"),
    Kind("pp4 1f1b mb1"),
    Kind("shard2 zero1 pp2 1f1b mb1", model="tied"),
    Kind("shard2 zero3 pp2 1f1b mb1 recompute-full", packed=True),
    Kind("pp2 interleaved_1f1b v2 mb1", model="neox"),
    Kind("pp2 looped_bfs v2 mb1", "fp32"),
    Kind("shard2 zero3 pp2 interleaved_zero_bubble v2 mb1"),
    Kind("zero3 pp2 zbv v2 mb1"),
    Kind("tp2 sp pp2 zbv v2 mb1"),
    Kind("pp2 dualpipev v2 mb1"),
    Kind("pp2 1f1b mb1 offload-activations"),
    Kind("tp2 sp pp2 zbv v2 mb1 offload-activations"),
    Kind("cp2-ring pp2 1f1b mb1", packed=True),
    Kind("shard2 zero2 tp2 sp pp2 1f1b mb1"),
    Kind("shard2 zero3 tp2 sp cp2-ring pp2 1f1b mb1"),
    # Experts, whole and shared out.
    Kind("mb2", model="experts"),
    Kind("tp2 sp mb2", model="experts"),
    Kind("shard2 zero1 ep2 mb2", model="experts"),
    Kind("shard2 zero3 ep2 mb2 recompute-full", model="experts"),
    Kind("shard2 zero3 ep2 mb2 offload-activations", model="experts"),
    Kind("shard2 zero3 ep2 pp2 1f1b mb1", model="experts"),
    Kind("tp2 sp ep2 etp1 mb2", model="experts"),
    Kind("shard2 zero3 tp2 sp ep4 etp1 mb2 recompute-full", model="experts"),
)


class Fault(NamedTuple):
    """A fault that is seeded: in words, an edit, a layout that meets it, the check to catch it."""

    what: str
    edit: tuple[str, str, str]
    label: str
    check: str


_ROOM = "meshwright.execute"
FAULTS = (
    Fault(
        "the batch's copy to the device is not waited for",
        (f"{_ROOM}.batch", "        current.wait_stream(self._stream)\n", ""),
        "mb2",
        "order",
    ),
    Fault(
        "a received activation is used before it has arrived",
        (f"{_ROOM}.pipeline", "        arrival.work.wait()\n", ""),
        "pp2 1f1b mb1",
        "order",
    ),
    Fault(
        "the host's optimizer reads a norm that is still on its way",
        ("meshwright.training.optimizer", "norm.to(device)", "norm.to(device, non_blocking=True)"),
        "mb2 offload-optimizer",
        "order",
    ),
    Fault(
        "a block's activations are used before their copy from the host is awaited",
        (
            f"{_ROOM}.offload",
            "            self._fetch()\n            self._of.copies.wait(self._event)\n",
            "            self._fetch()\n",
        ),
        "pp2 1f1b mb1 offload-activations",
        "order",
    ),
    Fault(
        "a block's activations are freed while they are copied to the host",
        (
            f"{_ROOM}.offload",
            'once the copies are done."""\n        self._of.copies.wait(self._event)\n',
            'once the copies are done."""\n',
        ),
        "mb2 offload-activations",
        "order",
    ),
    Fault(
        "a block's activations are copied to the host before they are computed",
        (f"{_ROOM}.offload", "        self.stream.wait_stream(torch.cuda.current_stream())\n", ""),
        "mb2 offload-activations",
        "order",
    ),
    Fault(
        "what a backward finds on the device is freed while it still leaves",
        (
            f"{_ROOM}.offload",
            "            tensor.record_stream(self.stream)\n",
            "            pass\n",
        ),
        "mb2 offload-activations",
        "order",
    ),
    Fault(
        "the host reads the norm of the gradient within the step",
        (
            "meshwright.training.update",
            '    world.recorder.phase("update")\n',
            '    world.recorder.phase("update")\n    found.norm.item()\n',
        ),
        "mb2",
        "host waits",
    ),
    Fault(
        "a sum over data parallelism is left out",
        (f"{_ROOM}.parallel", "        if self.groups.data.size > 1:\n", "        if False:\n"),
        "dp2 mb2",
        "messages",
    ),
    Fault(
        "the last stage receives its first two microbatches in the other order",
        (
            f"{_ROOM}.pipeline",
            "            for action in self.table:\n",
            "            table = list(self.table)\n"
            "            for second in [a for a in table if a.kind == 'RECV_F'][1:2]:\n"
            "                table.remove(second)\n"
            "                first = next(a for a in table if a.kind == 'RECV_F')\n"
            "                table.insert(table.index(first), second)\n"
            "            for action in table:\n",
        ),
        "pp2 gpipe mb1",
        "between ranks",
    ),
)


def case(
    label: str, precision: str = "bf16", packed: bool = False, model: str = "llama"
) -> dict[str, Any]:
    """Return a case of `watch`: a small model in a layout."""
    spec = TrainSpec.model_validate({"batch": 8, "seq_len": 64, "precision": precision})
    documents = {"model": MODELS[model], "train": spec, "optimizer": OptimizerSpec()}
    found = {name: one.model_dump_json() for name, one in documents.items()}
    layout = Layout.parse(label)
    ranks = range(layout.world) if layout.world <= MOST_RANKS else (0, layout.world - 1)
    document = layout.model_dump_json()
    return {**found, "layout": document, "packed": packed, "ranks": list(ranks)}


class Checked(NamedTuple):
    """What a rehearsal found, by check: sentences, none where all is well; and the named waits."""

    faults: dict[str, tuple[str, ...]]
    named: tuple[str, ...]
    ranks: tuple[int, ...]

    @classmethod
    def of(cls, ranks: Sequence[Watched]) -> Checked:
        """Return what was found of the ranks of a case."""
        found = {
            "messages": tuple(text for one in ranks for text in one.messages),
            "between ranks": out_of_order(ranks),
            "host waits": tuple(text for one in ranks for text in one.syncs),
            "order": tuple(text for one in ranks for text in one.order),
        }
        named = dict.fromkeys(text for one in ranks for text in one.named)
        return cls(found, tuple(named), tuple(one.rank for one in ranks))

    @property
    def caught(self) -> list[str]:
        """The checks that something was found by."""
        return [check for check, texts in self.faults.items() if texts]


def checked(
    cases: Sequence[dict[str, Any]], edits: Sequence[Sequence[str]] = ()
) -> Iterator[Checked]:
    """Yield what the rehearsals of some cases find."""
    ranks = watch(cases, edits)
    for one in cases:
        yield Checked.of([next(ranks) for _ in one["ranks"]])
    assert next(ranks, None) is None


def seeded(fault: Fault) -> Checked:
    """Return what is found of a fault."""
    (found,) = checked([case(fault.label)], [fault.edit])
    return found


def page(found: Iterable[Checked], caught: Iterable[Checked]) -> str:
    """Return the tables."""
    lines = [
        "# A step on a GPU, rehearsed without one",
        "",
        "Made by `python -m benchmarks.rehearsal`, as `meshwright simulate --device cuda` does:",
        "the branches for CUDA on a stand-in device, with fake tensors and a fake process group",
        "([why](decisions/0043-the-path-of-a-gpu.md)).",
        f"Nothing here ran on a GPU. Layouts of up to {MOST_RANKS} ranks are rehearsed by all of",
        "them, others by the first and the last.",
        "",
        "| check | passes if |",
        "|---|---|",
        "| messages | a rank sends what the program says: kinds, axes, bytes, numbers |",
        "| between ranks | the ranks of a group, and each pair of a pipeline, begin their messages"
        " in one order |",
        "| host waits | the host reads nothing from the device within the step, except for what is"
        " named |",
        "| order | each use is ordered after the write before, on streams and on the host; freed"
        " memory is not given anew while a stream uses it; pinned memory is read once it has"
        " arrived |",
        "",
        "## Layouts",
        "",
        "| layout | model | precision | rows | ranks | messages | between ranks | host waits |"
        " order |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for kind, one in zip(KINDS, found, strict=True):
        rows = "packed" if kind.packed else "plain"
        words = {check: f"FAILED: {len(texts)}" for check, texts in one.faults.items() if texts}
        named = "; ".join(one.named) or "none"
        checks = (
            words.get("messages", "the program's"),
            words.get("between ranks", "one order" if len(one.ranks) > 1 else "-"),
            words.get("host waits", named),
            words.get("order", "in order"),
        )
        ranks = ", ".join(map(str, one.ranks))
        cells = (f"`{kind.label}`", kind.model, kind.precision, rows, ranks, *checks)
        lines.append(f"| {' | '.join(cells)} |")
    lines += [
        "",
        "## Seeded faults",
        "",
        "Each fault is put into a copy of the source as it is loaded, and must be caught.",
        "",
        "| fault | layout | caught by |",
        "|---|---|---|",
    ]
    for fault, one in zip(FAULTS, caught, strict=True):
        told = ", ".join(one.caught) or "NOTHING"
        lines.append(f"| {fault.what} | `{fault.label}` | {told} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    """Write the page; 1 where something is wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--page", type=Path)
    what.add_argument("--only", metavar="TEXT", help="such as 'cp4-ring mb2 bf16 packed windows'")
    args = parser.parse_args()
    kinds = [kind for kind in KINDS if args.only is None or args.only in kind.words]
    found, caught = [], []
    for kind, one in zip(kinds, checked([case(*kind) for kind in kinds]), strict=True):
        print(f"{kind.words}: {one.faults if one.caught else 'passed'}", file=sys.stderr)
        found.append(one)
    if args.only is not None:
        return 0 if found and not any(one.caught for one in found) else 1
    for fault in FAULTS:
        caught.append(seeded(fault))
        print(f"{fault.what}: {', '.join(caught[-1].caught)}", file=sys.stderr)
    args.page.write_text(page(found, caught), encoding="utf-8")
    fine = all(not one.caught for one in found)
    seen = all(fault.check in one.caught for fault, one in zip(FAULTS, caught, strict=True))
    return 0 if fine and seen else 1


if __name__ == "__main__":
    raise SystemExit(main())
