"""AdamW with moments in 8 bits: its update, its files, and the same on shards."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from conformance_cases import make
from meshwright.checkpoint.state import Leaf, _fill
from meshwright.checkpoint.tensors import Chunk, Stored, write_chunks
from meshwright.errors import ConfigError
from meshwright.parallel.data_parallel.int8_states import (
    Int8State,
    _nearest,
    add_state,
    values_of,
)
from meshwright.prove.optimizer import in_int8
from meshwright.prove.suite import Suite
from meshwright.spec.loading import load_config
from meshwright.spec.optimizers import State, base, block_width, numbers_of
from meshwright.spec.parts import Part
from meshwright.spec.training import OptimizerSpec
from meshwright.training.optimizer import build_optimizer, step_scaled
from ranks import on_ranks
from saved_steps import check_read_by, go_on, write

PART, VECTOR = Part("m", (6, 24), ("ffn", "dim")), Part("n", (24,), ("dim",))
FINITE = torch.tensor(1.0, dtype=torch.float64)
SPEC = OptimizerSpec(state_dtype="int8", lr=0.02, weight_decay=0.3, warmup_steps=2)
KEYS = ["exp_avg", "exp_avg_sq"]


def quantized(key, wide):
    """The state and its tensors."""
    state = {}
    add_state(state, State(key, "int8"), wide)
    blocks = Int8State.of(key, state[key], state[f"{key}_scale"])
    blocks.copy_(wide.clone())
    return blocks, state


@pytest.mark.parametrize("key", KEYS)
def test_numbers_are_rounded_to_the_nearest_of_their_block(key):
    torch.manual_seed(0)
    wide = torch.randn(8, 96) * torch.logspace(-9, 9, 8)[:, None] * torch.rand(8, 96) ** 4
    wide = wide.square() if key == "exp_avg_sq" else wide
    blocks, state = quantized(key, wide)
    is_square = key == "exp_avg_sq"
    root = wide.sqrt() if is_square else wide
    expected = in_int8(root, 96, 0.0, is_signed=not is_square)
    expected = expected.square() if is_square else expected
    torch.testing.assert_close(blocks.float(), expected, rtol=1e-6, atol=0)
    assert (state[key].dtype, state[f"{key}_scale"].shape) == (torch.uint8, (8, 1))
    largest = wide.abs().argmax(-1, keepdim=True)
    kept = blocks.float().gather(-1, largest)
    torch.testing.assert_close(kept, wide.gather(-1, largest), rtol=3e-7, atol=0)


@pytest.mark.parametrize("key", KEYS)
def test_codes_are_those_of_a_search_among_the_middles(key):
    """Also next to every middle, on it, and for both zeros."""
    numbers = torch.tensor(numbers_of(key))
    middles = (numbers[1:] + numbers[:-1]) / 2
    ends = [torch.nextafter(middles, torch.tensor(end)) for end in (-2.0, 2.0)]
    torch.manual_seed(0)
    drawn = torch.rand(100_000) * 10.0 ** (-12 * torch.rand(100_000))
    shares = torch.cat([numbers, middles, *ends, drawn, torch.tensor([0.0, 1e-40, 1.0])])
    shares = shares.abs() if key == "exp_avg_sq" else torch.cat([shares, -shares])
    assert torch.equal(
        _nearest(shares.clone(), key), torch.bucketize(shares, middles, out_int32=True)
    )


@pytest.mark.parametrize("key", KEYS)
def test_what_is_rounded_stays_as_it_is_when_rounded_again(key):
    """So a skipped step, and a step that is read in other blocks and back, changes nothing."""
    count = len(numbers_of(key))
    codes = torch.arange(count).to(torch.uint8).repeat(500, 1)
    scales = torch.rand(500, 1) * 10.0 ** torch.randint(-10, 5, (500, 1))
    state = codes.clone(), scales.clone()
    blocks = Int8State.of(key, *state)
    blocks.copy_(blocks.float())
    assert torch.equal(state[0], codes)
    assert torch.equal(state[1], scales)


def test_blocks_are_within_rows_and_divide_them():
    widths = {row: block_width(row) for row in (4096, 11008, 5504, 176, 257, 24, 1, 0)}
    assert widths == {4096: 256, 11008: 256, 5504: 172, 176: 176, 257: 1, 24: 24, 1: 1, 0: 1}


@pytest.mark.parametrize("piece", [2**22, 48])
def test_an_update_is_adamw_s_with_rounded_moments(piece, monkeypatch):
    monkeypatch.setattr(base, "_PIECE", piece)  # the whole weight at once, or two rows
    torch.manual_seed(0)
    weight, norm = nn.Parameter(torch.randn(PART.shape)), nn.Parameter(torch.ones(24))
    exact = weight.detach().double()
    mean, square = torch.zeros_like(exact), torch.zeros_like(exact)
    optimizer = build_optimizer([weight, norm], [PART, VECTOR], SPEC)
    (beta1, beta2), rate = SPEC.betas, SPEC.lr
    for number in range(1, 6):
        gradient = torch.randn_like(weight)
        weight.grad, norm.grad = 4 * gradient, torch.ones(24)
        mean = beta1 * mean + (1 - beta1) * gradient.double()
        square = beta2 * square + (1 - beta2) * gradient.double() ** 2
        size = (square / (1 - beta2**number)).sqrt() + SPEC.eps
        exact = exact * (1 - rate * 0.3) - rate * mean / (1 - beta1**number) / size
        mean = in_int8(mean, 24, 0.0)
        square = in_int8(square.sqrt(), 24, 0.0, is_signed=False).square()
        step_scaled(optimizer, FINITE, 4.0, 0.0)
    torch.testing.assert_close(weight.detach().double(), exact, rtol=1e-5, atol=1e-6)
    state = optimizer.state[weight]
    assert (state["exp_avg"].dtype, state["step"].item()) == (torch.uint8, 5)
    torch.testing.assert_close(values_of(state, "exp_avg").double(), mean, rtol=1e-5, atol=1e-8)
    assert optimizer.state[norm].keys() == {"step", *KEYS}
    assert optimizer.state[norm]["exp_avg"].dtype == torch.float32


def test_a_step_that_is_not_finite_changes_nothing_even_the_first():
    weight = nn.Parameter(torch.randn(PART.shape))
    optimizer = build_optimizer([weight], [PART], SPEC)
    for finite in (False, True, False):
        before = weight.detach().clone()
        kept = {key: value.clone() for key, value in optimizer.state[weight].items()}
        weight.grad = torch.full_like(weight, 1.0 if finite else torch.nan)
        norm = FINITE if finite else torch.tensor(torch.nan, dtype=torch.float64)
        step_scaled(optimizer, norm, 1.0, 1.0)
        if not finite:
            assert torch.equal(weight, before)
            assert all(torch.equal(optimizer.state[weight][key], kept[key]) for key in kept)
    assert optimizer.state[weight]["step"] == 1
    assert values_of(optimizer.state[weight], "exp_avg").all()


def test_what_rounds_to_nearest_is_not_asked_to_round_otherwise():
    with pytest.raises(ConfigError, match="states in int8 are rounded to nearest"):
        load_config(None, ["optimizer.state_dtype=int8", "optimizer.rounding=stochastic"])
    with pytest.raises(ConfigError, match="the states of lion are fp32"):
        load_config(None, ["optimizer.name=lion", "optimizer.state_dtype=int8"])


NO_MASTERS = make("shard2 zero3 mb2", "llama").train.model_copy(
    update={"precision": "bf16", "master": "none"}
)
CASES = [
    ("shard2 zero3 mb2", "llama", {}),
    ("tp2 sp mb1", "biased", {}),
    pytest.param("shard2 zero1 mb2", "llama", {}, marks=pytest.mark.slow),
    pytest.param("dp2 mb2", "llama", {}, marks=pytest.mark.slow),
    pytest.param("cp2-ring mb2", "llama", {}, marks=pytest.mark.slow),
    pytest.param("shard2 zero2 ep2 mb2", "qwen2_moe", {}, marks=pytest.mark.slow),
    pytest.param("tp2 mb2", "qwen2_moe", {}, marks=pytest.mark.slow),
    pytest.param("pp2 1f1b mb1", "tied", {}, marks=pytest.mark.slow),
    pytest.param("shard2 zero1 mb1 offload-optimizer", "llama", {}, marks=pytest.mark.slow),
    pytest.param("shard2 zero3 mb2", "llama", {"fsdp2": True}, marks=pytest.mark.slow),
    pytest.param("shard2 zero3 mb2", "llama", {"train": NO_MASTERS}, marks=pytest.mark.slow),
]


def proven(world, case):
    return Suite(world).prove(case)


@pytest.mark.often(1)
@pytest.mark.parametrize(("label", "model", "fields"), CASES, ids=str)
def test_layouts_update_as_one_device_does(label, model, fields):
    case = replace(make(label, model), **{"optimizer": SPEC, **fields})
    for verdicts in on_ranks(case.layout.world, proven, case=case):
        assert [verdict for verdict in verdicts if not verdict.passed] == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "label", ["shard2 zero3 mb1", "pp2 1f1b mb1", "shard2 zero1 mb1 offload-optimizer"]
)
def test_a_step_is_read_bit_for_bit_by_layouts_with_whole_rows(label, tmp_path):
    others = ("mb1", "shard2 zero2 mb1")
    check_read_by(others, label, SPEC, str(tmp_path), rtol=2**-5, atol=2e-3)


def test_a_step_is_read_in_other_blocks(tmp_path):
    """Over tp, the attention's output has 16 columns of 32, and the MLP's 22 of 44."""
    written = on_ranks(1, write, label="mb1", spec=SPEC, root=str(tmp_path))
    resumed = on_ranks(2, go_on, label="tp2 mb1", spec=SPEC, root=str(tmp_path))
    (saved, _), (loaded, after) = written[0], resumed[0]
    cut = [name for name in saved if not np.array_equal(loaded[name], saved[name])]
    assert all(name.endswith(("attn.o.weight", "mlp.down.weight")) for name in cut), cut
    for name in saved:
        error = np.linalg.norm(loaded[name] - saved[name])
        assert error < 0.03 * np.linalg.norm(saved[name])
        assert np.isfinite(after[name]).all()


@pytest.mark.parametrize("dtype", ["int8", "fp32"])
@pytest.mark.parametrize("start", [256, 128])
def test_columns_are_read_with_the_scales_of_their_blocks(start, dtype, tmp_path):
    """Of two blocks of 256 columns, a rank has the second one, or half of the first one too."""
    torch.manual_seed(0)
    sizes = torch.tensor([1.0, 1000.0]).repeat_interleave(256)
    saved, state = quantized("exp_avg", torch.randn(4, 512) * sizes)
    path = tmp_path / "optimizer-0.safetensors"
    write_chunks(path, [Chunk(f"{key}.m", (0, 0), tensor) for key, tensor in state.items()])
    shard, restored, kind = torch.zeros(4, 512 - start), {}, State("exp_avg", dtype)
    add_state(restored, kind, shard)
    leaf = Leaf("m", shard, ((0, 4), (start, 512)), is_mine=True)
    _fill(leaf, restored, kind, Stored([path]))
    read, expected = values_of(restored, "exp_avg"), saved.float()[:, start:]
    if dtype == "fp32" or start == 256:
        assert torch.equal(read, expected)
    else:
        assert (read - expected).norm() < 0.03 * expected.norm()


@pytest.mark.parametrize(("before", "after"), [("int8", "fp32"), ("fp32", "int8")])
def test_a_step_is_read_in_either_dtype(before, after, tmp_path):
    first, second = (SPEC.model_copy(update={"state_dtype": dtype}) for dtype in (before, after))
    (written,) = on_ranks(1, write, label="mb1", spec=first, root=str(tmp_path))
    (resumed,) = on_ranks(1, go_on, label="mb1", spec=second, root=str(tmp_path))
    for name, saved in written[0].items():
        key, _, parameter = name.partition(".")
        expected = torch.from_numpy(saved)
        if after == "int8" and key != "weight" and saved.ndim == 2:
            is_square = key == "exp_avg_sq"
            root = expected.sqrt() if is_square else expected
            expected = in_int8(root, saved.shape[-1], 0.0, is_signed=not is_square)
            expected = expected.square() if is_square else expected
        torch.testing.assert_close(
            torch.from_numpy(resumed[0][name]), expected, rtol=1e-6, atol=0, msg=parameter
        )
