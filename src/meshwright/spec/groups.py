"""Groups of parameters, selected by name, with their own learning rate and weight decay."""

from __future__ import annotations

import re
from collections.abc import Sequence
from fnmatch import fnmatchcase

from pydantic import Field

from meshwright.errors import nearest, refusal
from meshwright.parsing import printable
from meshwright.spec.kinds import Spec

# Names that a refusal of a pattern suggests.
_SUGGESTED = 3


class GroupSpec(Spec):
    """The parameters whose names match a pattern, with settings for their update.

    `match` is a shell pattern: `*` stands for any text, dots included, `?` for a character, `[abc]`
    for one of them. The learning rate is multiplied by `lr_scale`: with 0, the weights do not
    change. A `weight_decay` applies to every parameter of the group, also to vectors; None:
    matrices have that of [optimizer].
    """

    match: str = Field(min_length=1)
    lr_scale: float = Field(default=1.0, ge=0)
    weight_decay: float | None = Field(default=None, ge=0)

    def matches(self, name: str) -> bool:
        """Whether a parameter of this name matches the pattern."""
        return fnmatchcase(name, self.match)


def group_of(groups: Sequence[GroupSpec], name: str) -> GroupSpec | None:
    """Return the first group whose pattern matches a parameter's name, or None."""
    return next((group for group in groups if group.matches(name)), None)


def empty_group(
    groups: Sequence[GroupSpec], names: Sequence[str], origin: str = "config"
) -> str | None:
    """Return the error message for the first group without trained parameters; None if all have
    some.
    """
    members = [group_of(groups, name) for name in names]
    for group in groups:
        if any(member is group for member in members):
            continue
        rule = f"optimizer.groups: match = {printable(repr(group.match))} ({printable(origin)})"
        if any(group.matches(name) for name in names):
            hint = "The first group that matches has a parameter: put the narrower pattern first"
            return refusal(f"{rule} matches parameters of earlier groups only", hint=hint)
        return refusal(f"{rule} matches no trained parameter", legal=_near(group.match, names))
    return None


def _near(match: str, names: Sequence[str]) -> list[str]:
    """Suggest patterns similar to one without matches, each for a parameter in all layers."""
    patterns = list(dict.fromkeys(re.sub(r"\.\d+\.", ".*.", name) for name in names))
    word = match.strip("*.^$")
    inside = [pattern for pattern in patterns if word and word in pattern]
    near = [*inside, *nearest(match, patterns, _SUGGESTED), *patterns]
    return list(dict.fromkeys(near))[:_SUGGESTED]
