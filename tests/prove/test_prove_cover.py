"""A few layouts of the table that together have each kind, and each pair of axes, are proven."""

from itertools import combinations

import pytest

from meshwright.runtime.proofs.proof import prove_cases
from runs import clean_environ
from test_prove import axes, check, legal, quiet

pytestmark = pytest.mark.early


def values(case):
    """What a case of the table has: axes, kinds, schedule, policies, precision, kind of model."""
    layout, model = case.layout, case.label.partition(", ")[2]
    found = {*axes(layout), f"zero {layout.zero}", *model.split(), case.train.precision}
    found |= {f"recompute {layout.recompute}", f"offload {layout.offload}"}
    found |= {f"sp {layout.sp}"} if layout.tp > 1 else set()
    found |= {layout.cp_kind} if layout.cp > 1 else set()
    return found | ({layout.schedule} if layout.pp > 1 else set())


def pairs(case):
    return set(combinations(sorted(axes(case.layout)), 2))


def cost(case):
    """Half precision is proven in fp32, too, and one of the models is a wide one."""
    return (1 + (case.train.precision != "fp32")) * (1 + case.train.seq_len // 64)


def cover(cases, of):
    """Some of the cases that together have all that any of them has."""
    left, chosen = set().union(*map(of, cases)), []
    while left:
        chosen.append(max(cases, key=lambda case: len(left & of(case)) / cost(case)))
        left -= of(chosen[-1])
    return chosen


@pytest.mark.timeout(600)
# `prove --matrix --world 2`, which every change must pass, has all of the first ones.
@pytest.mark.slow
@pytest.mark.parametrize(("world", "of"), [(2, values), (8, pairs)])
def test_every_kind_and_every_pair_of_the_table(world, of):
    check(prove_cases(cover(legal(world), of), clean_environ(), quiet))
