"""`Outcome`: the result of a case's proof, and a table's outcomes as one document. No torch."""

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
    """The verdicts on a case, and their seconds."""

    case: Case
    verdicts: tuple[Verdict, ...]
    seconds: float

    @property
    def passed(self) -> bool:
        """Whether all of its verdicts are good; no verdict is no proof."""
        return bool(self.verdicts) and all(verdict.passed for verdict in self.verdicts)

    @property
    def failed_claims(self) -> frozenset[str]:
        """The claims that did not hold."""
        return frozenset(verdict.claim for verdict in self.verdicts if not verdict.passed)

    def lines(self) -> Iterator[str]:
        """Yield a line with the claims and their worst errors, then the failures."""
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
    """Return a line on a layout that had to be refused."""
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
    """Return all as one JSON-ready object; `passed` and `failed` count layouts."""
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
