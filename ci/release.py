"""Whether a tag may be released: `python -m ci.release v0.3.0`. No package is needed.

python -m ci.release v0.3.0 --dry-run       what is in the way, and the tag that would be made
python -m ci.release v0.3.0 --readme URL    make README's links absolute, for a package index
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

ROOT: Final = Path(__file__).parents[1]
_HEADING: Final = re.compile(r"^## \[([^\]]+)\] - (\S+)$", re.MULTILINE)
# Of a link or image in Markdown, what is neither absolute nor within the page.
_LINK: Final = re.compile(r"(!?)(\[[^\]]*\]\()(?!https?://|#|mailto:)([^)\s]+)\)")


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


def summary(changelog: str) -> str:
    """Return what the newest heading has before its lists: the message of the tag."""
    heading = _HEADING.search(changelog)
    text = "" if heading is None else changelog[heading.end() :]
    return re.split(r"^(?:### |## |<a )", text, maxsplit=1, flags=re.MULTILINE)[0].strip()


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
    if not summary(changelog):
        found.append(f"CHANGELOG.md: [{heading.version}] has no summary")
    if ours != expected(heading):
        found.append(f"version.py has {ours}, CHANGELOG.md asks for {expected(heading)}")
    if tag != f"v{ours}":
        found.append(f"the tag is {tag}, the version {ours}")
    return found


def absolute(text: str, repository: str, tag: str) -> str:
    """Return Markdown whose relative links lead to a tag of a repository, and images to its files.

    `repository` is its page, as `https://host/owner/name`.
    """

    def link(match: re.Match[str]) -> str:
        kind = "raw" if match[1] else "blob"
        return f"{match[1]}{match[2]}{repository.rstrip('/')}/{kind}/{tag}/{match[3]})"

    return _LINK.sub(link, text)


def main(arguments: Sequence[str]) -> int:
    """Print what is in the way of a release; 1 where something is."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tag")
    parser.add_argument("--dry-run", action="store_true", help="print the tag; make nothing")
    parser.add_argument("--readme", metavar="URL", help="make README's links absolute")
    args = parser.parse_args(arguments)
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    source = (ROOT / "src/meshwright/version.py").read_text(encoding="utf-8")
    if args.readme is not None:
        readme = ROOT / "README.md"
        text = absolute(readme.read_text(encoding="utf-8"), args.readme, args.tag)
        readme.write_text(text, encoding="utf-8")
        return 0
    found = problems(args.tag, changelog, source)
    for text in found:
        print(text, file=sys.stderr)
    if args.dry_run:
        print(f"git tag --annotate {args.tag} --message:\n\n{summary(changelog)}")
        return 0
    return 1 if found else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
