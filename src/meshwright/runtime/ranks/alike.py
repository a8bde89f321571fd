"""Checks that all ranks of a run have the same config, data, first weights and code.

Each rank reads them itself. If a file differed on one machine, the loss would still look normal.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Final

import torch
import torch.distributed as dist

import meshwright
from meshwright.checkpoint.commit import MANIFEST
from meshwright.comm.world import World, exchange
from meshwright.data import Dataset, StreamedDataset
from meshwright.data.blocks import sampled_digest
from meshwright.errors import ConfigError
from meshwright.files import sha256_bytes
from meshwright.runtime.supervise.explain import ranks_text
from meshwright.spec.stored import find_step
from meshwright.training.run_folder import Job

_SHOWN: Final = 3  # of the files that differ
_DIGITS: Final = 12  # of a digest, or more where these are the same

Digests = Mapping[str, str]  # by the name of what they are of


def refuse_unlike(own_digests: Digests, world: World) -> None:
    """Raise `ConfigError` on every rank if digests differ, with files and ranks; a collective.

    If they agree, ranks exchange only 64 bytes.
    """
    if world.size == 1:
        return
    text = json.dumps(own_digests, sort_keys=True)
    if len(set(exchange(sha256_bytes(text.encode()), dist.group.WORLD))) == 1:
        return
    everyone = [json.loads(answer) for answer in exchange(text, dist.group.WORLD)]
    differing = list(differences(everyone))
    suffix = f"; and {len(differing) - _SHOWN} more" if len(differing) > _SHOWN else ""
    hint = "All ranks must read the same files, and run the same code"
    raise ConfigError(f"ranks differ: {'; '.join(differing[:_SHOWN])}{suffix}. {hint}")


def differences(everyone: Sequence[Digests]) -> Iterator[str]:
    """Yield a sentence for each input that differs between ranks, with its value on each."""
    for name in dict.fromkeys(name for digests in everyone for name in digests):
        ranks: dict[str, list[int]] = {}
        for rank, digests in enumerate(everyone):
            ranks.setdefault(digests.get(name, "missing"), []).append(rank)
        if len(ranks) > 1:
            digits = _telling(ranks)
            which = (
                f"{value[:digits]} on {ranks_text(ranks_of_value)}"
                for value, ranks_of_value in ranks.items()
            )
            yield f"{name} is {', '.join(which)}"


def _telling(values: Collection[str]) -> int:
    """Return how many leading characters distinguish all values, at least `_DIGITS`."""
    return next(n for n in count(_DIGITS) if len({value[:n] for value in values}) == len(values))


def digests_of(
    job: Job, dataset: Dataset | StreamedDataset, *, has_weights: bool
) -> dict[str, str]:
    """Return digests of a rank's inputs; without `has_weights`, not of the first weights."""
    files = (job.folder.config, job.folder.plan)
    digests = {str(path): sha256_bytes(path.read_bytes()) for path in files}
    digests |= dataset.files or dataset.identity
    digests["the tokenizer"] = dataset.identity["tokenizer"]
    if has_weights and job.config.model.init_from is not None:
        digests |= dict(_weights(Path(job.config.model.init_from)))
    return digests | dict(_code())


def _weights(folder: Path) -> Iterator[tuple[str, str]]:
    """Yield digests of a step's manifest, or of parts of the files of a Hugging Face folder."""
    step = find_step(folder)
    paths = [*folder.glob("*.json"), *folder.glob("*.safetensors")]
    for path in sorted(paths) if step is None else [step / MANIFEST]:
        yield str(path), sampled_digest(path)


def _code() -> Iterator[tuple[str, str]]:
    """Yield digests of this package's files, and the version of torch."""
    root = Path(meshwright.__file__).parent
    for path in sorted(root.rglob("*")):
        if path.suffix in (".py", ".toml"):
            yield str(path.relative_to(root.parent)), sha256_bytes(path.read_bytes())
    yield "torch", str(torch.__version__)
