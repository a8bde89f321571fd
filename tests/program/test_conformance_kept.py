"""Conformance of memory: what a program says that operations keep, against what autograd keeps."""

import gc

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from conformance_cases import CASES, labelled
from meshwright.comm.gloo_threads import wait_for_gloo_threads
from meshwright.comm.groups import open_groups
from meshwright.parallel.build import build, seeded
from meshwright.parallel.data_parallel.gradients import local_shard
from meshwright.program.operations import operations
from meshwright.prove.batches import make_batch
from meshwright.prove.compare import mine, program_of
from ranks import on_ranks

KEPT = [case for case in CASES if case.layout.world <= 4]


class Made(TorchDispatchMode):
    """Notes the storages that operations make, and which of them are still there."""

    def __init__(self):
        super().__init__()
        self.found, self.given = {}, set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        for x in tensors((args, kwargs)):
            if x.untyped_storage()._cdata not in self.found:
                self.given.add(x.untyped_storage()._cdata)
        out = func(*args, **(kwargs or {}))
        for x in tensors(out):
            storage = x.untyped_storage()
            if storage._cdata not in self.given:
                self.found[storage._cdata] = StorageWeakRef(storage)
        return out

    def sizes(self):
        """Bytes of those that are still there; gathered weights may be empty by now."""
        left = {
            key: torch.UntypedStorage._new_with_weak_ptr(r.cdata) for key, r in self.found.items()
        }
        return {key: storage.nbytes() for key, storage in left.items() if storage is not None}


def tensors(values):
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]


@pytest.mark.often(3)
@pytest.mark.parametrize("case", labelled(KEPT))
def test_operations_keep_what_autograd_keeps(case):
    """To the byte, and where nothing is recomputed also by the hooks of saved tensors."""
    for stages in on_ranks(case.layout.world, kept, case=case):
        for expected, left, saved in stages:
            assert left == expected
            if case.layout.recompute == "none":
                assert saved == expected


def kept(world, case):
    """For each stage of this rank: the program's bytes, those left after a forward, those saved."""
    groups = open_groups(case.layout, world)
    program = program_of(case, world)
    parallel = build(program, groups, world.device, seeded(case.model, 0))
    batch = mine(make_batch(case, 0), program, world)
    if batch.segments is not None:
        batch = batch._replace(segments=batch.segments.long())  # as the sampler gives them
    batch = batch.at(parallel.positions).split(case.layout.microbatch)[0]
    # Which tokens are data: a byte each, once for all layers.
    unpadded = parallel._unpadded(batch)
    parallel._unpadded = lambda batch: unpadded
    found = []
    for stage in program.held(groups.at["pp"]):
        ops = operations(program, stage, cp_rank=groups.at["cp"])
        expected = sum(op.saved_bytes * op.count for op in ops)
        hidden, arrived = None, 0
        if not stage.is_first:
            shape, dtype = parallel.stream(batch)
            hidden = torch.zeros(shape, dtype=dtype).requires_grad_()
            arrived = hidden.untyped_storage().nbytes()
        saved = set()

        def keep(x, saved=saved):
            saved.add(x.untyped_storage()._cdata)
            return x

        with Made() as made, torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            out = parallel.forward(stage.index, hidden, batch)
            edge = torch.autograd.graph.get_gradient_edge(out)
            zeros = torch.zeros_like(out)
            del out
        gc.collect()
        assert wait_for_gloo_threads()
        weights = {
            local_shard(p.detach()).untyped_storage()._cdata
            for p in parallel.modules[stage.index].parameters()
        } | {zeros.untyped_storage()._cdata}
        sizes = {key: size for key, size in made.sizes().items() if key not in weights}
        left, own = sum(sizes.values()), sum(sizes.get(key, 0) for key in saved)
        torch.autograd.backward((edge,), (zeros,))
        found.append((expected, left + arrived, own + arrived))
    return found
