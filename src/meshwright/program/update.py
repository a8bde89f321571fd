"""What the update of whole matrices sends and computes, and the workspace of any update."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Final, NamedTuple

from meshwright.program.lower import Program
from meshwright.program.messages import Collective
from meshwright.program.optimizer import workspace_bytes
from meshwright.program.shards import Sharding, data_rank
from meshwright.spec.optimizers import DTYPE_BYTES, UpdateRule, rows_of_piece

_ROWS: Final = "update: whole matrices of the rows that ZeRO gives each rank"
_PARTS: Final = "update: whole matrices of the parts that tp gives each rank"


class MatrixUpdate(NamedTuple):
    """A parameter whose update needs whole matrices, of which this rank has `matrices` (several for
    experts)."""

    rule: UpdateRule
    sharding: Sharding
    matrices: int

    @property
    def sides(self) -> tuple[int, int]:
        """Rows and columns of one matrix."""
        return self.sharding.part.shape[-2], self.sharding.part.shape[-1]

    def workspace(self, element: int, of_pieces: int) -> int:
        """Return the bytes of orthogonalization: twice the matrix and twice its Gram matrix.

        An iteration of Newton-Schulz computes a new matrix from the last one, its Gram matrix and a
        polynomial of that. The rank's shard is updated with the last matrix in `of_pieces` more.
        """
        rows, columns = self.sides
        matrix = self.matrices * rows * columns
        orthogonalized = 2 * (matrix + self.matrices * min(rows, columns) ** 2)
        return max(orthogonalized * element, matrix * element + of_pieces)


def whole_matrices(program: Program, coordinates: Mapping[str, int]) -> Iterator[MatrixUpdate]:
    """Yield the parameters that a rank updates by whole matrices, in the order of the update."""
    place = data_rank(program.layout, coordinates)
    for stage in program.held(coordinates["pp"]):
        for name in program.parameters(stage):
            sharding = program.shardings[name]
            if not sharding.part.trained or not program.update_rule(name).needs_matrix:
                continue
            count = (
                sharding.shape(coordinates["tp"], place)[0] if sharding.part.is_of_experts else 1
            )
            yield MatrixUpdate(program.update_rule(name), sharding, count)


def matrix_gathers(program: Program, coordinates: Mapping[str, int]) -> Iterator[Collective]:
    """Yield the all-gathers of whole matrices for an update that needs them, once per step.

    First the rows are gathered over data ranks, then the tp shards over tp. Of experts, a data rank
    has whole matrices.
    """
    element = DTYPE_BYTES[program.optimizer.ns_precision]
    for matrix in whole_matrices(program, coordinates):
        sharding = matrix.sharding
        if sharding.cuts_rows_of_matrix:
            size = sharding.padded_elements * element
            yield Collective("all_gather", "shard", size, 1, "step", "update", _ROWS)
        if sharding.tp_dim is not None:
            of_experts = sharding.part.is_of_experts
            rows = matrix.matrices if of_experts else sharding.tp_shape[0]
            size = rows * math.prod(sharding.tp_shape[1:]) * sharding.tp * element
            if size:
                yield Collective("all_gather", "tp", size, 1, "step", "update", _PARTS)


def update_flops(program: Program, coordinates: Mapping[str, int]) -> float:
    """Return the FLOPs of a rank's matmuls in the update."""
    return sum(
        matrix.matrices * matrix.rule.flops(program.optimizer, *matrix.sides)
        for matrix in whole_matrices(program, coordinates)
    )


def update_workspace(program: Program, coordinates: Mapping[str, int]) -> int:
    """Return the most bytes that the update of a parameter allocates besides shards and states.

    With offload, updates of shards run on the host and do not count.
    """
    element = DTYPE_BYTES[program.optimizer.ns_precision]
    is_here = not program.layout.states_on_host
    of_matrices = (
        matrix.workspace(element, _of_pieces(program, matrix.sharding, coordinates) * is_here)
        for matrix in whole_matrices(program, coordinates)
    )
    of_shards = _shard_workspaces(program, coordinates) if is_here else ()
    return max(chain(of_matrices, of_shards), default=0)


def _shard_workspaces(program: Program, coordinates: Mapping[str, int]) -> Iterator[int]:
    """Yield the workspace of each parameter's update on its shard, in bytes."""
    for stage in program.held(coordinates["pp"]):
        for name in program.parameters(stage):
            sharding = program.shardings[name]
            if sharding.part.trained and not program.update_rule(name).needs_matrix:
                yield _of_pieces(program, sharding, coordinates)


def _of_pieces(program: Program, sharding: Sharding, coordinates: Mapping[str, int]) -> int:
    """Return the bytes that updating a piece of a parameter's shard takes."""
    place = data_rank(program.layout, coordinates)
    rows, *row_shape = sharding.shape(coordinates["tp"], place)
    row = math.prod(row_shape)
    rule = program.update_rule(sharding.part.name)
    elements = min(rows, rows_of_piece(row)) * row
    return elements * workspace_bytes(rule, program.optimizer, program.train)
