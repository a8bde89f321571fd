"""A forward of an autograd.Function returns a view of what it has written in place.

Torch 2.11's compiler hands zeros to the backward of the tensor itself, without a word:
github.com/pytorch/pytorch/issues/180642. What it does on that version is in test_oldest_torch.py.
"""

from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from meshwright.models import dropout, ops
from meshwright.parallel.tensor_parallel import tensor as over_ranks


class Written(TorchDispatchMode):
    """Notes what memory is written after it was made."""

    def __init__(self):
        super().__init__()
        self.memory = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        for value, argument in zip(args, func._schema.arguments, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write:
                self.memory.add(value.untyped_storage().data_ptr())
        return func(*args, **(kwargs or {}))


class Context:
    """What a forward keeps."""

    needs_input_grad = (True,) * 8

    def save_for_backward(self, *tensors):
        self.saved = tensors


def gated(name):
    x = torch.randn(2, 4, 8)
    return ops._Gated.forward(Context(), x, x.clone(), name)


def normed(plus_one):
    return ops._RMSNorm.forward(Context(), torch.randn(2, 4, 8), torch.ones(8), 1e-5, plus_one)


def rotated(dims, is_adjacent):
    tables = torch.randn(2, 4, dims)
    return ops._Rotate.forward(Context(), torch.randn(2, 2, 4, 8), *tables, is_adjacent)


def dropped():
    keys = torch.arange(2)
    return dropout._Dropout.forward(Context(), torch.randn(2, 4, 8), 0.1, keys, None, 0, 0)


def normed_over_ranks(monkeypatch):
    monkeypatch.setattr(over_ranks, "all_reduce", lambda x, link: x)
    q, k, weight = torch.randn(2, 4, 8), torch.randn(2, 4, 4), torch.ones(8)
    given = q, k, weight, weight[:4], 1e-5, False, SimpleNamespace(size=1)
    return over_ranks._NormOverRanks.forward(Context(), *given)


FORWARDS = {
    **{f"gated by {name}": lambda _, name=name: gated(name) for name in ("silu", "gelu")},
    **{f"norm, {one}": lambda _, one=one: normed(one) for one in (False, True)},
    **{f"rotated, {dims} of 8": lambda _, dims=dims: rotated(dims, False) for dims in (4, 8)},
    "adjacent dims rotated": lambda _: rotated(4, True),
    "dropout": lambda _: dropped(),
    "norm over ranks": normed_over_ranks,
}


@pytest.mark.parametrize("name", FORWARDS)
def test_what_was_written_is_returned_as_a_view(name, monkeypatch):
    with Written() as written:
        found = FORWARDS[name](monkeypatch)
    for result in found if isinstance(found, tuple) else (found,):
        assert result.untyped_storage().data_ptr() in written.memory, "else this shows nothing"
        assert result._is_view()
