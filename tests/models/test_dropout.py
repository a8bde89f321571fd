"""Dropout: the mask's statistics, that it is the same however it is cut, and its gradient."""

import hashlib
import math
import shutil

import pytest
import torch
from pydantic import ValidationError
from torch.utils.checkpoint import checkpoint

from meshwright.models import Transformer, build_model, init_model
from meshwright.models.context import Context
from meshwright.models.dropout import Dropout, dropout, layer_keys, row_keys
from meshwright.spec.resolve import model_spec

BASE = {"vocab_size": 97, "dim": 32, "n_layers": 3, "n_heads": 4, "context": 64, "init_std": 0.2}
FAMILIES = {
    "llama": {"n_kv_heads": 2},
    "llama-tied": {"tie_embeddings": True},
    "neox": {"family": "neox", "parallel_residual": True, "rotary_pct": 0.25},
}
families = pytest.mark.parametrize("fields", list(FAMILIES.values()), ids=list(FAMILIES))
shares = pytest.mark.parametrize("p", [0.5, 0.1, 0.9])


def built(dropout=0.25, **fields) -> Transformer:
    spec = model_spec(**BASE | fields, dropout=dropout)
    return init_model(build_model(spec, device="cpu"), spec, 0)


def tokens(*shape):
    return torch.randint(0, 97, shape, generator=torch.Generator().manual_seed(1))


def dropped(p, keys, seq=128, dim=128, places=None, site=1):
    """Return the mask as 0 and 1, fp64 [batch, seq, dim]."""
    ones = torch.ones(len(keys), seq, dim, dtype=torch.float64)
    return (dropout(ones, p, keys, places, site) == 0).double()


def chi_square(counts, expected, df):
    """Return how many standard deviations a chi-square statistic lies from its mean."""
    statistic = ((counts - expected) ** 2 / expected).sum().item()
    return (statistic - df) / math.sqrt(2 * df)


@shares
def test_the_share_is_right_along_every_axis(p):
    mask = dropped(p, row_keys(0, 0, range(128)))
    share, variance = mask.mean().item(), p * (1 - p)
    assert abs(share - p) < 4 * math.sqrt(variance / mask.numel())
    for axis in range(3):
        counts = mask.sum([other for other in range(3) if other != axis])
        each = mask.numel() // len(counts)
        found = torch.stack((counts, each - counts))
        expected = torch.tensor([[each * p], [each * (1 - p)]], dtype=torch.float64)
        assert abs(chi_square(found, expected, len(counts))) < 4


@shares
def test_no_two_rows_positions_or_channels_go_together(p):
    centred = dropped(p, row_keys(0, 0, range(128))) - p
    for axis in range(3):
        lines = centred.movedim(axis, 0).flatten(1)
        scores = (lines @ lines.T) / (p * (1 - p) * math.sqrt(lines.shape[1]))
        pairs = scores[tuple(torch.triu_indices(128, 128, offset=1))]
        assert abs(pairs.square().mean().item() - 1) < 0.06
        assert pairs.abs().max() < 6  # of 8128 pairs about 3.8 is the greatest


@pytest.mark.often(1)
@shares
def test_no_distance_between_channels_goes_together(p):
    centred = dropped(p, row_keys(0, 0, range(128)), seq=256, dim=256) - p
    spectrum = torch.fft.rfft(centred).abs().square().sum((0, 1))
    scores = torch.fft.irfft(spectrum)[1:129] / (p * (1 - p) * math.sqrt(centred.numel()))
    assert scores.abs().max() < 4.5


def test_neighbours_in_groups_are_uniform():
    mask = dropped(0.5, row_keys(5, 3, range(128)))
    for axis in range(3):
        groups = mask.movedim(axis, -1).reshape(-1, 8) @ 2.0 ** torch.arange(8, dtype=torch.double)
        counts = torch.bincount(groups.long(), minlength=256).double()
        assert abs(chi_square(counts, counts.sum() / 256, 255)) < 4


def test_masks_of_sites_layers_steps_and_seeds_are_unrelated():
    keys = row_keys(0, 0, range(32))
    masks = [
        dropped(0.5, keys),
        dropped(0.5, keys, site=0),
        dropped(0.5, keys, site=2),
        dropped(0.5, layer_keys(keys, 0)),
        dropped(0.5, layer_keys(keys, 1)),
        dropped(0.5, row_keys(0, 1, range(32))),
        dropped(0.5, row_keys(1, 0, range(32))),
        dropped(0.5, row_keys(0, 0, range(32, 64))),
        dropped(0.5, keys, places=torch.arange(128, 256)),
    ]
    signs = torch.stack([2 * mask.flatten() - 1 for mask in masks])
    scores = signs @ signs.T / math.sqrt(signs.shape[1])
    assert scores.fill_diagonal_(0).abs().max() < 4.5


def mixed(word):
    """Return splitmix64's mix of a word, in Python's unbounded integers."""
    word %= 2**64
    word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    word = (word ^ word >> 27) * 0x94D049BB133111EB % 2**64
    return word ^ word >> 31


def final(word):
    """Return the finaliser of 32 bits without its last step, of the word times the golden ratio."""
    word = word * 0x9E3779B9 % 2**32
    word = (word ^ word >> 16) * 0x21F0AAAD % 2**32
    return (word ^ word >> 15) * 0x735A2D97 % 2**32


def test_the_mask_is_that_of_exact_integers():
    # A device or compiler that does not wrap, or another hash, would change a resumed run.
    start = int.from_bytes(hashlib.sha256(b"7:dropout:3").digest()[:8], "big")
    keys = [mixed(start ^ row) for row in range(5)]
    layer = [mixed(key ^ 12) for key in keys]
    assert [key % 2**64 for key in row_keys(7, 3, range(5)).tolist()] == keys
    found = layer_keys(row_keys(7, 3, range(5)), 11)
    assert [key % 2**64 for key in found.tolist()] == layer
    places = [0, 1, 5, 131_071]
    expected = [
        [
            [final(token ^ channel) >= 2**31 for channel in range(50)]
            for token in (mixed(mixed(key ^ 2) ^ place) >> 32 for place in places)
        ]
        for key in layer
    ]
    # The hash is compared as signed: its upper half is below zero, and dropped.
    mask = dropped(0.5, found, 4, 50, torch.tensor(places), site=2)
    assert mask.bool().tolist() == expected
    assert "".join(str(int(bit)) for bit in mask[0, 0, :16]) == "1011000101011100"


def test_keys_depend_on_the_global_row_alone():
    every = row_keys(3, 4, range(10))
    assert torch.equal(row_keys(3, 4, range(4, 10, 2)), every[4:10:2])
    picked = torch.tensor([7, 2])
    assert torch.equal(row_keys(3, 4, picked), every[picked])
    assert every.dtype == torch.int64
    assert len(set(row_keys(3, 4, range(100_000)).tolist())) == 100_000


def test_any_cut_draws_the_same_mask():
    keys, x = row_keys(0, 0, range(6)), torch.randn(6, 16, 24)
    whole = dropout(x, 0.3, keys, None, 1)
    assert torch.equal(dropout(x[2:5], 0.3, keys[2:5], None, 1), whole[2:5])
    zigzag = torch.tensor([0, 1, 2, 3, 12, 13, 14, 15])
    assert torch.equal(dropout(x[:, zigzag], 0.3, keys, zigzag, 1), whole[:, zigzag])
    long = dropout(torch.ones(6, 40, 24), 0.3, keys, None, 1)
    assert torch.equal(long[:, :16] == 0, whole == 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_the_gradient_is_the_mask_times_the_scale(dtype):
    keys = row_keys(0, 0, range(4))
    x = torch.randn(4, 8, 32).to(dtype).requires_grad_()
    out = dropout(x, 0.3, keys, None, 2)
    weights = torch.randn(4, 8, 32).to(dtype)
    out.backward(weights)
    scale = (1 - dropped(0.3, keys, 8, 32, site=2)) / (1 - 0.3)
    assert out.dtype == x.grad.dtype == dtype
    torch.testing.assert_close(out, (x.double() * scale).to(dtype))
    torch.testing.assert_close(x.grad, (weights.double() * scale).to(dtype))


@pytest.mark.parametrize("p", [1e-12, 1 - 1e-12])
def test_extreme_shares(p):
    mask = dropped(p, row_keys(0, 0, range(4)))
    assert (mask == round(p)).all()


def test_nothing_is_kept_for_the_backward():
    saved = []

    def keep(tensor):
        saved.append(tensor.numel())
        return tensor

    x = torch.randn(2, 64, 64, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        dropout(x, 0.5, row_keys(0, 0, range(2)), None, 1)
    assert saved == [2]


def test_off_without_a_share_keys_or_training():
    x, keys = torch.randn(2, 4, 8), row_keys(0, 0, range(2))
    assert Dropout(0.0, 1)(x, Context(keys=keys)) is x
    assert Dropout(0.5, 1)(x, Context()) is x
    assert Dropout(0.5, 1).eval()(x, Context(keys=keys)) is x
    assert (Dropout(0.5, 1)(x, Context(keys=keys)) == 0).any()


@families
def test_a_model_drops_in_training_only(fields):
    model, ids, keys = built(**fields), tokens(2, 12), row_keys(0, 0, range(2))
    plain = model(ids)
    assert torch.equal(built(dropout=0.0, **fields)(ids, keys=keys), plain)
    assert (model(ids, keys=keys) - plain).abs().max() > 1e-2
    assert torch.equal(model(ids, keys=keys), model(ids, keys=keys))
    assert (model(ids, keys=keys) - model(ids, keys=row_keys(0, 1, range(2)))).abs().max() > 1e-2
    assert torch.equal(model.eval()(ids, keys=keys), plain)


@families
def test_every_site_of_every_layer_draws_its_own_mask(fields, monkeypatch):
    masks = []

    def record(x, p, keys, places, site):
        masks.append(dropout(torch.ones_like(x), p, keys, places, site) == 0)
        return dropout(x, p, keys, places, site)

    monkeypatch.setattr("meshwright.models.dropout.dropout", record)
    built(**fields)(tokens(2, 12), keys=row_keys(0, 0, range(2)))
    assert len(masks) == 7  # the embedding, and two in each of three layers
    assert len({mask.numpy().tobytes() for mask in masks}) == 7


@families
def test_stages_and_rows_draw_the_masks_of_the_whole(fields):
    whole, ids, keys = built(**fields), tokens(4, 10), row_keys(0, 0, range(4))
    expected = whole(ids, keys=keys)
    first = built(**fields).keep([0], first=True, last=False)
    last = built(**fields).keep([1, 2], first=False, last=True)
    assert torch.equal(last(first(ids, keys=keys), keys=keys), expected)
    torch.testing.assert_close(whole(ids[2:], keys=keys[2:]), expected[2:])
    assert torch.equal(whole(ids, keys=keys, places=torch.arange(10)), expected)
    assert not torch.equal(whole(ids, keys=keys, places=torch.arange(1, 11)), expected)


@families
def test_checkpointed_blocks_have_the_same_gradients(fields):
    found = []
    for is_checkpointed in (False, True):
        model = built(**fields)
        if is_checkpointed:
            for block in model.layers.values():
                plain = block.forward
                block.forward = lambda *args, plain=plain: checkpoint(
                    plain, *args, use_reentrant=False, preserve_rng_state=False
                )
        model(tokens(2, 12), keys=row_keys(0, 0, range(2))).square().mean().backward()
        found.append([p.grad for p in model.parameters()])
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))


@pytest.mark.slow
def test_compiled_blocks_have_the_same_gradients():
    found, compiles = [], []

    def backend(graph, inputs):
        compiles.append(graph)
        return graph

    for is_compiled in (False, True):
        model = built(n_layers=2)
        if is_compiled:
            for block in model.layers.values():
                block.compile(backend=backend, fullgraph=True)
        for step in range(2):
            keys = row_keys(0, step, range(2))
            model(tokens(2, 12), keys=keys).square().mean().backward()
        found.append([p.grad for p in model.parameters()])
    for plain, compiled in zip(*found, strict=True):
        torch.testing.assert_close(compiled, plain, rtol=1e-4, atol=1e-6)
    assert len(compiles) == 1  # one graph serves all layers and steps


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="the compiler needs g++")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_compiler_draws_the_same_mask(dtype):
    # Reduced over the rows, the hash is vectorised over channels: there it went wrong once.
    def total(x, keys):
        return dropout(x, 0.3, keys, None, 1).sum((0, 1))

    x, keys = torch.ones(4, 24, 96, dtype=dtype), row_keys(0, 0, range(4))
    torch.testing.assert_close(torch.compile(total)(x, keys), total(x, keys))


def test_bf16_drops_the_same():
    model, ids, keys = built(), tokens(2, 12), row_keys(0, 0, range(2))
    exact = model(ids, keys=keys)
    with torch.autocast("cpu", torch.bfloat16):
        rounded = model(ids, keys=keys)
    assert (rounded.float() - exact).norm() < 0.03 * exact.norm()
    narrow = built().to(torch.bfloat16)(ids, keys=keys)
    assert narrow.dtype == torch.bfloat16
    assert (narrow.float() - exact).norm() < 0.03 * exact.norm()


@pytest.mark.parametrize("p", [-0.1, 1.0])
def test_a_share_out_of_range_is_refused(p):
    with pytest.raises(ValidationError, match="dropout"):
        model_spec(dropout=p)
