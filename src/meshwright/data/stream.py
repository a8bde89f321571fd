"""The documents of a stream: in a fixed order, block by block, from any recorded position.

Nothing is stored. The rows have the data set's order; every n-th one is held out, and the others
are shuffled within blocks of `data.shuffle_buffer`, by a permutation without state. So a position
between two blocks is enough to continue as if there had been no stop.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from itertools import count
from typing import Any

import numpy as np

from meshwright.data.corpora import HuggingFace
from meshwright.data.permutation import permute
from meshwright.errors import DataError


@dataclass(frozen=True)
class Place:
    """The beginning of a block.

    `document` numbers its first training document over all epochs, `row` is the number of earlier
    rows of the epoch, `state` is the data set's own state there (None at its beginning), and
    `digest` the SHA-256 of the block's texts.
    """

    document: int = 0
    epoch: int = 0
    row: int = 0
    state: Mapping[str, Any] | None = None
    digest: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON values, which `Place(**values)` takes back."""
        return asdict(self)


@dataclass(frozen=True)
class Documents:
    """The documents of a streamed data set, each `held_every`-th row (0: none) held out.

    `block` documents are shuffled together, by `seed`.
    """

    source: HuggingFace
    held_every: int
    block: int
    seed: int

    def held_out(self) -> Iterator[str]:
        """Yield the held-out documents of one epoch; training never sees them."""
        if self.held_every:
            for row, text in self._texts(self._opened(None), 0):
                if row % self.held_every == 0 and text.strip():
                    yield text

    def blocks(self, begin: Place) -> Iterator[tuple[Place, list[str]]]:
        """Yield blocks of training documents without end, each with its place.

        Raises DataError if the stream has none, if it has changed at `begin`, or if a row has no
        text.
        """
        place = begin
        while True:
            opened = self._opened(place.state)
            texts = self._texts(opened, place.row)
            while True:
                block: list[str] = []
                row = place.row
                for row, text in texts:
                    if not (self.held_every and row % self.held_every == 0) and text.strip():
                        block.append(text)
                        if len(block) == self.block:
                            break
                if not block:
                    break
                yield self._sealed(place, block, begin), self._shuffled(place, block)
                place = Place(place.document + len(block), place.epoch, row + 1, _state_of(opened))
                if len(block) < self.block:
                    break
            if place.row == 0:
                raise DataError(f"hf:{self.source.name} has no document to train on")
            place = Place(place.document, place.epoch + 1)

    def _opened(self, state: Mapping[str, Any] | None) -> Any:
        opened = self.source.load(streaming=True)
        if state is not None:
            opened.load_state_dict(dict(state))
        return opened

    def _texts(self, opened: Any, first: int) -> Iterator[tuple[int, str]]:
        """Yield the rows' numbers and texts, blank ones included."""
        rows = iter(opened)
        for number in count(first):
            try:
                row = next(rows)
            except StopIteration:
                return
            except Exception as error:  # network, files: the library raises all kinds
                problem = f"hf:{self.source.name}, row {number}: {error!s:.300}"
                raise DataError(problem) from error
            yield number, self.source.document(number, row)

    def _sealed(self, place: Place, texts: list[str], begin: Place) -> Place:
        digest = hashlib.sha256("\0".join(texts).encode()).hexdigest()
        if place.document == begin.document and begin.digest not in ("", digest):
            raise DataError(
                f"hf:{self.source.name} is not what the run was reading: row {place.row} and those "
                f"after it have changed (SHA-256 {digest:.16}, was {begin.digest:.16})"
            )
        return replace(place, digest=digest)

    def _shuffled(self, place: Place, texts: list[str]) -> list[str]:
        key = f"{self.seed}/{place.epoch}/{place.document}"
        order = permute(np.arange(len(texts), dtype=np.int64), len(texts), key)
        return [texts[number] for number in order.tolist()]


def _state_of(opened: Any) -> Mapping[str, Any]:
    state: Mapping[str, Any] = opened.state_dict()
    return state
