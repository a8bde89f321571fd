"""Rehearses ranks on the stand-in for a GPU, in a process of its own: what GPUs do, to the letter.

Reads a JSON list of cases from its input, and writes a line for each rank of a case as it is done.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
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
    """What a rank did on the stand-in: sentences on what is wrong, and the host's named waits.

    `messages` are differences from the program's, `syncs` waits of the host that nothing names,
    `order` uses of memory, pinned memory too, that streams or the host do not wait for.
    """

    label: str
    rank: int
    messages: tuple[str, ...]
    syncs: tuple[str, ...]
    order: tuple[str, ...]
    named: tuple[str, ...]
    seconds: float

    @property
    def passed(self) -> bool:
        """Whether nothing is wrong."""
        return not (self.messages or self.syncs or self.order)


def watch(cases: Sequence[Mapping[str, Any]]) -> Iterator[Watched]:
    """Yield what ranks do on the stand-in, in a process of its own.

    A case has `model`, `train`, `layout` and `optimizer` as their specs' JSON documents, `packed`
    and `ranks`. Raises `MeshwrightError` where the process ends without an answer.
    """
    command = [sys.executable, "-m", "meshwright.simulate.on_standin"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdin.write(json.dumps(list(cases)))
        process.stdin.close()
        for line in process.stdout:
            found = json.loads(line)
            lists = {key: tuple(found[key]) for key in ("messages", "syncs", "order", "named")}
            yield Watched(found["label"], found["rank"], **lists, seconds=found["seconds"])
        told = process.stderr.read().strip()
    if process.returncode:
        raise MeshwrightError(f"the rehearsal on the stand-in ended: {told[-2000:]}")


def _main() -> None:
    # Before anything of what trains: its branches for CUDA become those for the stand-in.
    from meshwright.simulate.standin import install

    device = install()
    for case in json.load(sys.stdin):
        for rank in case["ranks"]:
            print(json.dumps(_rehearsed(case, rank, device)._asdict()), flush=True)


def _rehearsed(case: Mapping[str, Any], rank: int, device: Any) -> Watched:
    from meshwright.execute.collective_recorder import CollectiveRecorder
    from meshwright.execute.wire import message_differences
    from meshwright.layout import Layout
    from meshwright.program.lower import lower
    from meshwright.program.target import Target
    from meshwright.simulate.rehearse import rehearse
    from meshwright.simulate.standin import module
    from meshwright.simulate.stream_order import StreamOrder
    from meshwright.simulate.watching import DeviceWatch
    from meshwright.spec.model import ModelSpec
    from meshwright.spec.training import OptimizerSpec, TrainSpec

    layout = Layout.model_validate_json(case["layout"])
    model = ModelSpec.model_validate_json(case["model"])
    train = TrainSpec.model_validate_json(case["train"])
    program = lower(model, train, layout, Target("gpu", packed=case["packed"]))
    module().order = StreamOrder()
    module()._current.clear()
    seen: list[DeviceWatch] = []

    @contextmanager
    def watched(recorder: Any) -> Iterator[None]:
        seen.append(DeviceWatch(recorder))
        with CollectiveRecorder(recorder, device), seen[0]:
            yield

    optimizer = OptimizerSpec.model_validate_json(case["optimizer"])
    done = rehearse(program, rank, optimizer, device=device, watched=watched)
    waits = seen[0].in_step
    return Watched(
        layout.label,
        rank,
        tuple(message_differences(done.expected, done.messages)),
        tuple(dict.fromkeys(one for one in waits if _named(one, layout) is None)),
        tuple(dict.fromkeys(seen[0].order.faults)),
        tuple(dict.fromkeys(filter(None, (_named(one, layout) for one in waits)))),
        done.seconds,
    )


def _named(wait: str, layout: Any) -> str | None:
    return None if layout.offload == "none" else NAMED.get(wait.rpartition(" at ")[2])


if __name__ == "__main__":
    _main()
