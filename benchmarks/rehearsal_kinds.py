"""What `benchmarks.rehearsal` rehearses: kinds of layouts, and faults that are seeded."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

from meshwright.spec.lora import Lora
from meshwright.spec.resolve import model_spec

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
MODELS["limited"] = MODELS["experts"]
# Training settings of a model.
ASKED: Final[dict[str, dict[str, Any]]] = {"limited": {"expert_capacity": 1.1}}


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
    Kind("shard2 zero1 mb2", model="adapters"),
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
    Kind("cp2-ring ep2 mb2 recompute-selective", model="limited"),
    Kind("zero3 pp2 1f1b mb1 offload-params", model="adapters"),
    Kind("shard2 zero3 tp2 sp ep4 etp1 mb2 recompute-full", model="experts"),
)


class Fault(NamedTuple):
    """A fault that is seeded: in words, an edit, a layout that meets it, the check to catch it."""

    what: str
    edit: tuple[str, str, str]
    label: str
    check: str


_ROOM = "meshwright.parallel"
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
        (
            "meshwright.training.optimizer",
            "parameters[0].device)",
            "parameters[0].device, non_blocking=True)",
        ),
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
        (f"{_ROOM}.apply", "        if self.groups.data.size > 1:\n", "        if False:\n"),
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
