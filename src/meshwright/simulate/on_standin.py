"""Dry-runs ranks on the stand-in for a GPU, in a separate process, with the code for GPUs.

As a program, it reads a JSON document of cases and edits from standard input, and writes a line for
each finished rank.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import zip_longest
from typing import Any, Final, NamedTuple

from meshwright.errors import MeshwrightError

# What the host waits for on purpose where a layout offloads: by function, why.
NAMED: Final[Mapping[str, str]] = {
    "optimize.py:take": "for gradients, which the host's optimizer takes",
    "optimizer.py:step_scaled": "for the norm, by which the host's optimizer clips",
    "_fsdp_collectives.py:foreach_reduce": "for gradients that are added up on the host",
    "_fsdp_param_group.py:finalize_backward": "for gradients, which lie on the host",
}


class Watched(NamedTuple):
    """What was observed in a rank's step on the stand-in.

    `messages` are differences from the program's messages, `syncs` unexpected waits of the host,
    `order` uses of memory, also pinned, without the necessary wait between streams, each as a
    sentence; `named` are expected waits of the host. `sent` are the messages in order: kind, label
    of the group, its ranks, bytes, peer, microbatch.
    """

    label: str
    rank: int
    messages: tuple[str, ...]
    syncs: tuple[str, ...]
    order: tuple[str, ...]
    named: tuple[str, ...]
    seconds: float
    sent: tuple[tuple[Any, ...], ...] = ()

    @property
    def passed(self) -> bool:
        """Whether there are no differences, unexpected waits or missing waits."""
        return not (self.messages or self.syncs or self.order)


def watch(
    cases: Sequence[Mapping[str, Any]], edits: Sequence[Sequence[str]] = ()
) -> Iterator[Watched]:
    """Yield what was observed in the dry-run steps of ranks on the stand-in, in a separate process.

    A case has `model`, `train`, `layout` and `optimizer` as their specs' JSON documents, `packed`
    and `ranks`. `edits` seed faults, as in `standin.Edit`. Raises `MeshwrightError` if the process
    fails.
    """
    command = [sys.executable, "-m", "meshwright.simulate.on_standin"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdin.write(json.dumps({"cases": list(cases), "edits": list(edits)}))
        process.stdin.close()
        for line in process.stdout:
            answer = json.loads(line)
            lists = {key: tuple(answer[key]) for key in ("messages", "syncs", "order", "named")}
            sent = tuple(
                (*message[:2], tuple(message[2]), *message[3:]) for message in answer["sent"]
            )
            yield Watched(
                answer["label"], answer["rank"], **lists, seconds=answer["seconds"], sent=sent
            )
        errors = process.stderr.read().strip()
    if process.returncode:
        raise MeshwrightError(f"the rehearsal on the stand-in ended: {errors[-2000:]}")


def out_of_order(watched: Sequence[Watched]) -> tuple[str, ...]:
    """Return sentences about messages of a group, or of a pair of ranks, that ranks begin in
    different orders.

    `watched` has ranks of one layout; only dry-run ranks are compared. A pair of pipeline ranks has
    one order for transfers both ways; a ring has one for each direction.
    """
    logs: dict[tuple[Any, ...], dict[int, list[tuple[Any, ...]]]] = {}
    for step in watched:
        for kind, label, ranks, size, peer, microbatch in step.sent:
            where: tuple[Any, ...] = (label, ranks)
            message: tuple[Any, ...] = (kind, size)
            if kind in ("send", "recv"):
                way = (step.rank, peer) if kind == "send" else (peer, step.rank)
                pair = tuple(sorted(way)) if label == "pp" else way
                where, message = (f"{label}, transfers", pair), (way, size, microbatch)
            logs.setdefault(where, {}).setdefault(step.rank, []).append(message)
    return tuple(
        f"{where[0]} of ranks {', '.join(map(str, where[1]))}: message {index + 1} of rank {first} "
        f"is {began}, of rank {other_rank} {other_began}"
        for where, by_rank in logs.items()
        for (first, log), *further in [list(by_rank.items())]
        for other_rank, other_log in further
        for index, (began, other_began) in enumerate(zip_longest(log, other_log))
        if began != other_began
    )


def _main() -> None:
    # Before anything of what trains: its branches for CUDA become those for the stand-in.
    from meshwright.simulate.standin import Edit, install

    request = json.load(sys.stdin)
    device = install([Edit(*edit) for edit in request["edits"]])
    for case in request["cases"]:
        for rank in case["ranks"]:
            print(json.dumps(_dry_run(case, rank, device)._asdict()), flush=True)


def _dry_run(case: Mapping[str, Any], rank: int, device: Any) -> Watched:
    from meshwright.comm.collective_recorder import CollectiveRecorder
    from meshwright.comm.wire import message_differences
    from meshwright.kernels.fp32_matmuls import target_of
    from meshwright.layout import Layout
    from meshwright.models import flex
    from meshwright.program.lower import lower
    from meshwright.simulate.dry_run import dry_run
    from meshwright.simulate.standin import module
    from meshwright.simulate.stream_order import StreamOrder
    from meshwright.simulate.watching import DeviceWatch
    from meshwright.spec.model import ModelSpec
    from meshwright.spec.training import OptimizerSpec, TrainSpec
    from meshwright.torch_private import replaced

    layout = Layout.model_validate_json(case["layout"])
    model = ModelSpec.model_validate_json(case["model"])
    train = TrainSpec.model_validate_json(case["train"])
    optimizer = OptimizerSpec.model_validate_json(case["optimizer"])
    program = lower(
        model, train, optimizer, layout, target_of(train, device, packed=case["packed"])
    )
    module().order = StreamOrder()
    module()._current.clear()
    seen: list[DeviceWatch] = []

    @contextmanager
    def watched(recorder: Any) -> Iterator[None]:
        seen.append(DeviceWatch(recorder))
        with CollectiveRecorder(recorder, device), seen[0]:
            yield

    with (
        replaced(flex, "HAS_TRITON", lambda _: True),
        replaced(flex, "_compiled_parts", lambda _: _parts_on_standin),
    ):
        done = dry_run(program, rank, device=device, watched=watched)
    waits = seen[0].in_step
    return Watched(
        layout.label,
        rank,
        tuple(message_differences(done.expected, done.messages)),
        tuple(dict.fromkeys(wait for wait in waits if _named(wait, layout) is None)),
        tuple(dict.fromkeys(seen[0].order.faults)),
        tuple(dict.fromkeys(filter(None, (_named(wait, layout) for wait in waits)))),
        done.seconds,
        tuple(map(tuple, seen[0].sent)),
    )


def _parts_on_standin(*asked: Any) -> tuple[Any, ...]:
    """Return the result of `flex._parts` with its attention replaced by the stand-in's."""
    from meshwright.models import flex
    from meshwright.simulate.standin_flex import attend

    return attend, *flex._parts(*asked)[1:]


def _named(wait: str, layout: Any) -> str | None:
    return None if layout.offload == "none" else NAMED.get(wait.rpartition(" at ")[2])


if __name__ == "__main__":
    _main()
