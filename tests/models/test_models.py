"""The modules: packed documents, pipeline stages, precision, the hand-written backwards."""

import copy

import pytest
import torch
from torch.nn import functional as F

from meshwright.models import Transformer, build_model, init_model
from meshwright.models.context import causal_mask
from meshwright.models.ops import rms_norm, rotate
from meshwright.models.rope import Rope, inverse_frequencies
from meshwright.spec.resolve import model_spec

CPU = torch.device("cpu")
BASE = {"vocab_size": 97, "dim": 32, "n_layers": 3, "n_heads": 4, "context": 64, "init_std": 0.2}
FAMILIES = {
    "llama": {"n_kv_heads": 2},
    "llama-tied": {"tie_embeddings": True},
    "neox-parallel": {"family": "neox", "parallel_residual": True, "rotary_pct": 0.25},
    "neox-sequential-tied": {"family": "neox", "tie_embeddings": True},
}


def tiny(**more):
    return model_spec(**BASE | more)


def built(spec, seed=0) -> Transformer:
    return init_model(build_model(spec, device="cpu"), spec, seed)


def tokens(*shape, seed=1):
    return torch.randint(0, 97, shape, generator=torch.Generator().manual_seed(seed))


def ids_of(name):
    return pytest.param(FAMILIES[name], id=name)


families = pytest.mark.parametrize("fields", [ids_of(name) for name in FAMILIES])


@families
def test_logits_are_causal(fields):
    model, ids = built(tiny(**fields)), tokens(2, 20)
    changed = ids.clone()
    changed[:, 12] = (changed[:, 12] + 1) % 97
    with torch.no_grad():
        before, after = model(ids), model(changed)
    assert before.shape == (2, 20, 97)
    assert torch.equal(before[:, :12], after[:, :12])
    assert ((before - after).abs().amax(-1)[:, 12:] > 1e-4).all()


@families
def test_packed_documents_are_as_each_alone(fields):
    model, ids = built(tiny(**fields)), tokens(2, 24)
    lengths = [[5, 12, 7], [1, 3, 20]]
    segments = torch.stack(
        [torch.repeat_interleave(torch.arange(3), torch.tensor(row)) for row in lengths]
    )
    packed = model(ids, segments=segments)
    for row, parts in enumerate(lengths):
        start = 0
        for length in parts:
            alone = model(ids[row : row + 1, start : start + length])
            torch.testing.assert_close(
                packed[row, start : start + length], alone[0], atol=2e-5, rtol=1e-5
            )
            start += length
    assert (packed - model(ids)).abs().max() > 1e-2  # the segments did cut something


@families
def test_gradients_do_not_cross_segments(fields):
    model = built(tiny(**fields))
    segments = torch.tensor([[0] * 5 + [1] * 7])
    embedded = model.embed(tokens(1, 12)).detach().requires_grad_()
    model(embedded, segments=segments)[:, 5:].square().sum().backward()
    assert torch.equal(embedded.grad[:, :5], torch.zeros_like(embedded.grad[:, :5]))
    assert (embedded.grad[:, 5:].abs().amax(-1) > 0).all()


@families
def test_packed_gradients_are_the_sum_of_the_documents(fields):
    model, ids = built(tiny(**fields).model_copy()).double(), tokens(1, 12)
    segments = torch.tensor([[0] * 5 + [1] * 7])

    def gradients(logits, targets):
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
        return torch.autograd.grad(loss, list(model.parameters()))

    packed = gradients(model(ids, segments=segments), ids)
    first = gradients(model(ids[:, :5]), ids[:, :5])
    second = gradients(model(ids[:, 5:]), ids[:, 5:])
    # The rotary tables are fp32, and the second document stands at other positions alone.
    for whole, one, two in zip(packed, first, second, strict=True):
        torch.testing.assert_close(whole, one + two, rtol=1e-5, atol=1e-5)


@families
def test_stages_in_a_row_are_the_whole(fields):
    spec = tiny(**fields)
    whole, ids = built(spec), tokens(2, 10)
    first = built(spec).keep([0], first=True, last=False)
    middle = built(spec).keep([1], first=False, last=False)
    last = built(spec).keep([2], first=False, last=True)
    names = {name for name, _ in whole.named_parameters()}
    for stage, layer in ((first, 0), (middle, 1), (last, 2)):
        held = {name for name, _ in stage.named_parameters()}
        assert held <= names
        assert {name.split(".")[1] for name in held if "layers" in name} == {str(layer)}
    assert {"embed.weight"} == {n for n, _ in first.named_parameters() if "layers" not in n}
    assert not [n for n, _ in middle.named_parameters() if "layers" not in n]
    assert ("embed.weight" in dict(last.named_parameters())) == spec.tie_embeddings
    assert torch.equal(last(middle(first(ids))), whole(ids))
    with pytest.raises(TypeError, match="no embedding"):
        middle(ids)
    with pytest.raises(TypeError, match="no head"):
        _ = middle.head_weight


@families
def test_a_stage_is_initialised_as_in_the_whole(fields):
    spec = tiny(**fields)
    stage = build_model(spec).keep([2], first=False, last=True).to_empty(device="cpu")
    init_model(stage, spec, seed=0)
    whole = dict(built(spec).named_parameters())
    assert all(torch.equal(p, whole[name]) for name, p in stage.named_parameters())


@families
def test_hidden_and_head_weight_give_the_logits(fields):
    model, ids = built(tiny(**fields)), tokens(2, 9)
    torch.testing.assert_close(model.hidden(ids) @ model.head_weight.T, model(ids))


@families
@pytest.mark.parametrize("how", ["weights", "autocast"])
def test_bf16_is_near_fp32(fields, how):
    spec = tiny(**fields | {"init_std": 0.05})
    ids, targets = tokens(2, 48), tokens(2, 48, seed=2).flatten()
    reference, narrow = built(spec), built(spec)
    if how == "weights":
        narrow = narrow.to(torch.bfloat16)
    found = []
    for model in (reference, narrow):
        with torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast" and model is narrow):
            logits = model(ids)
        F.cross_entropy(logits.flatten(0, 1).float(), targets).backward()
        found.append((logits.float(), [p.grad.float() for p in model.parameters()]))
    assert found[1][0].isfinite().all()
    assert (found[0][0] - found[1][0]).norm() < 0.02 * found[0][0].norm()
    for (name, _), exact, rounded in zip(
        reference.named_parameters(), found[0][1], found[1][1], strict=True
    ):
        assert (exact - rounded).norm() < 0.1 * exact.norm() + 1e-6, name


def test_a_far_position_is_turned_as_well_in_bf16():
    # At position 60,000 neighbouring angles differ by less than bf16 resolves.
    spec = model_spec(**BASE | {"context": 65536})
    rope = Rope(spec)
    rope.reach(60_008, CPU)
    cos, sin = rope.tables(60_000, 60_008)
    x = torch.randn(1, 1, 8, 8, generator=torch.Generator().manual_seed(0)).bfloat16()
    exact = rotate(x.double(), cos.double(), sin.double())
    assert (rotate(x, cos, sin).double() - exact).abs().max() < 2**-8 * exact.abs().max()


def test_tables_survive_a_cast_and_an_empty_move():
    spec, ids = tiny(), tokens(1, 16)
    model = build_model(spec, device="meta", max_seq_len=16)
    model.to_empty(device="cpu")
    init_model(model, spec, seed=0)
    expected = built(spec)(ids)
    assert torch.equal(model(ids), expected)
    before = [table.clone() for table in model.rope.tables(0, 16)]
    after = model.to(torch.bfloat16).float().rope.tables(0, 16)
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert torch.equal(copy.deepcopy(built(spec))(ids), expected)


def test_tables_grow_and_keep_their_values():
    rope = Rope(tiny(), length=8)
    rope.reach(3, CPU)
    short = rope.tables(0, 8)
    assert rope.tables(3, 8)[0].shape == (5, 8)
    rope.reach(8, CPU)
    assert rope.tables(0, 8)[0].data_ptr() == short[0].data_ptr()  # no work where it fits
    rope.reach(9, CPU)
    assert rope.length == 16
    assert all(torch.equal(a, b) for a, b in zip(short, rope.tables(0, 8), strict=True))


def test_tables_made_for_inference_serve_training():
    model, ids = built(tiny()), tokens(1, 16)
    with torch.inference_mode():
        model(ids)
    model(ids).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_explicit_positions():
    model, ids = built(tiny()), tokens(1, 12)
    model.init_tables("cpu", 64)
    every, order = model.rope.tables(0, 64), torch.tensor([0, 1, 10, 11])
    picked = model.rope.tables(0, 4, order)
    assert all(torch.equal(a, b[order]) for a, b in zip(picked, every, strict=True))
    plain = model(ids)
    assert torch.equal(model(ids, positions=torch.arange(12)), plain)
    # Only differences of positions matter.
    torch.testing.assert_close(model(ids, positions=torch.arange(40, 52)), plain, atol=1e-4, rtol=0)
    assert (model(ids, positions=2 * torch.arange(12)) - plain).abs().max() > 1e-2


def test_llama3_frequencies_by_hand():
    scaling = {
        "kind": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_context": 8192,
    }
    fields = dict(BASE, dim=512, rope_theta=500000.0)
    plain = inverse_frequencies(model_spec(**fields)).double()
    scaled = inverse_frequencies(model_spec(**fields, rope_scaling=scaling)).double()
    wavelength = 2 * torch.pi / plain
    fast, slow = wavelength < 2048, wavelength > 8192
    assert fast.any()
    assert slow.any()
    assert (~fast & ~slow).any()
    assert torch.equal(scaled[fast], plain[fast])
    torch.testing.assert_close(scaled[slow], plain[slow] / 8)
    middle = ~fast & ~slow
    assert (scaled[middle] < plain[middle]).all()
    assert (scaled[middle] > plain[middle] / 8).all()


@pytest.mark.parametrize("rotary", [8, 4])
def test_backwards_by_finite_differences(rotary):
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_()

    x, weight = normal(2, 3, 8), normal(8)
    assert torch.autograd.gradcheck(lambda x, w: rms_norm(x, w, 1e-5), (x, weight))
    angles = torch.randn(3, rotary // 2, generator=generator, dtype=torch.float64).repeat(1, 2)
    heads = normal(2, 2, 3, 8)
    assert torch.autograd.gradcheck(lambda h: rotate(h, angles.cos(), angles.sin()), (heads,))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rms_norm_is_that_of_torch(dtype):
    generator = torch.Generator().manual_seed(0)
    x = (3 * torch.randn(4, 5, 64, generator=generator)).to(dtype)
    weight = torch.rand(64, generator=generator).to(dtype)
    mine = rms_norm(x, weight, 1e-5)
    assert mine.dtype == dtype
    exact = F.rms_norm(x.double(), (64,), weight.double(), 1e-5)
    scale = 1e-6 if dtype == torch.float32 else 2**-8
    assert ((mine.double() - exact).abs() <= scale * exact.abs() + 1e-7).all()


def test_attention_core_can_be_replaced():
    model, ids = built(tiny()), tokens(1, 8)
    before = model(ids)
    seen = []

    def core(q, k, v, mask, limits, sinks):
        seen.append((q.shape, k.shape))
        return F.scaled_dot_product_attention(
            q, k.repeat_interleave(q.shape[1] // k.shape[1], 1), v, is_causal=True
        )

    for block in model.layers.values():
        block.attn.core = core
    torch.testing.assert_close(model(ids), before)
    assert seen == [((1, 4, 8, 8), (1, 4, 8, 8))] * 3


@families
def test_the_head_and_the_mask_can_be_replaced(fields):
    model, ids = built(tiny(**fields)), tokens(2, 8)
    segments = torch.tensor([[0] * 3 + [1] * 5] * 2)
    expected = model(ids, segments=segments), model(ids)
    model.mask_of = lambda x, segments, cache: causal_mask(x, torch.zeros_like(x), cache)
    found = model(ids, segments=segments, project=lambda hidden, weight: hidden @ weight[:50].t())
    torch.testing.assert_close(found, expected[1][..., :50])
    assert (found - expected[0][..., :50]).abs().max() > 1e-2


@pytest.mark.slow
def test_compiled_blocks_have_the_same_gradients():
    spec, found = tiny(family="neox", parallel_residual=True, rotary_pct=0.5, n_layers=1), []
    for is_compiled in (False, True):
        model = built(spec)
        if is_compiled:
            for block in model.layers.values():
                block.compile(backend="aot_eager", fullgraph=True)
        for length in (16, 9, 11):  # from the second on, the length is a symbol to the compiler
            model(tokens(2, length)).square().mean().backward()
        found.append([p.grad for p in model.parameters()])
    for plain, compiled in zip(*found, strict=True):
        torch.testing.assert_close(compiled, plain, rtol=1e-4, atol=1e-6)
