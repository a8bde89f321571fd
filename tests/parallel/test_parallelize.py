"""One's own model and loop: `examples/own_loop.py` gives one curve on every layout."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import meshwright as mw
from meshwright.errors import ConfigError
from ranks import ranks

pytest.importorskip("transformers")
EXAMPLE = Path(__file__).parents[2] / "examples" / "own_loop.py"


def run(processes, *words):
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable]
    if processes > 1:
        command += ["-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", str(processes)]
    done = subprocess.run(
        [*command, str(EXAMPLE), *words],
        capture_output=True,
        text=True,
        timeout=200,
        env=environ,
    )
    found = re.findall(r"step \d+ loss ([\d.]+) norm ([\d.]+)", done.stdout)
    assert done.returncode == 0, done.stderr[-2000:]
    return [tuple(map(float, one)) for one in found]


@pytest.fixture(scope="module")
def alone(processes_are_forked):
    if processes_are_forked is None:
        return run(1)
    with processes_are_forked.all_python():
        return run(1)


@pytest.mark.slow  # test_own_cp and test_own_checkpoints have the same without the example
@pytest.mark.parametrize(
    ("processes", "words"),
    [
        (2, ["--tp", "2"]),
        (2, ["--zero", "3"]),
        (2, ["--cp", "2"]),
        (4, ["--tp", "2", "--cp", "2", "--zero", "2"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else str(value),
)
def test_own_loop_is_the_same_on_every_layout(alone, processes, words):
    agree(run(processes, *words, "--steps", "3"), alone[:3])


def agree(found, expected):
    for (loss, norm), (one_loss, one_norm) in zip(found, expected, strict=True):
        # AdamW turns the rounding of tiny gradients into steps of the learning rate.
        assert loss == pytest.approx(one_loss, abs=5e-5)
        assert norm == pytest.approx(one_norm, rel=5e-4)


@pytest.mark.slow  # test_own_checkpoints has the same without the example
def test_own_loop_goes_on_on_another_layout(alone, tmp_path):
    save = ["--save", str(tmp_path / "steps")]
    agree(run(2, "--cp", "2", "--steps", "3", *save), alone[:3])
    agree(run(1, *save), alone[3:])


class Tiny(nn.Module):
    """A model with tied embeddings, two kinds of layers and its own names."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(16, 8)
        self.body = nn.ModuleList(
            nn.ModuleDict({"into": nn.Linear(8, 12), "out": nn.Linear(12, 8)}) for _ in range(2)
        )
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.words.weight

    def forward(self, ids):
        x = self.words(ids)
        for layer in self.body:
            x = x + layer["out"](torch.relu(layer["into"](x)))
        return self.head(x)


PLAN = {
    "words": "vocab",
    "body.*.into": "column",
    "body.*.out": "row",
    "head": "column_gathered",
}


def tiny():
    torch.manual_seed(0)
    return Tiny()


@ranks(2)
def test_tied_weights_stay_one_and_every_gradient_is_right(world):
    from meshwright.parallel.gather import full_tensor

    ids = torch.arange(12).view(2, 6)
    alone, layout = tiny(), mw.Layout(tp=2)
    alone(ids).square().sum().backward()
    model = mw.parallelize(tiny(), layout, mw.make_mesh(layout), plan=PLAN)
    assert model.head.weight is model.words.weight
    out = model(ids)
    assert torch.allclose(out, alone(ids), atol=1e-6)
    out.square().sum().backward()
    expected = dict(alone.named_parameters())
    for name, parameter in model.named_parameters():
        gradient, error = expected[name].grad, full_tensor(parameter.grad) - expected[name].grad
        assert error.abs().max() < 1e-5 * gradient.abs().max(), name


REFUSED = {
    "column": ({"body.*.into": "colum"}, {"tp": 2}, "the plan's style 'colum' for body.0.into"),
    "pattern": ({"nothing": "row"}, {"tp": 2}, "the plan's nothing fits no layer of the model"),
    "kind": ({"words": "row"}, {"tp": 2}, "the plan cuts words by row, which is not an nn.Linear"),
    "no plan": (None, {"tp": 2}, "layout.tp > 1 needs a plan"),
    "tied": ({"head": "column_gathered"}, {"tp": 2}, "words.weight is tied to a layer that the"),
    "pp": (None, {"pp": 2}, "layout.pp = 2 needs a model that is cut into stages"),
    "ep": (None, {"dp_replicate": 2, "ep": 2}, "layout.ep = 2 shares out experts of Meshwright's"),
    "shards": (
        None,
        {"dp_shard": 2},
        "layout.dp_shard = 2 requires layout.zero = 1, 2 or 3, but it is 0",
    ),
    "sp": (PLAN, {"tp": 2, "sp": True}, "layout.sp needs norms that support it"),
}


@pytest.mark.parametrize("case", REFUSED)
@ranks(2)
def test_refusals(world, case):
    plan, degrees, text = REFUSED[case]
    layout = mw.Layout(**degrees)
    with pytest.raises(ConfigError) as caught:
        mw.parallelize(tiny(), layout, mw.make_mesh(layout), plan=plan)
    assert text in str(caught.value)


@ranks(2)
def test_a_mesh_of_another_layout_is_refused(world):
    with pytest.raises(ConfigError, match=r"the mesh has .*'tp': 2.* the layout .*'tp': 1"):
        mw.parallelize(tiny(), mw.Layout(dp_replicate=2), mw.make_mesh(mw.Layout(tp=2)))


@ranks(2)
def test_a_size_that_does_not_cut_is_refused(world):
    layout, model = mw.Layout(tp=2), tiny()
    model.body[0]["into"] = nn.Linear(8, 13)
    with pytest.raises(ConfigError, match=r"layout.tp = 2 must divide dim 0 of body.0.into.weight"):
        mw.parallelize(model, layout, mw.make_mesh(layout), plan=PLAN)


def test_the_guide_shows_lines_of_the_example():
    guide = EXAMPLE.parents[1] / "docs" / "guides" / "own-loop.md"
    found = re.findall(r"^```py\n(.*?)^```", guide.read_text(), re.MULTILINE | re.DOTALL)
    shown = {line.strip() for block in found for line in block.splitlines()}
    assert len(shown) > 10
    # What such a loop cannot do without begins and ends it.
    assert {"dist.init_process_group(backend)", "os._exit(0)"} <= shown
    assert shown <= {line.strip() for line in EXAMPLE.read_text().splitlines()}
