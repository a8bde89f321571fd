"""The process that plans for the page: reads a line of JSON per question, writes one per answer.

It is a separate process, so that a search that takes too long can be killed. It caches prices of a
model and a cluster between questions. The first line has the `Conditions` of all questions.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from typing import Any, Final

from meshwright.errors import MeshwrightError
from meshwright.parsing import parse_json
from meshwright.serve.answer import answer, devices_answer, model_words
from meshwright.serve.conditions import Conditions

DEEDS: Final[Mapping[str, Callable[[Any, Conditions], Any]]] = {
    "plan": answer,
    "devices": devices_answer,
    "model": lambda document, _: {"words": model_words(document)},
}
_PLAIN: Final = Conditions()


def reply(action: str, question: Any, conditions: Conditions = _PLAIN) -> dict[str, Any]:
    """Return `{"answer": ...}`, or `{"error": ...}` if the question cannot be answered.

    `action` is "plan", "devices" or "model".
    """
    try:
        if action != "model" and not isinstance(question, dict):
            return {"error": "a question is a JSON object"}
        return {"answer": DEEDS[action](question, conditions)}
    except MeshwrightError as error:
        return {"error": str(error)}
    except (ArithmeticError, LookupError, RecursionError, TypeError, ValueError) as error:
        return {"error": f"this cannot be planned ({type(error).__name__}: {error})"[:500]}


def main() -> None:
    """Answer questions from stdin on stdout until the input ends."""
    conditions = Conditions.from_json(parse_json(sys.stdin.readline()))
    for line in sys.stdin:
        action, question = parse_json(line)
        response = reply(action, question, conditions)
        sys.stdout.write(json.dumps(response, separators=(",", ":")) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
