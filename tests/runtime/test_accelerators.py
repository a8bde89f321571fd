"""What a start says on machines with GPUs that it can use, cannot use, or is not to use."""

import platform
import sys

import pytest

from meshwright.cli import main
from meshwright.errors import ConfigError
from meshwright.runtime import doctor
from meshwright.runtime.checks import start as checks
from meshwright.runtime.machines.machine import (
    Build,
    check_build,
    find_gpus,
    gpu_memory,
    torch_build,
    unused_note,
)
from meshwright.runtime.measure import benchmark
from meshwright.spec.loading import load_config
from meshwright.units import GIB, MIB

CPU_BUILD = """from typing import Optional

__version__ = '2.13.0+cpu'
cuda: Optional[str] = None
hip: Optional[str] = None
"""
CUDA_BUILD = CPU_BUILD.replace("+cpu", "+cu130").replace(
    "cuda: Optional[str] = None", "cuda = '13.0'"
)
ROCM_BUILD = CPU_BUILD.replace("+cpu", "+rocm7").replace("hip: Optional[str] = None", "hip = '7.0'")
PCI = "proc/driver/nvidia/gpus/0000:01:00.{}/information"
NODES = "sys/class/kfd/kfd/topology/nodes/{}/properties"


def machine(root, **files):
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.fixture
def nvidia(tmp_path):
    return machine(tmp_path, **{PCI.format(at): "Model: NVIDIA H100" for at in range(2)})


@pytest.fixture
def amd(tmp_path):
    # The first node is the CPU.
    units = {NODES.format(at): f"cpu_cores_count 8\nsimd_count {at * 304}\n" for at in range(3)}
    return machine(tmp_path, **units)


@pytest.fixture
def wsl(tmp_path):
    return machine(tmp_path, **{"dev/dxg": "", "usr/lib/wsl/lib/libcuda.so.1": ""})


def build(root, text):
    (root / "version.py").write_text(text)
    return torch_build(root / "version.py")


def test_a_torch_says_what_it_was_built_for(tmp_path):
    assert build(tmp_path, CPU_BUILD) == Build("2.13.0+cpu")
    assert build(tmp_path, CUDA_BUILD) == Build("2.13.0+cu130", cuda="13.0")
    assert build(tmp_path, ROCM_BUILD) == Build("2.13.0+rocm7", hip="7.0")
    assert torch_build(tmp_path / "nowhere.py") is None
    here = torch_build()
    import torch

    assert here == Build(torch.__version__, torch.version.cuda, torch.version.hip)


@pytest.mark.parametrize(
    ("where", "text", "told"),
    [
        ("nvidia", CPU_BUILD, "2 NVIDIA GPUs, but torch 2.13.0+cpu was built for CPUs only"),
        ("nvidia", ROCM_BUILD, "2 NVIDIA GPUs, but torch 2.13.0+rocm7 was built for ROCm 7.0"),
        ("amd", CPU_BUILD, "2 AMD GPUs, but torch 2.13.0+cpu was built for CPUs only"),
        ("amd", CUDA_BUILD, "2 AMD GPUs, but torch 2.13.0+cu130 was built for CUDA 13.0"),
        ("wsl", CPU_BUILD, "1 NVIDIA GPU, but torch 2.13.0+cpu was built for CPUs only"),
        ("nvidia", CUDA_BUILD, None),
        ("amd", ROCM_BUILD, None),
        ("wsl", CUDA_BUILD, None),
    ],
)
def test_gpus_that_torch_was_not_built_for_are_refused(where, text, told, request):
    root = request.getfixturevalue(where)
    found, built = find_gpus({}, root), build(root, text)
    if told is None:
        check_build("cuda", found, built)
        return
    with pytest.raises(ConfigError) as error:
        check_build("cuda", found, built)
    assert told in str(error.value)
    assert "cluster.device = 'cpu'" in str(error.value)
    check_build("cpu", found, built)  # as asked for


@pytest.fixture
def without_cuda(monkeypatch, nvidia):
    """A machine with the driver of two GPUs, and a torch for CPUs."""
    monkeypatch.setattr(find_gpus, "__defaults__", (nvidia,))
    for room in (benchmark, checks, doctor):
        monkeypatch.setattr(room, "torch_build", lambda: Build("2.13.0+cpu"))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.chdir(nvidia)


@pytest.mark.parametrize(
    "words",
    [
        ["train"],
        ["bench", "device"],
        ["bench", "layouts", "cluster.preset=h100-sxm", "--layout", "dp2 mb2"],
        ["doctor"],
    ],
    ids=" ".join,
)
def test_a_start_without_cuda_says_so_before_any_rank(without_cuda, words, capfd, nvidia):
    code = main(words)
    told = " ".join("".join(capfd.readouterr()).split())
    assert code in (1, 2), told  # 1: what doctor has found
    assert "this machine has 2 NVIDIA GPUs, but torch 2.13.0+cpu was built for CPUs only" in told
    assert "pytorch.org/get-started has the command" in told
    assert not (nvidia / "runs").exists()


def test_gpus_that_are_not_used_are_told(nvidia, tmp_path):
    hidden = find_gpus({"CUDA_VISIBLE_DEVICES": ""}, nvidia)
    assert (hidden.present, hidden.visible) == (2, 0)
    told = unused_note("auto", "cpu", hidden)
    assert "CUDA_VISIBLE_DEVICES hides the 2 NVIDIA GPU(s)" in told
    assert unused_note("cpu", "cpu", hidden) is None
    assert find_gpus({"CUDA_VISIBLE_DEVICES": "1"}, nvidia).visible == 1
    assert find_gpus({"CUDA_VISIBLE_DEVICES": "0,1,2,3"}, nvidia).visible == 2
    # A variable makes no GPU.
    assert find_gpus({"CUDA_VISIBLE_DEVICES": "0"}, tmp_path / "bare") is None


def test_gpus_of_apple_and_intel_are_told_and_refused_by_name(tmp_path, monkeypatch):
    monkeypatch.setattr(platform, "machine", lambda: "arm64")
    told = unused_note("auto", "cpu", None, tmp_path, "Darwin")
    assert "GPUs of Apple (torch's mps) are not supported" in told
    assert unused_note("auto", "cpu", None, tmp_path, "Linux") is None
    card = machine(tmp_path, **{"sys/class/drm/card0/device/vendor": "0x8086\n"})
    (card / "drivers/xe").mkdir(parents=True)
    (card / "sys/class/drm/card0/device/driver").symlink_to(card / "drivers/xe")
    assert "GPUs of Intel (torch's xpu)" in unused_note("auto", "cpu", None, card, "Linux")
    for name, vendor in (("mps", "Apple"), ("xpu", "Intel")):
        with pytest.raises(ConfigError, match=f"GPUs of {vendor} are not supported"):
            load_config(None, [f"cluster.device={name}"])


def test_a_driver_says_how_much_memory_its_gpus_have(tmp_path):
    told = (sys.executable, "-c", "print('24564\\n12288\\n24564')")
    silent = (
        (sys.executable, "-c", "print('[N/A]')"),
        (sys.executable, "-c", "print('9 devices were lost'); raise SystemExit(6)"),
        (str(tmp_path / "no-such-program"),),
    )
    assert gpu_memory(tmp_path, told) == 12288 * MIB
    assert [gpu_memory(tmp_path, command) for command in silent] == [None] * 3
    total = "sys/class/drm/card{}/device/mem_info_vram_total"
    root = machine(tmp_path, **{total.format(at): f"{at * 16 * GIB}\n" for at in (1, 2)})
    assert [gpu_memory(root, command) for command in silent] == [16 * GIB] * 3
    assert gpu_memory(root, told) == 12288 * MIB  # a laptop's second one is AMD's
