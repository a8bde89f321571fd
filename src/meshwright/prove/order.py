"""Checks the order of a pipeline's actions against the rules without running them. No torch."""

from __future__ import annotations

from meshwright.program.actions import ProgramError
from meshwright.program.lower import Program
from meshwright.program.schedule import check_order
from meshwright.prove.verdict import Verdict

CLAIM = "order cannot deadlock"
_ENDS = "every rank reaches its end"


def prove_order(program: Program) -> Verdict:
    """Return the verdict on all pipeline ranks' tables: complete, matched, and terminating."""
    observed = _ENDS
    try:
        check_order(program.tables, program.stage_ranks)
    except ProgramError as error:
        observed = str(error)
    layout = program.layout.model_dump(mode="json")
    return Verdict(CLAIM, layout, _ENDS, observed, None, observed == _ENDS)
