"""The HTML of a plan's page: live at a server, or static with the answer in it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import resources
from string import Template
from typing import Any

from meshwright.report.causes import CAUSE_NAMES
from meshwright.report.figure import (
    ACTIONS,
    CAUSE_LOOKS,
    DARK,
    MEMORY_LOOKS,
    OTHER_STAGE,
    Look,
    escape,
)
from meshwright.report.page import policy as policy_of
from meshwright.report.timelines import NAMES as KIND_NAMES
from meshwright.spec.presets import PRESETS, catalogue_rows
from meshwright.version import __version__


def page(arguments: Sequence[str] = (), answer: Mapping[str, Any] | None = None) -> str:
    """Return the HTML of the page; with an answer it is static, so sends no request.

    `arguments` are its question, as command-line overrides.
    """
    given = {
        "words": list(arguments),
        "frozen": answer,
        "presets": sorted(PRESETS),
        "devices": sorted(catalogue_rows()["devices"]),
        "memory": {name: _drawn(look) for name, look in MEMORY_LOOKS.items()},
        "causes": {name: _drawn(look) for name, look in CAUSE_LOOKS.items()},
        "actions": {
            kind: [_drawn(look), _drawn(OTHER_STAGE[kind])] for kind, look in ACTIONS.items()
        },
        "names": dict(CAUSE_NAMES),
        "kinds": dict(KIND_NAMES),
        "dark": dict(DARK),
    }
    return Template(_asset("page.html")).substitute(
        css=_asset("page.css"),
        js=_script(),
        # A text within may not end the element that it stands in.
        given=json.dumps(given).replace("<", "\\u003c"),
        policy=escape(_policy("'self'" if answer is None else "'none'")),
        version=__version__,
    )


def _drawn(look: Look) -> dict[str, str]:
    """Return a look as JSON: its fill, and the colour of its stripes if it has a pattern."""
    return {"fill": look.colour, "stripe": look.stripe if look.pattern else ""}


def policy() -> str:
    """Return a Content-Security-Policy that allows requests only to the page's own server."""
    return _policy("'self'") + "; frame-ancestors 'none'"


@cache
def _policy(connect: str) -> str:
    return f"{policy_of(_script().encode())}; connect-src {connect}"


def _script() -> str:
    return f"\n{_asset('page.js')}\n"


def _asset(name: str) -> str:
    return resources.files("meshwright.serve").joinpath(name).read_text(encoding="utf-8")
