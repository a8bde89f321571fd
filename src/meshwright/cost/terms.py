"""`peak_terms`: the memory of a rank of Meshwright's engine at its peak, by category with
formulas."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from meshwright.cost.memory import Term
from meshwright.cost.peak import peak
from meshwright.cost.timeline import STREAM, TABLES, UPDATE
from meshwright.cost.units import BUFFERS
from meshwright.program.lower import Program
from meshwright.program.sizes import Sizes

_GRADIENTS: Final = "gradients of activations"
# What categories are that no closed form has.
_OTHERS: Final = {
    TABLES: "cosines and sines of all positions in fp32, for each stage",
    BUFFERS: "what gathers and sums work with at this moment",
    _GRADIENTS: "of the operation at work",
    UPDATE: "of the largest matrix that is orthogonalized",
}
_AT_WORK: Final = "of what is at work at this moment"


def peak_terms(program: Program, rank: int, forms: Iterable[Term]) -> tuple[list[Term], str]:
    """Return the memory of rank `rank` of the world at its peak, as terms, and the name of the
    moment.

    The text of a term is the closed form of its category in `forms`, and the simulation's
    difference from it.
    """
    by_category: dict[str, Term] = {}
    for closed_form in forms:
        by_category.setdefault(closed_form.category, closed_form)
    moment = peak(program, rank)
    stream = Sizes.of(program).stream_bytes
    terms = []
    for category, size in moment.held.items():
        form = by_category.get(category)
        if form is not None:
            terms.append(_worded(form, size))
        elif category == STREAM:
            template = "{:,.0f} x {:,} B: messages between stages"
            terms.append(Term(category, size, template, (size / stream, stream)))
        else:
            terms.append(Term(category, size, _OTHERS.get(category, _AT_WORK)))
    # Those that a closed form has come first, in its order: what lasts, then what is kept.
    order = {category: place for place, category in enumerate(by_category)}
    terms.sort(key=lambda term: order.get(term.category, len(order)))
    return terms, f"{moment.action}, {moment.what}"


def _worded(form: Term, size: int) -> Term:
    difference = size - round(form.bytes)
    if not difference:
        return form._replace(bytes=size)
    template = form.template + "; {:,} B {} at this moment"
    word = "more" if difference > 0 else "less"
    return Term(form.category, size, template, (*form.numbers, abs(difference), word))
