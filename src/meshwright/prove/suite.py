"""`Suite`: proves many cases on one set of ranks, and caches the references that they share."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import torch

from meshwright.comm.groups import open_groups
from meshwright.comm.world import World
from meshwright.layout import Layout
from meshwright.program.lower import lower
from meshwright.prove.case import Case
from meshwright.prove.conformance import prove_conformance
from meshwright.prove.order import prove_order
from meshwright.prove.parity import prove_parity
from meshwright.prove.reference import Reference, shared_reference, tells_apart
from meshwright.prove.verdict import Verdict

# Scores of experts that differ by less may change places: rounding was seen to move them by 7e-6.
_NEAR: Final = 5e-5
# How many seeds are tried; about one in ten has such scores.
_SEEDS: Final = 8
# References that are kept: they take some 30 MB on each rank, and few layouts of a table share one.
_KEPT: Final = 6


def _in_full(case: Case, device: torch.device) -> Case:
    """Return the case with matmuls in full fp32 on GPUs, because TF32 would hide small faults."""
    if device.type == "cpu":
        return case
    return replace(case, train=case.train.model_copy(update={"matmul": "torch"}))


class Suite:
    """Proves cases one after the other, on this rank; all ranks call it with the same cases.

    `timeout_s` limits each collective. Cases with the same model and batch share a reference.
    """

    def __init__(self, world: World, timeout_s: float = 600.0) -> None:
        self._world, self._timeout_s = world, timeout_s
        self._references: dict[Case, Reference] = {}
        self._seeds: dict[Case, int] = {}

    def prove(self, case: Case) -> tuple[Verdict, ...]:
        """Prove a case and return all its verdicts; a collective, every rank returns the same."""
        verdicts: tuple[Verdict, ...] = ()
        if case.layout.is_pipelined:
            order = prove_order(lower(case.model, case.train, case.optimizer, case.layout))
            if not order.passed:  # it would hang
                return (order,)
            verdicts = (order,)
        world, case = self._world, self._told_apart(_in_full(case, self._world.device))
        groups = open_groups(case.layout, world, self._timeout_s)
        verdicts += prove_parity(case, groups, world, self._reference)
        return verdicts + prove_conformance(case, groups, world)

    def _told_apart(self, case: Case) -> Case:
        """Return the case with the first seed for which no router scores in fp32 are so close that
        rounding could swap experts.

        Both experts would be right for the token; but the choice changes the model's output by far
        more than rounding.
        """
        if case.model.experts == case.model.top_k:
            return case
        key = _alone(case.in_fp32)
        if key not in self._seeds:
            first, seed = case.train.seed, 0
            if self._world.rank == 0:
                seeds = range(first, first + _SEEDS)
                apart = (seed for seed in seeds if tells_apart(key.from_seed(seed), _NEAR))
                seed = next(apart, seeds[-1])
            self._seeds[key] = int(self._world.sum_on_host([seed])[0])
        return case.from_seed(self._seeds[key])

    def _reference(self, case: Case) -> Reference:
        """Return the case's reference, cached if a recent case had the same."""
        key = _alone(case)
        reference = self._references.pop(key, None) or shared_reference(case, self._world)
        self._references[key] = reference  # the last in order: used last
        if len(self._references) > _KEPT:
            del self._references[next(iter(self._references))]
        return reference


def _alone(case: Case) -> Case:
    """Return the case reduced to what determines one device's results, as a cache key: of the
    layout, only the microbatch, and only in half precision.
    """
    is_fp32 = case.train.precision == "fp32"
    layout = Layout(microbatch=1 if is_fp32 else case.layout.microbatch)
    return replace(case, layout=layout, refused=None, fsdp2=False)
