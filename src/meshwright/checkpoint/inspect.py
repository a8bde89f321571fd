"""Facts about a folder of checkpoints, from manifests alone. No torch here."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from meshwright.checkpoint.commit import read_manifest, steps, verify
from meshwright.errors import CheckpointError
from meshwright.spec.stored import steps_folder
from meshwright.store import Place, StorePath


@dataclass(frozen=True)
class StepFacts:
    """What the manifest of a committed step says; `problem` is why the step is invalid, or None.

    `is_verified`: every file's hash was compared.
    """

    path: str
    step: int
    bytes: int
    files: int
    layout: str | None
    world: int | None
    samples: int | None
    tokens: int | None
    is_verified: bool
    problem: str | None

    def as_dict(self) -> dict[str, Any]:
        """Return the facts as JSON-ready values."""
        return asdict(self)


def checkpoints_of(folder: Place) -> Place:
    """Return the folder of steps of a run, of a folder of steps, or of a step.

    Raises `CheckpointError` if there is no committed step.
    """
    own_steps = folder if isinstance(folder, StorePath) else steps_folder(folder)
    for root in (own_steps, folder, folder.parent):
        if steps(root):
            return root
    where = (
        folder
        if folder in (own_steps, own_steps.parent)
        else f"{folder}, which saves its steps in {own_steps},"
    )
    raise CheckpointError(f"{where} holds no committed step (no step-00000100 folder)")


def inspect(folder: Place, *, verified: bool = False) -> list[StepFacts]:
    """Return the facts of all steps of a run, or of one step folder, oldest first.

    With `verified`, every file is read and compared with its hash.
    """
    root = checkpoints_of(folder)
    folders = steps(root)
    resolved = folder.resolve()
    if resolved in [path.resolve() for path in folders]:
        folders = [resolved]
    return [_facts(path, verified=verified) for path in folders]


def _facts(path: Place, *, verified: bool) -> StepFacts:
    problem, manifest = None, dict[str, Any]()
    try:
        manifest = read_manifest(path)
        if verified:
            verify(path)
    except (CheckpointError, OSError) as error:
        problem = str(error)
    files = manifest.get("files", {})
    return StepFacts(
        path=str(path),
        step=int(path.name.rsplit("-", 1)[1]),
        bytes=sum(file["bytes"] for file in files.values()),
        files=len(files),
        layout=manifest.get("layout"),
        world=manifest.get("world"),
        samples=manifest.get("samples"),
        tokens=manifest.get("tokens"),
        is_verified=verified,
        problem=problem,
    )
