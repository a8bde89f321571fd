"""What is chosen on GPUs where a config leaves it open: precision, compiling, TF32, microbatch."""

import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from meshwright.bench import calibrate
from meshwright.bench import device as on_device
from meshwright.cost.calibration import as_toml, parse_calibration, shipped_calibration
from meshwright.cost.catalogue import catalogue, find_device
from meshwright.cost.rows import read_row
from meshwright.kernels import fp32_matmuls
from meshwright.kernels.fp32_matmuls import take_route, target_of
from meshwright.layout import Machine, resolve_layout
from meshwright.models.attention import attend, spread
from meshwright.planner.choices import fastest, unmeasured
from meshwright.planner.plan import cost_inputs_of
from meshwright.program.lower import lower
from meshwright.program.operations import operations
from meshwright.program.target import Target, takes_tf32
from meshwright.prove.case import Case
from meshwright.prove.suite import _in_full
from meshwright.runtime.checks import notes
from meshwright.runtime.pricing import planned
from meshwright.runtime.pricing.planned import cost_inputs_on, on_machine, settled
from meshwright.spec.dump import portable
from meshwright.spec.loading import load_config
from meshwright.spec.parts import Part
from meshwright.spec.training import OptimizerSpec
from meshwright.training.optimizer import build_optimizer
from meshwright.training.run_folder import Job, RunFolder
from meshwright.units import GIB

GPUS = Machine("cuda", 8, 32, "CUDA GPU", is_fixed=True)
CPU = Machine("cpu", 2, 2, "two cores", is_fixed=False)
H100 = "NVIDIA H100 80GB HBM3"
BIG = ["model.preset=llama-3-8b", "train.seq_len=4096", "train.batch=64", "layout.zero=3"]
CUDA = torch.device("cuda")


def here(monkeypatch, name=H100):
    monkeypatch.setattr(planned, "gpu_name", lambda: name)


def on_gpus(*words, lacks=None):
    return settled(load_config(None, list(words)), GPUS, lacks)


@pytest.mark.parametrize(
    ("name", "precision"),
    [
        (H100, "bf16"),
        (None, "bf16"),  # AMD's driver, and WSL2's, say no name
        ("Tesla V100-SXM2-16GB", "fp16"),
        ("Tesla T4", "fp16"),
        ("NVIDIA GeForce RTX 2080 Ti", "fp16"),
        ("NVIDIA GeForce RTX 4090", "bf16"),
    ],
)
def test_a_gpu_trains_in_the_precision_that_its_units_have(monkeypatch, name, precision):
    here(monkeypatch, name)
    found = on_gpus()
    assert found.train.precision == precision
    assert found.origins["train.precision"].startswith(
        "derived: the fastest precision for matmuls on "
    )
    assert (name or "this GPU") in found.origins["train.precision"]


def test_what_is_given_stays_and_a_cpu_keeps_fp32(monkeypatch):
    here(monkeypatch)
    given = on_gpus("train.precision=fp32", "train.compile=false", "layout.microbatch=2")
    assert (given.train.precision, given.train.compile) == ("fp32", False)
    assert given.layout.microbatch == 2
    assert settled(load_config(None, []), CPU) == load_config(None, [])


def test_a_preset_of_gpus_has_it_too_whatever_the_model():
    assert load_config(None, ["cluster.preset=h100-sxm"]).train.precision == "bf16"
    assert load_config(None, ["cluster.preset=v100-32gb"]).train.precision == "fp16"
    assert load_config(None, ["cluster.preset=h100-sxm", *BIG]).train.precision == "bf16"
    assert load_config(None, ["cluster.preset=cpu"]).train.precision == "fp32"


def test_the_planner_plans_for_that_precision(monkeypatch):
    here(monkeypatch)
    config = on_machine(load_config(None, []), GPUS)
    assert config.train.precision == "bf16"
    assert cost_inputs_of(config).products == "bf16"


@pytest.mark.parametrize("name", [H100, "Quadro FX"])
def test_blocks_are_compiled_where_a_compiler_is(monkeypatch, name):
    here(monkeypatch, name)
    found = on_gpus()
    assert found.train.compile is True
    assert "train.compile = false turns it off" in found.origins["train.compile"]
    without = on_gpus(lacks="triton is not installed")
    assert without.train.compile is False
    assert without.origins["train.compile"] == "auto: triton is not installed"
    assert on_gpus("train.engine=deepspeed").train.compile is False
    cpu = unmeasured(load_config(None, []).train, None, on_gpus=False)
    assert not cpu.compiled
    assert "bench device" in cpu.reason


def test_a_gain_that_was_measured_decides(monkeypatch, tmp_path):
    here(monkeypatch)
    path = tmp_path / "here.toml"
    found = {"compile.gain.bf16": 0.9, "compile.seconds.bf16": 1.0}
    path.write_text(as_toml({"h100": found}, "2026-11-22", "a test"))
    slower = on_gpus(f"cluster.calibration={path}")
    assert slower.train.compile is False
    assert "would save nothing" in slower.origins["train.compile"]


def test_the_microbatch_is_the_fastest_that_fits(monkeypatch):
    here(monkeypatch)
    config = on_gpus(*BIG)
    layout = resolve_layout(config, GPUS)
    setting = cost_inputs_on(config, GPUS, layout)
    assert config.layout.microbatch == layout.microbatch
    assert "80.00 GiB, as predicted" in config.origins["layout.microbatch"]
    assert portable(config).layout.microbatch is None  # another machine has other memory
    device = setting.cluster.device
    small = replace(setting.cluster, device=replace(device, memory=device.memory * 2 // 3))
    less = fastest(replace(setting, cluster=small), layout)
    assert less is None or less.layout.microbatch < layout.microbatch
    least = replace(setting.cluster, device=replace(device, memory=1 << 30))
    assert fastest(replace(setting, cluster=least), layout) is None


@pytest.mark.parametrize("name", ["NVIDIA GeForce RTX 3060", None])
def test_a_gpu_that_nobody_knows_has_a_microbatch_that_fits_its_memory(monkeypatch, name):
    here(monkeypatch, name)
    usual = resolve_layout(load_config(None, BIG), GPUS).microbatch
    found = {}
    for memory in (160, 80, 4):
        monkeypatch.setattr(planned, "gpu_memory", lambda memory=memory: memory * GIB)
        config = on_gpus(*BIG)
        found[memory] = config.layout.microbatch
        if found[memory] is not None:
            origin = config.origins["layout.microbatch"]
            assert origin.startswith("derived: the usual number of tokens, or as many as fit, with")
            assert f"of {memory}.00 GiB, as predicted" in origin
            assert portable(config).layout.microbatch is None
    assert found == {160: usual, 80: usual // 2, 4: None}
    monkeypatch.setattr(planned, "gpu_memory", lambda: None)  # the driver does not say it
    assert on_gpus(*BIG).layout.microbatch is None


def test_the_start_says_what_was_chosen(monkeypatch):
    here(monkeypatch)
    monkeypatch.setattr(notes, "find_gpus", lambda environ: None)
    for words, matmul in (([], "TF32"), (["train.matmul=torch"], None)):
        config = on_gpus(*words)
        layout = resolve_layout(config, GPUS)
        job = Job(config, layout, GPUS, Path(), RunFolder(Path()), SimpleNamespace())
        told = "\n".join(notes.run_notes(job, {}))
        assert "train.precision = bf16, derived" in told
        assert f"layout.microbatch = {layout.microbatch}, derived" in told
        assert "blocks are compiled: on GPUs" in told
        assert ("train.matmul=torch" in told) == (matmul is not None)


def test_what_stays_in_fp32_takes_tf32_unless_asked_not_to(monkeypatch):
    asked = []
    monkeypatch.setattr(torch, "set_float32_matmul_precision", asked.append)
    train = load_config(None, []).train
    for matmul in ("auto", "torch"):
        take_route(matmul, CUDA)
        target = target_of(train.model_copy(update={"matmul": matmul}), CUDA)
        assert target.tf32 is takes_tf32(matmul)
    take_route("torch", torch.device("cpu"))
    assert asked == ["high", "highest"]
    assert fp32_matmuls.target_of(train, torch.device("cpu")).tf32 is False


def test_a_proof_has_its_products_in_full_fp32():
    config = load_config(None, [])
    case = Case(config.model, config.train, resolve_layout(config, CPU))
    assert _in_full(case, CUDA).train.matmul == "torch"
    assert _in_full(case, torch.device("cpu")) is case


def test_tf32_has_a_peak_of_its_own_and_is_priced_by_it():
    for device in catalogue()[0].values():
        if "tf32" in device.peaks:
            assert device.peaks["tf32"] / device.peaks["bf16"] == pytest.approx(0.5, rel=0.02)
    h100 = find_device("h100-sxm")
    assert h100.peak("fp32", tf32=True) == h100.peaks["tf32"] > h100.peak("fp32")
    assert find_device("v100-32gb").peak("fp32", tf32=True) == find_device("v100-32gb").peak("fp32")
    words = ["cluster.preset=h100-sxm", "train.precision=fp32"]
    auto, own = (
        cost_inputs_of(load_config(None, [*words, *more])) for more in ([], ["train.matmul=torch"])
    )
    assert auto.peak / own.peak == pytest.approx(h100.peaks["tf32"] / h100.peaks["fp32"])
    assert auto.kernels().peak > own.kernels().peak


def test_a_gpu_has_peaks_of_both_measured_and_products_are_priced_by_their_own(monkeypatch):
    taken, half = [], 16
    monkeypatch.setattr(calibrate, "take_route", lambda matmul, _: taken.append(matmul))

    def measured(device, precision, budget_s, shapes):
        rate = {"auto": 400e12, "torch": 50e12}[taken[-1]]
        shares = [math.prod(side / (side + half) for side in one.sides) for one in shapes]
        of = zip(shapes, shares, strict=True)
        return [(one, one.flops / (rate * share)) for one, share in of]

    monkeypatch.setattr(on_device, "products", measured)
    shapes = on_device.SIZES["cuda"].shapes
    constants, _ = calibrate._products(CUDA, "fp32", 0.1, shapes)
    assert taken[-1] == "auto"  # as what is measured next is computed
    assert 7.5 < constants["peak.tf32"] / constants["peak.fp32"] < 8.5
    kind = find_device("h100-sxm").kind
    own = parse_calibration(as_toml({kind: constants}, "", ""))
    every = replace(own, constants={**shipped_calibration().constants, **own.constants})
    words = ["cluster.preset=h100-sxm", "train.precision=fp32"]
    for matmul, rate in (("auto", 400e12), ("torch", 50e12)):
        found = cost_inputs_of(load_config(None, [*words, f"train.matmul={matmul}"]), every)
        assert found.kernels().peak == pytest.approx(rate, rel=1e-3)
        assert found.kernels().half == pytest.approx(half)


def test_rows_of_measurements_say_tf32_themselves():
    row = {"gpu": "A100", "layers": 4, "hidden": 512, "heads": 8, "seq": 512, "gbs": 8, "mbs": 1}
    row |= {"n_gpus": 8, "vocab": 32000, "framework": "megatron"}
    calibration = cost_inputs_of(load_config(None, [])).calibration
    peaks = {
        word: read_row({**row, "precision": word}, calibration).setting.peak
        for word in ("fp32", "tf32")
    }
    assert peaks == {"fp32": 19.5e12, "tf32": 156e12}


@pytest.mark.parametrize(
    ("dtype", "is_masked", "is_spread"),
    [
        (torch.float32, False, True),
        (torch.bfloat16, False, False),  # FlashAttention knows groups
        (torch.bfloat16, True, True),  # but no masks
    ],
)
def test_a_gpu_never_holds_all_scores_of_grouped_heads(monkeypatch, dtype, is_masked, is_spread):
    called = []

    def kernel(q, k, v, **how):
        called.append((k.shape[1], v.shape[1], how["enable_gqa"]))
        return torch.empty_like(q)

    monkeypatch.setattr(F, "scaled_dot_product_attention", kernel)
    with FakeTensorMode(), torch.no_grad():
        q = torch.empty(1, 8, 16, 64, dtype=dtype, device="cuda")
        k, v = (torch.empty(1, 2, 16, 64, dtype=dtype, device="cuda") for _ in range(2))
        mask = torch.ones(1, 1, 16, 16, dtype=torch.bool, device="cuda") if is_masked else None
        attend(q, k, v, mask)
    assert called == [(8, 8, False) if is_spread else (2, 2, True)]


def test_heads_that_share_keys_get_copies_of_the_same_ones():
    q, k, v = torch.randn(1, 8, 5, 4), torch.randn(1, 2, 5, 4), torch.randn(1, 2, 5, 4)
    one = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    other = F.scaled_dot_product_attention(q, spread(k, 8), spread(v, 8), is_causal=True)
    assert torch.allclose(one, other, atol=1e-6)


def test_the_program_keeps_the_copies():
    config = load_config(None, ["train.precision=fp32"])
    layout = resolve_layout(config, CPU)
    kept = []
    for device in ("cpu", "gpu"):
        program = lower(config.model, config.train, config.optimizer, layout, Target(device))
        (stage,) = program.stages
        found = operations(program, stage)
        kept.append(sum(one.saved_bytes * one.count for one in found if one.kind == "attention"))
    spec = config.model
    tokens = layout.microbatch * config.train.seq_len
    more = 2 * tokens * (spec.n_heads - spec.n_kv_heads) * spec.head_dim * 4
    assert kept[1] - kept[0] == spec.n_layers * more


def test_the_optimizer_takes_a_step_in_one_operation():
    found = []

    class VisibleKeys(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            found.append(func.overloadpacket.__name__)
            return func(*args, **(kwargs or {}))

    weights = [nn.Parameter(torch.zeros(8, 4)) for _ in range(3)]
    made = build_optimizer(weights, [Part("", (8, 4), ("ffn", "dim"))] * 3, OptimizerSpec())
    for one in weights:
        one.grad = torch.zeros_like(one)
    made.step()
    with VisibleKeys():
        made.step()
    # Of all weights together, and of the loss scale and clipping.
    assert [name for name in found if "foreach" in name or "adam" in name] == [
        "_foreach_add_",
        "_fused_adamw_",
    ]
