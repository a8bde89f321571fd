"""Whether a tag may be released: `python -m ci.release v0.2.0`. No package is needed."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

ROOT: Final = Path(__file__).parents[1]
_HEADING: Final = re.compile(r"^## \[([^\]]+)\] - (\S+)$", re.MULTILINE)


class Heading(NamedTuple):
    """A heading of the changelog: a version, and its date or "unreleased"."""

    version: str
    date: str


def newest(changelog: str) -> Heading:
    """Return the newest heading of a changelog."""
    found = _HEADING.search(changelog)
    if found is None:
        raise ValueError("the changelog has no heading as `## [0.2.0] - unreleased`")
    return Heading(found[1], found[2])


def expected(heading: Heading) -> str:
    """Return the version that the package has under a heading: X.Y.Z.dev0 until its release."""
    return f"{heading.version}.dev0" if heading.date == "unreleased" else heading.version


def version(source: str) -> str:
    """Return the version that `version.py` states."""
    found = re.search(r'^__version__ = "([^"]+)"$', source, re.MULTILINE)
    if found is None:
        raise ValueError("version.py states no version")
    return found[1]


def problems(tag: str, changelog: str, source: str) -> list[str]:
    """Return why a tag may not be released; nothing where it may."""
    heading, ours = newest(changelog), version(source)
    found = []
    if heading.date == "unreleased":
        found.append(f"CHANGELOG.md: [{heading.version}] has no date yet")
    if ours != expected(heading):
        found.append(f"version.py has {ours}, CHANGELOG.md asks for {expected(heading)}")
    if tag != f"v{ours}":
        found.append(f"the tag is {tag}, the version {ours}")
    return found


def main(arguments: Sequence[str]) -> int:
    """Print what is in the way of a release; 1 where something is."""
    (tag,) = arguments
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    source = (ROOT / "src/meshwright/version.py").read_text(encoding="utf-8")
    found = problems(tag, changelog, source)
    for text in found:
        print(text, file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
