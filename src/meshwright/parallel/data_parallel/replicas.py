"""Data parallelism without FSDP2: replicas and mixed precision anywhere, ZeRO on CPUs.

Each unit's gradients are reduced as soon as the last of them exists, overlapping with the backward
of earlier blocks (arXiv:2006.15704, section 3.2.3): in place, or under ZeRO by an exchange of rows,
after which a rank has the sums of its own rows. ZeRO-3 holds a block's weights only while it
computes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from meshwright.comm.flight_recorder import Pending
from meshwright.comm.groups import Groups, Link
from meshwright.parallel.data_parallel.exchange import Exchange, gather
from meshwright.parallel.data_parallel.master_weights import Weight, take_over
from meshwright.program.shards import EXPERTS, unit_of


@dataclass(frozen=True)
class Peers:
    """The ranks over which a set of weights is sharded or replicated.

    `mesh` has the axes `shard` and `tp`; `rank` is this rank's index in `shards`. Gradients are
    summed along `sums`: with ZeRO sharding that is `shards`, followed by a sum over `replicas`, the
    ranks with the same rows; otherwise `replicas` alone.
    """

    mesh: DeviceMesh
    shards: Link
    rank: int
    sums: Link | None
    replicas: Link | None

    @classmethod
    def of(cls, parameters: DeviceMesh, shards: Link, replicas: Link, rank: int) -> Peers:
        """Return the peers along two links; `rank` is this rank's index in `shards`."""
        sums = shards if shards.size > 1 else replicas
        return cls(parameters["shard", "tp"], shards, rank, sums, replicas)

    @property
    def cuts(self) -> bool:
        """Whether ZeRO shards the weights' rows over these ranks."""
        return self.shards.size > 1


class Unit:
    """Weights that are gathered and reduced together, like an FSDP unit.

    `is_current`: matmuls use the masters' values, or will once the open gather is done. `left` is
    the number of gradients that the backward still has to compute. `has_met`: the sums of this
    rank's rows have been sent to its replicas. If `reshards` (ZeRO-3), gathered weights are freed
    when nothing computes with them.
    """

    def __init__(self, weights: Sequence[Weight], peers: Peers, *, reshards: bool) -> None:
        self.weights, self.peers = weights, peers
        self.trained = [weight for weight in weights if weight.is_trained]
        self.left = len(self.trained)
        self.reshards = reshards and peers.cuts
        self.is_current, self.has_met = False, False
        self.arriving: Sequence[Pending] = ()

    def arrive(self) -> None:
        """Wait for the open gather of this unit."""
        for work in self.arriving:
            work.wait()
        self.arriving = ()

    def drop(self) -> None:
        """Free the gathered weights, unless they stay until the end of the step."""
        if self.reshards and self.is_current:
            self.expire()

    def expire(self) -> None:
        """Mark the gathered weights as outdated, and free them under ZeRO-3."""
        self.arrive()
        self.is_current = False
        for weight in self.weights:
            if weight.reshards:
                weight.reshard()


class Replicas:
    """Reduces a model's gradients over data, unit by unit, and gathers updated weights.

    `weights` are by name, `units` in forward order.
    """

    def __init__(
        self,
        model: nn.Module,
        groups: Groups,
        rank: int,
        zero: int,
        dtypes: tuple[torch.dtype, torch.dtype, torch.dtype],
    ) -> None:
        """Take over the parameters of a model, in the dtype in which they are trained.

        `rank` is this one's place among the layout's `alike_ranks`; `dtypes` are those of
        products, of sums, and of the gradients that the optimizer reads.
        """
        self._recorder = groups.recorder
        used, self._summed, gradient_dtype = dtypes
        self._zero = zero if groups.shard.size > 1 else 0
        self._due = self._is_last = False
        # The last exchange: of which unit, and whether it completes its sums.
        self._leaving: tuple[Exchange, Unit, bool] | None = None
        self._works: list[tuple[Pending, list[Tensor]]] = []
        plain, of_experts = _peers(groups, rank)

        def peers(name: str) -> Peers:
            return of_experts if EXPERTS in name else plain

        def make(name: str, parameter: nn.Parameter) -> Weight:
            mesh, rank, cuts = peers(name).mesh, peers(name).rank, peers(name).cuts
            cut = parameter.requires_grad or self._zero == 3  # see `shards.cuts_frozen`
            dtype = used if parameter.is_floating_point() else parameter.dtype  # in four bits
            reshards = self._zero == 3 and cuts
            return Weight(parameter, dtype, gradient_dtype, mesh, rank, reshards=reshards, cut=cut)

        self.weights = take_over(model, make)
        ep = 1 if groups.experts is None else groups.experts.ep.size
        by_unit: dict[str, list[Weight]] = {}
        for name, weight in self.weights.items():
            by_unit.setdefault(unit_of(name, ep=ep), []).append(weight)
        # What is in no block stays for a step.
        self.units = [
            Unit(weights, peers(name), reshards=self._zero == 3 and name.startswith("layers."))
            for name, weights in by_unit.items()
        ]
        # What is needed together: the units of a block, and each other one.
        turns: dict[str, list[Unit]] = {}
        for name, unit in zip(by_unit, self.units, strict=True):
            turns.setdefault(name.removesuffix(EXPERTS), []).append(unit)
            for position, weight in enumerate(unit.trained):
                hook = self._hook(unit, position)
                weight.used.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
        self._turns = list(turns.values())
        if not self._zero and not any(weight.is_copy for weight in self.weights.values()):
            return
        # The module that a turn is needed by first.
        first = {"embed": "", "rest": "norm"}
        for index, name in enumerate(turns):
            module = model.get_submodule(first.get(name, name))
            is_block = name.startswith("layers.")
            leave = partial(self._leave, index) if self._zero == 3 and is_block else None
            around_forward(module, partial(self._need, index), leave)

    def _hook(self, unit: Unit, position: int) -> Callable[[Tensor], None]:
        """Return the hook that reports a weight's gradient as complete to its unit.

        The hook references no weight: torch holds it where Python's garbage collector could not see
        a reference cycle.
        """
        replicas_ref, unit_ref = ref(self), ref(unit)

        def hook(parameter: Tensor) -> None:
            replicas, unit = replicas_ref(), unit_ref()
            if replicas is not None and unit is not None:
                replicas._ready(unit, unit.trained[position], parameter)

        return hook

    def _need(self, index: int) -> None:
        """Wait until a block's units are gathered, and start to gather the next block's."""
        turns = self._turns
        if index + 1 == len(turns):
            self._settle()  # before there are logits
        for unit in chain(*turns[index : index + 2]):
            self._gather(unit)
        for unit in turns[index]:
            unit.arrive()

    def _leave(self, index: int, out: Tensor) -> None:
        """Free a block's gathered weights after its forward; its backward gathers them again."""
        for unit in self._turns[index]:
            unit.drop()
        if out.requires_grad:
            out.register_hook(lambda _: self._need_again(index))  # type: ignore[no-untyped-call]

    def _need_again(self, index: int) -> None:
        """Gather a block's units for its backward, prefetch the block before, free the
        block after.
        """
        turns = self._turns
        if index + 1 < len(turns):
            for unit in turns[index + 1]:
                unit.drop()
        before = turns[index - 1] if index else []
        for unit in (*turns[index], *before):
            if unit.reshards:
                self._gather(unit)
        for unit in turns[index]:
            unit.arrive()

    def end(self) -> None:
        """Free the gathered weights after a backward, under ZeRO-3."""
        for unit in self.units:
            unit.drop()

    @torch.no_grad()
    def _gather(self, unit: Unit) -> None:
        """Start to update the compute weights of a unit from the masters, unless they are
        current.
        """
        if unit.is_current:
            return
        unit.is_current = True
        for weight in unit.weights:
            weight.allocate_storage()
            weight.round()
        peers = unit.peers
        if peers.cuts:
            cut = [weight for weight in unit.weights if weight.is_cut]
            if cut:
                unit.arriving = gather(cut, peers.shards, peers.rank, self._recorder)

    def expire(self) -> None:
        """Mark all gathered weights as outdated, since an update may have changed the masters."""
        for unit in self.units:
            unit.expire()

    def look_ahead(self) -> None:
        """Start to gather the weights of the last block, which a backward needs first."""
        blocks = [turn for turn in self._turns if any(unit.reshards for unit in turn)]
        for unit in blocks[-1] if blocks else ():
            self._gather(unit)

    def begin(self, *, is_last: bool, defers: bool) -> None:
        """Prepare the next backward.

        `is_last`: the last backward before the update. `defers`: weight gradients follow
        separately, so nothing is reduced yet. ZeRO-2 and 3 reduce the gradients of each backward,
        other stages only those of the last.
        """
        self._is_last = is_last and not defers
        self._due = (is_last or self._zero >= 2) and not defers
        for unit in self.units:
            if self._is_due(unit):
                unit.left = len(unit.trained)

    def _is_due(self, unit: Unit) -> bool:
        """Whether the current backward reduces a unit's gradients."""
        return self._due if unit.peers.cuts else self._is_last

    def _ready(self, unit: Unit, weight: Weight, parameter: Tensor) -> None:
        """Count a complete gradient; after the last one of its unit, reduce the unit."""
        is_due = self._is_due(unit)
        if not (is_due and unit.peers.cuts) or weight.is_summing:  # else it is sent as it is
            weight.widen(self._summed)
        if not is_due:
            return
        unit.left -= 1
        if unit.left == 0:
            self._sum(unit)

    def take(self) -> None:
        """Accumulate gradients that were computed outside of autograd, and reduce units if due."""
        for weight in self.weights.values():
            weight.widen(self._summed)
        for unit in reversed(self.units):
            if self._is_due(unit):
                self._sum(unit)

    @torch.no_grad()
    def _sum(self, unit: Unit) -> None:
        unit.left = 0
        weights = [weight for weight in unit.weights if weight.gradient is not None]
        if not weights:
            return
        peers = unit.peers
        if peers.cuts:
            self._settle()
            sent = Exchange(weights, peers.sums, peers.rank, self._summed, self._recorder)
            self._leaving = (sent, unit, self._is_last)
        else:
            self._meet(peers.sums, [w.gradient for w in weights if w.gradient is not None])

    @torch.no_grad()
    def _settle(self) -> None:
        """Wait for the last exchange and add up the rows that it received."""
        if self._leaving is None:
            return
        exchange, unit, is_complete = self._leaving
        self._leaving = None
        exchange.settle()
        if is_complete:
            self._meet_again(unit)

    def _meet_again(self, unit: Unit) -> None:
        """All-reduce this rank's rows of a unit's gradients over its replicas."""
        unit.has_met = True
        shard_gradients = [weight.shard_gradient for weight in unit.weights]
        non_empty = [rows for rows in shard_gradients if rows is not None and rows.numel()]
        self._meet(unit.peers.replicas, non_empty)

    def _meet(self, link: Link | None, gradients: list[Tensor]) -> None:
        """Start an in-place all-reduce of gradients over a link, if it has other ranks."""
        if link is None or link.group is None or not gradients:
            return
        work = link.group.allreduce_coalesced(gradients)
        self._works.append((Pending(self._recorder, work), gradients))

    def finish(self) -> None:
        """Reduce remaining gradients, wait, and move all gradients to the masters.

        Every replica calls it once per update, after its last backward.
        """
        for unit in self.units:
            if unit.left:
                self._sum(unit)
        self._settle()
        for unit in self.units:
            if unit.peers.cuts and not unit.has_met:
                self._meet_again(unit)
        for work, _ in self._works:
            work.wait()
        self._works = []
        for unit in self.units:
            unit.left, unit.has_met = len(unit.trained), False
            for weight in unit.trained:
                weight.hand_on()
        self.expire()


def _peers(groups: Groups, rank: int) -> tuple[Peers, Peers]:
    """Return the peers of this rank for weights that all ranks have, and those for experts."""
    shard_rank = rank % groups.shard.size
    plain = Peers.of(groups.parameters, groups.shard, groups.replicate, shard_rank)
    experts = groups.experts
    if experts is None:
        return plain, plain
    return plain, Peers.of(experts.parameters, experts.shard, experts.replicate, experts.shard.rank)


def around_forward(
    module: nn.Module, before: Callable[[], None], after: Callable[[Tensor], None] | None
) -> None:
    """Call functions before and after each forward of a module, outside of compiled code.

    `after` gets the output; None: nothing is called.
    """
    compiled: Any = module._compiled_call_impl
    if compiled is None:
        module.register_forward_pre_hook(lambda *_: before())
        if after is not None:
            module.register_forward_hook(lambda _, args, out: after(out))
        return

    def call(*args: Any, **kwargs: Any) -> Any:
        before()
        out = compiled(*args, **kwargs)
        if after is not None:
            after(out)
        return out

    module._compiled_call_impl = call
