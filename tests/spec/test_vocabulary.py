"""Rows of padding after the vocabulary change no loss and no gradient, and nothing stores them."""

import json
import math
from random import Random

import pytest
import torch
from safetensors.torch import load_file

from meshwright.checkpoint.commit import steps
from meshwright.checkpoint.restore import stored_of
from meshwright.checkpoint.state import OPTIMIZER, WEIGHTS
from meshwright.checkpoint.weights import load_model
from meshwright.cli import main
from meshwright.comm.groups import Link
from meshwright.data.sampler import IGNORE
from meshwright.layout import Layout
from meshwright.models import build_model, init_model
from meshwright.parallel.loss import loss_and_gradient, loss_sum
from meshwright.parallel.tensor_parallel.tp_regions import TPRegion
from meshwright.planner.plan import digest, plan
from meshwright.program.lower import lower
from meshwright.runtime.checks.start import Resume
from meshwright.runtime.session import train
from meshwright.spec.loading import load_config
from meshwright.spec.model import padded, unpadded
from meshwright.spec.parts import parameter_count, parts
from meshwright.spec.resolve import model_spec
from meshwright.spec.training import OptimizerSpec, TrainSpec
from ranks import ranks
from runs import TINY

ALONE = TPRegion(Link(None, (0,), 0), sp=False)
GPT3 = ["model.preset=gpt3-175b", "cluster.preset=a100-80gb", "cluster.nodes=8"]


def drawn(random, tp=1):
    """Draw a head with padding, whose rows hold large values that must not be seen."""
    generator = torch.Generator().manual_seed(random.randrange(1 << 30))
    vocab, dim, tokens = random.randint(3, 90), random.randint(2, 24), random.randint(1, 40)
    rows = math.ceil(vocab / tp) * tp + tp * random.randint(0, 12)
    hidden = torch.randn(1, tokens, dim, generator=generator)
    weight = torch.randn(rows, dim, generator=generator)
    weight[vocab:] *= 1e3
    targets = torch.randint(0, vocab, (1, tokens), generator=generator)
    targets[:, ::5] = IGNORE
    cap = random.choice((None, 2.0))
    return vocab, hidden, weight, targets, cap


def losses(hidden, weight, targets, cap, vocab, region=ALONE):
    """Return loss and gradients, and the loss without gradients."""
    leaves = [one.clone().requires_grad_() for one in (hidden, weight)]
    loss = loss_sum(*leaves, targets, IGNORE, region, 16, cap=cap, vocab=vocab)
    loss.backward()
    with torch.no_grad():
        evaluated = loss_sum(*leaves, targets, IGNORE, region, 16, cap=cap, vocab=vocab)
    return loss.detach(), *(leaf.grad for leaf in leaves), evaluated


def test_padding_takes_no_part_in_loss_and_gradients():
    random = Random(1)
    for _ in range(60):
        vocab, hidden, weight, targets, cap = drawn(random)
        found = losses(hidden, weight, targets, cap, vocab)
        expected = losses(hidden, weight[:vocab], targets, cap, None)
        assert not found[2][vocab:].any()
        for mine, right in zip((*found[:2], found[2][:vocab], found[3]), expected, strict=True):
            torch.testing.assert_close(mine, right, rtol=1e-5, atol=1e-5)


def test_padding_takes_no_part_in_the_kernel_for_compilers():
    random = Random(2)
    for _ in range(30):
        vocab, hidden, weight, targets, cap = drawn(random)
        logits, one = (hidden @ weight.t())[0], torch.ones(())
        loss, gradient = loss_and_gradient(logits, targets[0], IGNORE, one, cap, vocab)
        expected = loss_and_gradient(logits[:, :vocab], targets[0], IGNORE, one, cap)
        assert not gradient[:, vocab:].any()
        torch.testing.assert_close((loss, gradient[:, :vocab]), expected, rtol=1e-6, atol=1e-6)


@ranks(4)
def test_padding_takes_no_part_on_ranks_that_share_the_vocabulary(world):
    """The last ranks may have nothing else."""
    region = TPRegion(Link(torch.distributed.group.WORLD, (0, 1, 2, 3), world.rank), sp=False)
    random = Random(3)
    for _ in range(12):
        vocab, hidden, weight, targets, cap = drawn(random, tp=4)
        shard = weight.chunk(4)[world.rank]
        loss, of_hidden, of_weight, evaluated = losses(hidden, shard, targets, cap, vocab, region)
        expected = losses(hidden, weight[:vocab], targets, cap, None)
        first = world.rank * len(shard)
        real = max(min(vocab - first, len(shard)), 0)
        assert not of_weight[real:].any()
        found = loss, of_hidden, of_weight[:real], evaluated
        for mine, right in zip(
            found, (*expected[:2], expected[2][first : first + real], expected[3]), strict=True
        ):
            torch.testing.assert_close(mine, right, rtol=1e-5, atol=1e-5)


def test_only_layouts_that_need_it_pad_and_ranks_have_equal_parts():
    random = Random(4)
    for _ in range(300):
        vocab, tp = random.randint(1, 5000), random.choice((1, 2, 3, 4, 6, 8))
        multiple = random.choice((None, None, 1, 8, 64, 100))
        spec = model_spec(vocab_size=vocab, pad_vocab_to_multiple_of=multiple)
        model = padded(spec, tp)
        assert model.vocab_rows % tp == 0 <= model.vocab_rows - vocab
        if multiple is None:
            assert (model is spec) == (vocab % tp == 0)
        else:
            assert model.vocab_rows % multiple == 0
        assert model.vocab_rows - vocab < math.lcm(multiple or 64, tp)
        assert parameter_count(model) == parameter_count(unpadded(spec))
        rows = {one.shape[0] for one in parts(model) if one.axes[0] == "vocab"}
        assert rows == {model.vocab_rows}
        assert padded(model, tp) is model


def test_a_padded_model_gives_no_logits_of_padding():
    torch.manual_seed(0)
    spec = model_spec(dim=16, n_layers=1, n_heads=2, vocab_size=33, pad_vocab_to_multiple_of=16)
    model = init_model(build_model(spec, "cpu"), spec, 0)
    assert model(torch.tensor([[1, 32]])).shape == (1, 2, 33)
    assert model.head_weight.shape == (48, 16)


@pytest.mark.slow
def test_gpt_3_is_planned_with_tensor_parallelism():
    config = load_config(None, [*GPT3, "train.precision=bf16"])
    made = plan(config, top=1)
    assert made.removed == []
    assert made.best.layout.tp > 1
    (chosen,) = [one for one in made.choices if one.subject == "vocabulary"]
    assert chosen.text.startswith("50,257 entries padded to 50,304 rows")
    free = made.best.tokens_per_s
    alone = plan(load_config(None, [*GPT3, "train.precision=bf16", "layout.tp=1"]), top=1)
    assert alone.best is None or alone.best.tokens_per_s < free
    assert alone.choices == [] or all(one.subject != "vocabulary" for one in alone.choices)


def test_the_layout_of_gpt_3_in_tutorials_can_be_planned():
    """64 GPUs: dp8, pp4, tp2 and ZeRO-2."""
    words = ["layout.dp_replicate=1", "layout.dp_shard=8", "layout.pp=4", "layout.tp=2"]
    made = plan(load_config(None, [*GPT3, *words, "layout.zero=2"]), top=1)
    assert made.best is not None
    layout = made.best.layout
    assert (layout.dp_shard, layout.pp, layout.tp, layout.zero) == (8, 4, 2, 2)


def test_a_plan_is_of_the_same_program_whether_the_padding_is_said():
    layout = Layout(tp=2)
    plain, said, more = (
        load_config(None, ["model.vocab_size=257", *words])
        for words in (
            [],
            ["model.pad_vocab_to_multiple_of=64"],
            ["model.pad_vocab_to_multiple_of=512"],
        )
    )
    assert digest(plain, layout) == digest(said, layout) != digest(more, layout)
    program = lower(plain.model, TrainSpec(batch=4, seq_len=32), OptimizerSpec(), layout)
    assert program.model.vocab_rows == 320


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run on two ranks of tp with an odd vocabulary."""
    folder = tmp_path_factory.mktemp("odd")
    words = [
        *TINY,
        "model.n_kv_heads=2",
        "model.vocab_size=263",
        "layout.tp=2",
        "train.steps=2",
        "checkpoint.every=2",
    ]
    config = load_config(None, [*words, f"log.dir={folder}", "layout.dp_replicate=1"])
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        return train(config, quiet=True)


@pytest.mark.slow
def test_steps_hold_no_padding_and_the_config_says_it(run):
    assert load_config(run.folder / "config.toml").model.pad_vocab_to_multiple_of == 64
    folder = steps(run.folder / "checkpoints")[-1]
    assert "pad_vocab" not in (folder / "model.json").read_text()
    for kind in (WEIGHTS, OPTIMIZER):
        stored = stored_of(folder, kind)
        shapes = [stored.shape(name) for name in stored.names if "embed" in name or "head" in name]
        assert shapes
        assert all(shape == (263, 32) for shape in shapes)


def test_an_export_holds_no_padding(run, tmp_path):
    assert main(["checkpoint", "export-hf", str(run.folder), str(tmp_path / "out")]) == 0
    assert json.loads((tmp_path / "out" / "config.json").read_text())["vocab_size"] == 263
    found = load_file(tmp_path / "out" / "model.safetensors")
    stored = stored_of(steps(run.folder / "checkpoints")[-1], WEIGHTS)
    for theirs, ours in (
        ("model.embed_tokens.weight", "embed.weight"),
        ("lm_head.weight", "head.weight"),
    ):
        assert torch.equal(found[theirs], stored.whole(ours))
    model = load_model(run.folder)
    assert model(torch.arange(8)[None]).shape[-1] == 263


@pytest.mark.slow
def test_a_run_goes_on_with_other_padding(run, monkeypatch):
    """On one device it goes on with the same weights; then every step trains as without padding."""
    monkeypatch.chdir(run.folder)
    before = stored_of(steps(run.folder / "checkpoints")[-1], WEIGHTS).whole("head.weight")
    words = ["layout.tp=1", "train.steps=3", "model.pad_vocab_to_multiple_of=100"]
    config = load_config(run.folder / "config.toml", [*words, "checkpoint.every=1"])
    resumed = train(config, resume=Resume(run.folder), quiet=True)
    assert resumed.exit_code == 0
    after = stored_of(steps(run.folder / "checkpoints")[-1], WEIGHTS).whole("head.weight")
    assert after.shape == before.shape
    assert not torch.equal(after, before)
