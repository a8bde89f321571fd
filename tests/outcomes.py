"""What becomes of a fault: exit code, message, seconds.

Tests of the numbered cases of docs/records/fault-cases.md carry `@pytest.mark.case(N)` and record
each outcome with the fixture `outcome`; `python -m benchmarks.fault_cases` makes a table of a run.
"""

import json
import time
from contextlib import contextmanager
from typing import NamedTuple

import pytest

from meshwright.runtime.supervise.attempts import recoveries


class Outcome(NamedTuple):
    """What the user sees, and when.

    `code` is the exit code of the process, or the one that the command maps the error to; None
    where nothing ends. `seconds` are from the fault to the end of the run or to the refusal,
    `again_s` those until the ranks were at work again.
    """

    code: int | None
    message: str
    seconds: float
    again_s: float | None = None


class Outcomes:
    """Takes the outcomes of a test down for its report."""

    def __init__(self, record):
        self._record = record

    def add(self, *found):
        self._record("outcome", json.dumps(Outcome(*found)._asdict()))

    @contextmanager
    def refused(self, error, match=None):
        """`pytest.raises`, taken down."""
        with refused(error, match) as caught:
            yield caught
        self.add(*caught.outcome)


class Caught:
    """The error that a body raised, and what it comes to."""

    value: BaseException
    outcome: Outcome


@contextmanager
def refused(error, match=None):
    """`pytest.raises` that times the body, and knows the exit code of what it raised."""
    found, started = Caught(), time.monotonic()
    with pytest.raises(error, match=match) as caught:
        yield found
    found.value = caught.value
    found.outcome = Outcome(
        getattr(caught.value, "exit_code", None), str(caught.value), time.monotonic() - started
    )


def outcome_of(code, text, events, ended):
    """Return the outcome of a run from its end, what was said at it, and its events.

    The fault is taken to have struck `detect_s` before the first failure was noticed; a slow rank
    is slow from the first step on.
    """
    failures = [event for event in events if event["event"] in ("restart", "failed")]
    slow = [event for event in events if event["event"] == "slow_rank"]
    again = None
    if (first := next(recoveries(events), None)) is not None and first.restart_s is not None:
        again = (first.detect_s or 0.0) + first.restart_s
    if failures:
        struck = failures[0]["time"] - (failures[0]["detect_s"] or 0.0)
        said = failures[0]["cause"]
        if len(failures) > 1 and not code:
            said += f" (and {len(failures) - 1} times more)"
    else:
        struck = next(event["time"] for event in events if event["event"] == "start")
        said = f"rank {slow[0]['rank']} is slow" if slow else ""
    return Outcome(code, text.split("\n\n")[0] if code else said, ended - struck, again)
