"""The process that plans for the page: a line of JSON in, a line of JSON out.

It is one of its own, so that a search that takes too long can be ended, and what it has learnt of a
model and a cluster stays with it from one question to the next.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from typing import Any, Final

from meshwright.errors import MeshwrightError
from meshwright.parsing import parse_json
from meshwright.serve.answer import answer, devices_answer, model_words

DEEDS: Final[Mapping[str, Callable[[Any], Any]]] = {
    "plan": answer,
    "devices": devices_answer,
    "model": lambda document: {"words": model_words(document)},
}


def reply(deed: str, question: Any) -> dict[str, Any]:
    """Return `{"answer": ...}`, or `{"error": ...}` where a question cannot be answered."""
    try:
        if deed != "model" and not isinstance(question, dict):
            return {"error": "a question is a JSON object"}
        return {"answer": DEEDS[deed](question)}
    except MeshwrightError as error:
        return {"error": str(error)}
    except (ArithmeticError, LookupError, RecursionError, TypeError, ValueError) as error:
        return {"error": f"this cannot be planned ({type(error).__name__}: {error})"[:500]}


def main() -> None:
    """Answer until the input ends."""
    for line in sys.stdin:
        deed, question = parse_json(line)
        sys.stdout.write(json.dumps(reply(deed, question), separators=(",", ":")) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
