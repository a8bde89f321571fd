"""`Suite`: cases proven one after the other on one set of ranks, which share what they can."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar, cast

import torch.distributed as dist

from meshwright.execute.groups import open_groups
from meshwright.execute.world import World
from meshwright.layout import Layout
from meshwright.program.lower import lower
from meshwright.prove.case import Case
from meshwright.prove.census import prove_census
from meshwright.prove.order import prove_order
from meshwright.prove.parity import prove_adam, prove_parity
from meshwright.prove.reference import make_batch, run_adam, run_reference
from meshwright.prove.verdict import Verdict

T = TypeVar("T")


class Suite:
    """A rank's side of the proof of many cases.

    What one device computes is computed once, on rank 0, for all cases of one model and batch.
    """

    def __init__(self, world: World, timeout_s: float = 600.0) -> None:
        self._world, self._timeout_s = world, timeout_s
        self._references: dict[object, Any] = {}

    def prove(self, case: Case) -> tuple[Verdict, ...]:
        """Return all verdicts on a case; a collective, every rank returns the same."""
        verdicts: tuple[Verdict, ...] = ()
        if case.layout.is_pipelined:
            order = prove_order(lower(case.model, case.train, case.layout))
            if not order.passed:  # it would hang
                return (order,)
            verdicts = (order,)
        world = self._world
        groups = open_groups(case.layout, world, self._timeout_s)
        reference = self._shared(case, run_reference, case.steps)
        verdicts += prove_parity(case, groups, world, reference)
        if case.adam_steps:
            weights = self._shared(case, run_adam, case.adam_steps)
            verdicts += (prove_adam(case, groups, world, weights),)
        return verdicts + prove_census(case, groups, world)

    def _shared(self, case: Case, compute: Callable[[Case, list[Any]], T], steps: int) -> T:
        """Return what one device computes, from rank 0."""
        # All but the layout: that of the case does not matter to one device.
        key = (replace(case, layout=Layout(), refused=None), compute)
        if key not in self._references:
            found: list[T | None] = [None]
            if self._world.rank == 0:
                found[0] = compute(case, [make_batch(case, step) for step in range(steps)])
            if self._world.size > 1:
                dist.broadcast_object_list(found)
            self._references[key] = found[0]
        return cast(T, self._references[key])
