"""First weights: stable, independent of order, with the right spread."""

import hashlib
import math
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from meshwright.comm.flight_recorder import FlightRecorder
from meshwright.comm.flight_recorder_file import read_flight_recorder
from meshwright.models import build_model, init, init_model, init_parameter
from meshwright.models.init import parameter_seed
from meshwright.spec.loading import load_config
from meshwright.spec.parts import parts
from meshwright.spec.resolve import model_spec
from meshwright.training.between_steps import weights_source

SPEC = model_spec(vocab_size=512, dim=128, n_layers=8, n_heads=4, context=64, attention_bias=True)


def digest(state):
    total = hashlib.sha256()
    for name in sorted(state):
        total.update(name.encode() + state[name].detach().numpy().tobytes())
    return total.hexdigest()


def test_order_does_not_matter():
    model = init_model(build_model(SPEC, device="cpu"), SPEC, seed=3)
    torch.manual_seed(99)  # the global generator has no part in it
    reverse = {
        part.name: init_parameter(part.name, part.shape, SPEC, seed=3)
        for part in reversed(parts(SPEC))
    }
    assert digest(dict(model.named_parameters())) == digest(reverse)


def test_seed_and_name_matter():
    shape = (8, 8)
    first = init_parameter("layers.0.attn.q.weight", shape, SPEC, seed=0)
    assert not torch.equal(first, init_parameter("layers.0.attn.q.weight", shape, SPEC, seed=1))
    assert not torch.equal(first, init_parameter("layers.0.attn.k.weight", shape, SPEC, seed=0))
    assert torch.equal(first, init_parameter("layers.0.attn.q.weight", shape, SPEC, seed=0))


def test_seeds_do_not_change_between_versions():
    # SHA-256 by the sha256sum program of the texts "0:embed.weight" and "7:norm.weight".
    assert parameter_seed(0, "embed.weight") == 0x8F91D8BAC53B8FD8 >> 1
    assert parameter_seed(7, "norm.weight") == 0x1119418D9F06281C >> 1


def test_a_device_as_default_does_not_matter():
    plain = init_parameter("embed.weight", (16, 8), SPEC, seed=0)
    with torch.device("meta"):
        inside = init_parameter("embed.weight", (16, 8), SPEC, seed=0)
    assert torch.equal(plain, inside)


@pytest.mark.parametrize("part", parts(SPEC), ids=lambda part: part.name)
def test_spread(part):
    values = init_parameter(part.name, part.shape, SPEC, seed=0)
    assert values.shape == part.shape
    assert values.dtype == torch.float32
    if part.name.endswith("bias"):
        assert (values == 0).all()
    elif "norm" in part.name:
        assert (values == 1).all()
    else:
        into_stream = part.name.endswith(("attn.o.weight", "mlp.down.weight"))
        std = 0.02 / math.sqrt(2 * 8) if into_stream else 0.02
        # Five standard errors of the estimates.
        assert abs(values.std().item() / std - 1) < 5 / math.sqrt(2 * part.numel)
        assert abs(values.mean().item()) < 5 * std / math.sqrt(part.numel)


@pytest.mark.slow
def test_building_does_not_load_the_compiler():
    code = (
        "import sys\n"
        "from meshwright.models import build_model, init_model\n"
        "from meshwright.spec.resolve import model_spec\n"
        "spec = model_spec(dim=16, n_heads=2, n_layers=1)\n"
        "init_model(build_model(spec, device='cpu'), spec, 0)\n"
        "print('torch._dynamo' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


@pytest.mark.parametrize("shape", [(40, 24), (7, 3), (3, 5), (64, 16), (4, 6, 10)])
def test_some_rows_are_drawn_as_they_are_in_the_whole(shape, monkeypatch):
    name = "layers.0.attn.q.weight"
    whole = init_parameter(name, shape, SPEC, seed=5)
    moves = []
    monkeypatch.setattr(init, "_PIECE", 32)
    for first in range(shape[0]):
        for end in range(first + 1, shape[0] + 1):
            rows = (first, end)
            found = init_parameter(name, shape, SPEC, 5, rows, lambda: moves.append(0))
            assert torch.equal(found, whole[first:end]), rows
    assert len(moves) > shape[0]


def test_rows_that_others_hold_are_not_computed(monkeypatch):
    drawn = []
    normal = torch.Tensor.normal_

    def noted(x, *args, **kwargs):
        drawn.append(x.numel())
        return normal(x, *args, **kwargs)

    monkeypatch.setattr(init, "_PIECE", 64)
    monkeypatch.setattr(torch.Tensor, "normal_", noted)
    init_parameter("layers.0.attn.q.weight", (64, 16), SPEC, 5, (16, 32))
    assert sum(drawn) == 16 * 16


def test_the_flight_record_moves_while_weights_are_drawn(tmp_path, monkeypatch):
    monkeypatch.setattr(init, "_PIECE", 64)
    recorder = FlightRecorder.open(tmp_path / "0", 0, 1)
    before = read_flight_recorder(tmp_path / "0").moves
    job = SimpleNamespace(config=load_config(None, []))
    source = weights_source(job, SimpleNamespace(recorder=recorder))
    source("layers.0.attn.q.weight", (64, 16), [(0, 64), (0, 16)])
    assert read_flight_recorder(tmp_path / "0").moves >= before + 64 * 16 // 64
