"""`Outcome`: the result of proving a case; and a JSON document of the outcomes of many cases. No
torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from meshwright.errors import either
from meshwright.prove.case import Case
from meshwright.prove.refused import Refusal
from meshwright.prove.verdict import Verdict


@dataclass(frozen=True)
class Outcome:
    """The verdicts on a case, and the seconds that the proof took."""

    case: Case
    verdicts: tuple[Verdict, ...]
    seconds: float

    @property
    def passed(self) -> bool:
        """Whether there are verdicts and all of them passed."""
        return bool(self.verdicts) and all(verdict.passed for verdict in self.verdicts)

    @property
    def failed_claims(self) -> frozenset[str]:
        """The claims whose verdict failed."""
        return frozenset(verdict.claim for verdict in self.verdicts if not verdict.passed)

    def lines(self) -> Iterator[str]:
        """Yield the printed lines: one with all claims and their errors, then one or two per failed
        verdict.
        """
        word = "ok  " if self.passed else "FAIL"
        errors = [
            f"{verdict.claim} {verdict.error:.1e} ({verdict.error / verdict.tolerance:.0%})"
            for verdict in self.verdicts
            if verdict.tolerance and verdict.error is not None
        ]
        claims = [verdict.claim for verdict in self.verdicts if not verdict.tolerance]
        yield f"{word} {self.case.label}: {', '.join(errors + claims)} ({self.seconds:.1f} s)"
        for verdict in self.verdicts:
            if not verdict.passed:
                yield from _failure(verdict)


def _failure(verdict: Verdict) -> Iterator[str]:
    if verdict.tolerance is None:
        yield f"     {verdict.claim}: {verdict.observed}"
    else:
        yield (
            f"     {verdict.claim}: {verdict.observed} instead of {verdict.expected}, more than "
            f"{verdict.tolerance:.1e} off"
        )
    if verdict.first_divergence is not None:
        yield f"     first: {verdict.first_divergence}"


def refusal_line(refusal: Refusal) -> str:
    """Return the printed line on a layout that had to be refused: by which rule it was, and the
    nearest legal layouts.
    """
    word = "ok  " if refusal.passed else "FAIL"
    answer = refusal.rule or "not refused"
    if not refusal.passed:
        answer += f", instead of: {refusal.case.refused}"
    legal = either(refusal.nearest)
    return f"{word} {refusal.case.layout.label} refused: {answer}" + (
        legal and f"; nearest: {legal}"
    )


def document(
    world: int, outcomes: Sequence[Outcome], refusals: Sequence[Refusal], seconds: float
) -> dict[str, Any]:
    """Return the outcomes and refusals of a table of layouts as a JSON-ready object, as `prove
    --json` prints it.

    `passed` and `failed` count layouts; `seconds` is the wall time of all.
    """
    passed = sum(outcome.passed for outcome in outcomes)
    passed_refusals = sum(refusal.passed for refusal in refusals)
    return {
        "world": world,
        "layouts": len(outcomes),
        "passed": passed,
        "failed": len(outcomes) - passed + len(refusals) - passed_refusals,
        "refused": [
            {
                "layout": refusal.case.layout.label,
                "rule": refusal.rule,
                "expected": refusal.case.refused,
                "nearest": list(refusal.nearest),
            }
            for refusal in refusals
        ],
        "seconds": round(seconds, 3),
        "verdicts": [
            {"case": outcome.case.label, **verdict.as_dict()}
            for outcome in outcomes
            for verdict in outcome.verdicts
        ],
    }
