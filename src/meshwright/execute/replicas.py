"""Data parallelism without FSDP2: replicas and mixed precision anywhere, ZeRO on CPUs.

Each unit's gradients are summed as soon as the last of them is there, beside the backward of the
blocks before it (arXiv:2006.15704, section 3.2.3): where they are, or under ZeRO by an exchange of
rows, after which a rank has the sums of its own. ZeRO-3 has a block's weights while it computes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn

from meshwright.execute.exchange import Exchange, gather
from meshwright.execute.flight_recorder import Pending
from meshwright.execute.groups import Groups, Link
from meshwright.execute.masters import Weight, take_over
from meshwright.execute.shared import Left
from meshwright.program.shards import unit_of


class Unit:
    """Weights that are gathered and summed together.

    `is_current` says that products have what the masters are, or will when it has arrived. `left`
    is how many gradients the backward has not brought yet. `has_met` says that the sums of this
    rank's rows are on their way to those of its replicas. One that `reshards` is freed when nothing
    computes with it.
    """

    def __init__(self, weights: Sequence[Weight], *, reshards: bool) -> None:
        self.weights, self.left, self.reshards = weights, len(weights), reshards
        self.is_current, self.has_met = False, False
        self.arriving: Sequence[Pending | Left] = ()

    def arrive(self) -> None:
        """Wait until it has been gathered."""
        for work in self.arriving:
            work.wait()
        self.arriving = ()

    def drop(self) -> None:
        """Let go of what has been gathered, where it does not stay for the step."""
        if self.reshards and self.is_current:
            self.expire()

    def expire(self) -> None:
        """Take note that weights may have changed."""
        self.arrive()
        self.is_current = False
        for weight in self.weights:
            if weight.reshards:
                weight.reshard()


class Replicas:
    """Sums the gradients of a model over data, unit by unit, and gathers what ZeRO has updated.

    `weights` are by name. Gradients are summed along `link`: with the ranks that share rows under
    ZeRO, and then with those that have the same rows, `replicas`; else with these alone. None where
    nobody is to be told.
    """

    def __init__(
        self,
        model: nn.Module,
        groups: Groups,
        rank: int,
        zero: int,
        dtypes: tuple[torch.dtype, torch.dtype],
    ) -> None:
        """Take over the parameters of a model, in fp32.

        `rank` is this one's place among those that share rows. `dtypes` are those of products and
        of sums.
        """
        mesh, self._recorder = groups.parameters, groups.recorder
        used, self._summed = dtypes
        self._shards = groups.shard
        self.replicas: Link | None = groups.replicate
        self._rank, self._zero = rank, zero if groups.shard.size > 1 else 0
        self.link: Link | None = self._shards if self._zero else self.replicas
        self._due = self._is_last = False
        # The last exchange: of which unit, and whether it completes its sums.
        self._leaving: tuple[Exchange, Unit, bool] | None = None
        self._works: list[tuple[Pending, list[Tensor]]] = []
        reshards = self._zero == 3
        self.weights = take_over(model, used, mesh["shard", "tp"], rank, reshards=reshards)
        found: dict[str, list[Weight]] = {}
        for name, weight in self.weights.items():
            found.setdefault(unit_of(name, in_place=True), []).append(weight)
        # What is in no block stays for a step.
        self.units = [
            Unit(weights, reshards=reshards and name.startswith("layers."))
            for name, weights in found.items()
        ]
        # The module that a unit is needed by first.
        first = {"embed": "", "rest": "norm"}
        for index, (name, unit) in enumerate(zip(found, self.units, strict=True)):
            if self._zero or used != torch.float32:
                module = model.get_submodule(first.get(name, name))
                leave = partial(self._leave, index) if unit.reshards else None
                around_forward(module, partial(self._need, index), leave)
            for place, weight in enumerate(unit.weights):
                hook = self._hook(index, place)
                weight.used.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]

    def _hook(self, index: int, place: int) -> Callable[[Tensor], None]:
        """Return what a weight of a unit calls when its gradient has come.

        It keeps no weight alive: where torch holds it, Python's collector sees no circle.
        """
        this = ref(self)

        def hook(parameter: Tensor) -> None:
            replicas = this()
            if replicas is not None:
                unit = replicas.units[index]
                replicas._ready(unit, unit.weights[place], parameter)

        return hook

    def _need(self, index: int) -> None:
        """Have a unit as it is now, and the one after it on its way."""
        if index + 1 == len(self.units):
            self._settle()  # before there are logits
        for unit in self.units[index : index + 2]:
            self._gather(unit)
        self.units[index].arrive()

    def _leave(self, index: int, out: Tensor) -> None:
        """Drop a unit after its forward; its backward is to have it again."""
        self.units[index].drop()
        if out.requires_grad:
            out.register_hook(lambda _: self._need_again(index))  # type: ignore[no-untyped-call]

    def _need_again(self, index: int) -> None:
        """Have a unit for its backward and the one before it on its way, and drop the one after."""
        units = self.units
        if index + 1 < len(units):
            units[index + 1].drop()
        self._gather(units[index])
        if index and units[index - 1].reshards:
            self._gather(units[index - 1])
        units[index].arrive()

    def end(self) -> None:
        """Take note that a backward is over."""
        for unit in self.units:
            unit.drop()

    @torch.no_grad()
    def _gather(self, unit: Unit) -> None:
        """Begin to bring what products use up to date, where weights may have changed."""
        if unit.is_current:
            return
        unit.is_current = True
        for weight in unit.weights:
            weight.make_room()
            weight.round()
        if self._zero:
            unit.arriving = gather(unit.weights, self._shards, self._rank, self._recorder)

    def expire(self) -> None:
        """Take note that weights may have changed."""
        for unit in self.units:
            unit.expire()

    def look_ahead(self) -> None:
        """Begin to gather what a backward needs first."""
        blocks = [unit for unit in self.units if unit.reshards]
        if blocks:
            self._gather(blocks[-1])

    def begin(self, *, is_last: bool, defers: bool) -> None:
        """Take note of the backward to come: the last one before the update, or one of two halves.

        ZeRO-2 sums the gradients of each, all others those of the last one alone.
        """
        self._is_last = is_last and not defers
        self._due = (is_last or self._zero >= 2) and not defers
        if self._due:
            for unit in self.units:
                unit.left = len(unit.weights)

    def _ready(self, unit: Unit, weight: Weight, parameter: Tensor) -> None:
        """Take note that a gradient has come, and sum those of its unit when it is the last."""
        if not (self._due and self._zero) or weight.is_summing:  # else it is sent as it is
            weight.widen(self._summed)
        if not self._due:
            return
        unit.left -= 1
        if unit.left == 0:
            self._sum(unit)

    def take(self) -> None:
        """Take in gradients that were computed outside of autograd, and sum them where due."""
        for weight in self.weights.values():
            weight.widen(self._summed)
        if self._due:
            for unit in reversed(self.units):
                self._sum(unit)

    @torch.no_grad()
    def _sum(self, unit: Unit) -> None:
        unit.left = 0
        weights = [weight for weight in unit.weights if weight.gradient is not None]
        if not weights:
            return
        if self._zero:
            self._settle()
            sent = Exchange(weights, self.link, self._rank, self._summed, self._recorder)
            self._leaving = (sent, unit, self._is_last)
        else:
            self._meet(self.link, [w.gradient for w in weights if w.gradient is not None])

    @torch.no_grad()
    def _settle(self) -> None:
        """Add up what the last exchange has brought."""
        if self._leaving is None:
            return
        exchange, unit, is_complete = self._leaving
        self._leaving = None
        exchange.settle()
        if is_complete:
            self._meet_again(unit)

    def _meet_again(self, unit: Unit) -> None:
        """Sum this rank's rows over replicas of it."""
        unit.has_met = True
        sums = [weight.shard_gradient for weight in unit.weights]
        self._meet(self.replicas, [rows for rows in sums if rows is not None and rows.numel()])

    def _meet(self, link: Link | None, gradients: list[Tensor]) -> None:
        """Sum gradients where they are, with those of other ranks if there are any."""
        if link is None or link.group is None or not gradients:
            return
        work = link.group.allreduce_coalesced(gradients)
        self._works.append((Pending(self._recorder, work), gradients))

    def finish(self) -> None:
        """Sum what no hook has told of, wait, and leave the gradients with the masters.

        Every replica calls it once for each update, after its last backward.
        """
        for unit in self.units:
            if unit.left:
                self._sum(unit)
        self._settle()
        for unit in self.units:
            if self._zero and not unit.has_met:
                self._meet_again(unit)
        for work, _ in self._works:
            work.wait()
        self._works = []
        for unit in self.units:
            unit.left, unit.has_met = len(unit.weights), False
            for weight in unit.weights:
                weight.hand_on()
        self.expire()


def around_forward(
    module: nn.Module, before: Callable[[], None], after: Callable[[Tensor], None] | None
) -> None:
    """Have something done before and after a module's forwards, outside of what is compiled."""
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
