"""`Trial`: the training steps of a case's layout, on its ranks, with the engine under test."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from meshwright.comm.groups import Groups
from meshwright.comm.world import World
from meshwright.parallel.data_parallel.gradients import GatheredParameter
from meshwright.parallel.data_parallel.int8_states import values_of
from meshwright.parallel.data_parallel.optimize import Shards
from meshwright.prove.batches import evaluated, make_batch
from meshwright.prove.case import Case
from meshwright.prove.compare import Difference, Fault, build_small, mine, program_of
from meshwright.prove.optimizer import comparable
from meshwright.prove.reference import Reference
from meshwright.spec.learning_rate import learning_rate
from meshwright.training.optimizer import build_optimizer, set_learning_rate
from meshwright.training.update import LossScale, evaluate, update


class StepNumbers(NamedTuple):
    """The mean loss over a step's global batch, in nats, and the gradient norm before clipping."""

    loss: float
    norm: float


class Trial:
    """This rank's parallel model and optimizer of a case, and the steps that they take.

    All methods that compute or compare are collectives. `reference` gives the optimizer's settings
    and the clipping. Tests use `fault` to break the model.
    """

    def __init__(
        self,
        case: Case,
        groups: Groups,
        world: World,
        reference: Reference,
        fault: Fault | None = None,
    ) -> None:
        self._case, self._world, self._reference = case, world, reference
        self._program = program_of(case, world)
        self.parallel = build_small(self._program, groups, world, fault)
        self._shards = Shards(self.parallel.trained, on_host=case.layout.offload == "optimizer")
        self._optimizer = build_optimizer(
            self._shards.leaves,
            self._shards.parts,
            reference.optimizer,
            self._shards.matrices(groups, world.device, case.layout),
        )
        self._scale = LossScale(case.loss_scale)
        self._starts = [param.shard.clone() for param in self.parallel.trained]
        frozen = [param for param in self.parallel.held if not param.sharding.part.trained]
        self._frozen = [(param, param.shard.clone()) for param in frozen]

    def step(self, step: int, look: Callable[[], None] = lambda: None) -> StepNumbers:
        """Take training step number `step`, from 0; `look` is called after the backward and before
        the update.
        """
        rate = learning_rate(step + 1, self._case.steps, self._reference.optimizer)
        set_learning_rate(self._optimizer, rate)
        rows = mine(make_batch(self._case, step), self._program, self._world)
        done = update(
            self.parallel,
            rows,
            self._world,
            self._shards,
            self._optimizer,
            self._scale,
            self._reference.clip_norm,
            lambda updated: look(),
        )
        return StepNumbers(self._world.sum_on_host([done.loss.item()])[0], done.norm.item())

    def evaluation(self) -> float:
        """Return the mean loss of the present weights on the evaluation batches, as `train`
        computes it.
        """
        batches = [mine(batch, self._program, self._world) for batch in evaluated(self._case)]
        return evaluate(self.parallel, batches, self._world)

    def gradient(self, param: GatheredParameter) -> Tensor | None:
        """Return a parameter's gradient without the loss scale, sharded like the parameter; None if
        there is none.
        """
        stored, scaled = param.parameter.grad, param.gradient
        if stored is None or scaled is None:
            return None
        return _like(stored, scaled / self._case.loss_scale)

    @torch.no_grad()
    def added(self, param: GatheredParameter) -> Tensor:
        """Return a parameter's present minus initial values, fp32, sharded like the parameter."""
        start = self._starts[self._place(param)]
        return _like(param.parameter, param.shard.float() - start.float())

    def state(self, key: str) -> Callable[[GatheredParameter], Tensor | None]:
        """Return a function that returns a parameter's optimizer state of this key, such as
        "exp_avg"; None for a parameter without it.

        The state is converted by `optimizer.comparable`.
        """

        def of(param: GatheredParameter) -> Tensor | None:
            leaf = self._shards.leaves[self._place(param)]
            value = values_of(self._optimizer.state[leaf], key)
            return None if value is None else _like(param.parameter, comparable(key, value))

        return of

    def miscorrected(self, exact: Mapping[str, Tensor]) -> list[Difference]:
        """Return this rank's router corrections that differ from the reference's in any bit."""
        wrong = []
        for stage, module in self.parallel.modules.items():
            for name, buffer in module.named_buffers():
                error = (buffer.cpu() - exact[name]).abs().max().item()
                if error != 0:
                    wrong.append(Difference(error, 1e-300, name, self._world.rank, stage))
        return wrong

    def thawed(self) -> list[str]:
        """Return the names of this rank's frozen parameters that have a gradient or changed in any
        bit.
        """
        return [
            param.name
            for param, start in self._frozen
            if param.gradient is not None or not torch.equal(param.shard, start)
        ]

    def _place(self, param: GatheredParameter) -> int:
        return next(place for place, other in enumerate(self._shards.held) if other is param)


def _like(parameter: Tensor, local: Tensor) -> Tensor:
    """Return a local shard as a DTensor with the placements of a parameter; unchanged if the
    parameter is a plain tensor.

    Callers compute with local tensors: for each operation on DTensors, torch searches for
    placements anew on each mesh, which takes a tenth of a second on three axes.
    """
    if not isinstance(parameter, DTensor):
        return local
    return DTensor.from_local(
        local.to(parameter.device),
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
