"""Attention sinks: in every kind of attention, and in proofs; experts' bias added once; MXFP4."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from meshwright.comm.groups import open_groups
from meshwright.errors import CheckpointError, ConfigError
from meshwright.kernels.varlen import attend_varlen, bounds_of
from meshwright.layout import Layout
from meshwright.models import blockwise, build_model, init_model
from meshwright.models.attention import attend
from meshwright.models.hf import hf_source, load_hf, save_hf
from meshwright.parallel.context_parallel.context import Ring, Ulysses, positions
from meshwright.program.attention import ScoreBounds
from meshwright.prove.case import Case
from meshwright.prove.parity import check, prove_parity
from meshwright.spec.hf import hf_config, spec_from_hf
from meshwright.spec.resolve import model_spec
from meshwright.spec.training import TrainSpec
from ranks import on_ranks

SEGMENTS = torch.tensor([[0] * 30 + [1] * 50, [0] * 5 + [1] * 70 + [2] * 5])
BOUNDS = [ScoreBounds(None, None, True), ScoreBounds(9, None, True), ScoreBounds(13, 2.0, True)]


def drawn(dtype=torch.float64):
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, heads, 80, 8, dtype=torch.float64) for heads in (4, 2, 2))
    sinks = torch.randn(4, dtype=torch.float64) + 1
    return tuple(one.to(dtype) for one in (2 * q, 2 * k, v, sinks))


def plain(q, k, v, sinks, scores, segments=None):
    """The definition: one more column of scores, whose probability is dropped."""
    k, v = (one.repeat_interleave(2, 1) for one in (k, v))
    raw = q @ k.mT / q.shape[-1] ** 0.5
    raw = raw if scores.cap is None else scores.cap * torch.tanh(raw / scores.cap)
    back = torch.arange(80)[:, None] - torch.arange(80)
    seen = (back >= 0) & (back < (scores.window or 80))
    if segments is not None:
        seen = seen & (segments[:, None, :, None] == segments[:, None, None, :])
    raw = raw.masked_fill(~seen, -torch.inf)
    last = sinks[:, None, None].expand(2, -1, 80, 1)
    return torch.cat((raw, last), -1).softmax(-1)[..., :-1] @ v


def with_gradients(attention, tensors):
    leaves = [one.clone().requires_grad_() for one in tensors]
    out = attention(*leaves)
    grad = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)
    return out.detach(), *torch.autograd.grad(out, leaves, grad)


def far(found, wanted):
    return max((a.double() - b).abs().max().item() for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize("scores", BOUNDS)
def test_one_device(scores):
    wanted = with_gradients(lambda *one: plain(*one, scores), drawn())
    found = with_gradients(lambda q, k, v, s: attend(q, k, v, None, scores, s), drawn())
    assert far(found, wanted) < 1e-12
    assert blockwise.takes(*drawn(torch.float32)[:2], scores)
    tensors = drawn(torch.float32)
    by_blocks = with_gradients(lambda q, k, v, s: attend(q, k, v, None, scores, s), tensors)
    assert far(by_blocks, wanted) < 1e-4
    short = with_gradients(lambda *one: plain(*one[:3], one[3] - 30, scores), drawn())
    assert far(by_blocks[:1], short[:1]) > 0.1


@pytest.mark.parametrize("scores", BOUNDS)
def test_documents(scores):
    wanted = with_gradients(lambda *one: plain(*one, scores, SEGMENTS), drawn())
    for bounds in (
        bounds_of(SEGMENTS),
        (SEGMENTS[:, :, None] == SEGMENTS[:, None]).tril()[:, None],
    ):
        found = with_gradients(
            lambda q, k, v, s, b=bounds: attend_varlen(q, k, v, b, scores, s), drawn()
        )
        assert far(found, wanted) < 1e-12


@pytest.mark.slow
def test_the_operators_are_sound():
    q, k, v, sinks = (one.requires_grad_() for one in drawn(torch.float32))
    torch.library.opcheck(blockwise.attention, (q, k, v, 9, 0.0, sinks))
    op = torch.ops.meshwright.attend_varlen.default
    torch.library.opcheck(op, (q, k, v, bounds_of(SEGMENTS), 9, None, sinks))


def over_ranks(world, kind, scores):
    """Return how far a rank's part, and the sum of all ranks' gradients of sinks, are off."""
    core = {"ring": Ring, "ulysses": Ulysses}[kind](torch.distributed.group.WORLD)
    at = positions(kind, 80, world.size, world.rank)
    worst = []
    for segments in (None, SEGMENTS):
        wanted = with_gradients(lambda *one, s=segments: plain(*one, scores, s), drawn())
        q, k, v, sinks = drawn()
        leaves = [one[:, :, at].clone().requires_grad_() for one in (q, k, v)]
        leaves.append(sinks.clone().requires_grad_())
        out = core(*leaves[:3], segments, scores, leaves[3])
        grad = torch.linspace(-1, 1, q.numel(), dtype=q.dtype).view(q.shape)[:, :, at]
        *grads, to_sinks = torch.autograd.grad(out, leaves, grad)
        torch.distributed.all_reduce(to_sinks)
        mine = [one[:, :, at] for one in wanted[:4]]
        worst.append(far((out.detach(), *grads, to_sinks), (*mine, wanted[4])))
    return max(worst)


@pytest.mark.parametrize("kind", ["ring", "ulysses"])
def test_sequences_that_are_cut(kind):
    for scores in BOUNDS:
        assert max(on_ranks(2, over_ranks, kind=kind, scores=scores)) < 1e-12


MODEL = {
    "family": "gpt_oss",
    "dim": 32,
    "n_layers": 2,
    "n_heads": 4,
    "n_kv_heads": 2,
    "head_dim": 8,
    "vocab_size": 72,
    "ffn_dim": 48,
    "experts": 4,
    "top_k": 2,
    "swiglu_limit": 0.6,
    "layer_pattern": [{"window": 7}, {}],
}


def case_of(label, packed):
    train = TrainSpec(batch=8, seq_len=32, seed=3)
    return Case(model_spec(**MODEL), train, Layout.parse(label), packed=packed)


def proven(world, label, packed):
    case = case_of(label, packed)
    return prove_parity(case, open_groups(case.layout, world), world)


def faulty(world, label, fault):
    case = case_of(label, packed=False)
    return check(case, open_groups(case.layout, world), world, fault=fault)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("label", "packed"),
    [
        ("tp2 sp mb2", True),
        ("cp2-ring mb2", True),
        ("cp2-ulysses mb2", False),
        ("tp2 dp2 ep2 mb2", False),
    ],
)
def test_layouts_are_one_device(label, packed):
    verdicts = on_ranks(Layout.parse(label).world, proven, label=label, packed=packed)[0]
    assert [verdict.claim for verdict in verdicts if not verdict.passed] == []


def added_on_each_rank(parallel):
    """Each rank of tp adds the bias of what experts give."""
    for block in parallel.modules[0].blocks:
        block.mlp.experts.adds = True


@pytest.mark.slow
def test_a_bias_that_is_added_twice_is_found():
    verdicts = on_ranks(2, faulty, label="tp2 mb2", fault=added_on_each_rank)[0]
    assert not all(verdict.passed for verdict in verdicts)


PACKED_MODEL = {**MODEL, "dim": 64, "ffn_dim": 32, "experts": 3}


def packed_folder(tmp_path):
    """Return a folder with experts in MXFP4, and one with what they stand for, in bf16."""
    spec = model_spec(**PACKED_MODEL)
    save_hf(init_model(build_model(spec, "cpu"), spec, 0).bfloat16(), tmp_path / "plain")
    tensors = load_file(tmp_path / "plain" / "model.safetensors")
    kept = {name: one for name, one in tensors.items() if not name.endswith("_proj")}
    torch.manual_seed(1)
    plain, packed = dict(kept), dict(kept)
    table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    for name in sorted(tensors.keys() - kept.keys()):
        experts, inner, outer = tensors[name].shape
        codes = torch.randint(0, 16, (experts, outer, inner // 32, 32))
        scales = torch.randint(115, 125, (experts, outer, inner // 32))
        numbers = table[codes % 8] * (1 - 2 * (codes // 8)) * (2.0 ** (scales - 127))[..., None]
        plain[name] = numbers.flatten(-2).transpose(1, 2).contiguous().bfloat16()
        packed[f"{name}_blocks"] = (codes[..., ::2] + 16 * codes[..., 1::2]).to(torch.uint8)
        packed[f"{name}_scales"] = scales.to(torch.uint8)
    config = json.loads((tmp_path / "plain" / "config.json").read_text())
    quantised = {"quantization_config": {"quant_method": "mxfp4"}}
    for at, held, more in (("wanted", plain, {}), ("packed", packed, quantised)):
        (tmp_path / at).mkdir()
        save_file(held, tmp_path / at / "model.safetensors", metadata={"format": "pt"})
        (tmp_path / at / "config.json").write_text(json.dumps({**config, **more}))
    return tmp_path / "packed", tmp_path / "wanted"


def test_published_files_in_four_bits_are_read(tmp_path):
    packed, wanted = packed_folder(tmp_path)
    found, plain = load_hf(packed), load_hf(wanted)
    for (name, one), other in zip(found.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(one, other), name
    source, name = hf_source(packed, found.spec), "layers.1.mlp.experts.up.weight"
    whole = plain.get_parameter(name)
    region = ((1, 3), (5, 20), (7, 41))
    assert torch.equal(source(name, tuple(whole.shape), region), whole[1:3, 5:20, 7:41])


def test_the_blocks_of_four_bits_are_those_of_transformers():
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")
    from meshwright.models.mxfp4 import dequantised

    blocks = torch.randint(0, 256, (3, 6, 4, 16), dtype=torch.uint8)
    scales = torch.randint(100, 140, (3, 6, 4), dtype=torch.uint8)
    theirs = mxfp4.convert_moe_packed_tensors(blocks, scales)
    assert torch.equal(dequantised(blocks, scales).transpose(1, 2), theirs)


def test_blocks_of_another_shape_are_refused(tmp_path):
    packed, _ = packed_folder(tmp_path)
    path = packed / "model.safetensors"
    tensors = load_file(path)
    name = "model.layers.0.mlp.experts.down_proj_scales"
    save_file(tensors | {name: tensors[name][:, :-1].contiguous()}, path)
    with pytest.raises(CheckpointError, match=r"down_proj_scales is stored as .* in blocks of 32"):
        load_hf(packed)
    config = json.loads((packed / "config.json").read_text())
    with pytest.raises(ConfigError, match="quantization_config = "):
        spec_from_hf(config | {"quantization_config": {"quant_method": "gptq"}})


def test_absent_rotary_settings_mean_yarn_whose_bounds_are_not_rounded():
    transformers = pytest.importorskip("transformers")
    config = {"model_type": "gpt_oss", "num_hidden_layers": 2}
    scaling = spec_from_hf(config).rope_scaling
    theirs = transformers.GptOssConfig(num_hidden_layers=2).rope_parameters
    assert scaling is not None
    assert (scaling.kind, scaling.factor, scaling.truncate) == ("yarn", theirs["factor"], False)
    assert scaling == model_spec(preset="gpt-oss-20b").rope_scaling
    spec = model_spec(preset="gpt-oss-20b")
    written = hf_config(spec)
    assert spec_from_hf(written) == spec.model_copy(update={"preset": None})
    assert written["rope_parameters"]["truncate"] is False


def test_a_limit_is_of_experts_alone():
    with pytest.raises(ValueError, match="neither a shared expert nor a dense layer"):
        model_spec(**{**MODEL, "layer_pattern": [{"dense": True}, {}]})
