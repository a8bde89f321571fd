"""Plain tensors that are shards, put together along the axis that cuts them, or not at all."""

import torch

from meshwright.prove.trainers.gather import MeshAxis, assembled
from meshwright.prove.trainers.observed import GatheredTensor, RankCopy

DATA = MeshAxis("dp", ((0, 2), (1, 3)))
TENSOR = MeshAxis("tp", ((0, 1), (2, 3)))
WHOLE = torch.arange(8.0).view(4, 2)


def shards():
    """A weight that ranks 0 and 2 have the first half of, and ranks 1 and 3 the second."""
    copies = (RankCopy((0, 2), WHOLE[:2]), RankCopy((1, 3), WHOLE[2:]))
    return GatheredTensor(copies, ())


def test_shards_are_put_together_along_the_axis_that_cuts_them():
    gathered = assembled(shards(), WHOLE.shape, [DATA, TENSOR])
    assert gathered.sharded_over == ("tp",)
    assert all(torch.equal(copy.value, WHOLE) for copy in gathered.copies)


def test_an_axis_of_data_parallelism_cuts_no_plain_tensor():
    """Where the axis is not known, as of an engine's own groups, nothing is accused."""
    assert assembled(shards(), WHOLE.shape, [DATA]) is None
