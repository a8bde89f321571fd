"""Checks that a pipeline's action tables cannot deadlock, without running them. No torch."""

from __future__ import annotations

from meshwright.program.actions import ProgramError
from meshwright.program.lower import Program
from meshwright.program.schedule import check_order
from meshwright.prove.verdict import Verdict

CLAIM = "order cannot deadlock"
_ENDS = "every rank reaches its end"


def prove_order(program: Program) -> Verdict:
    """Check that the tables of all pipeline ranks are complete, that each send has its receive, and
    that every rank reaches its end.
    """
    observed = _ENDS
    try:
        check_order(program.tables, program.stage_ranks)
    except ProgramError as error:
        observed = str(error)
    layout = program.layout.model_dump(mode="json")
    return Verdict(CLAIM, layout, _ENDS, observed, None, observed == _ENDS)
