"""What the compiler joins in blocks and in the loss, compiled ahead for three kinds of GPUs.

It needs Triton, which PyTorch's builds for CPUs do not bring: `pip install triton`.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "kernels_ahead.py"
# By kind of block how many kernels its forward and backward have beside products and attention, at
# most, and what must be in one of them together: a norm, an activation and its factor.
MOST = {"llama": 14, "qwen3": 24, "gemma2": 18, "neox": 14, "loss": 2}
JOINED = {
    "llama": ["add_div_linalg_vector_norm_mul_pow_rsqrt", "mul_silu"],
    "qwen3": ["linalg_vector_norm", "mul_silu"],
    "gemma2": ["add_div_linalg_vector_norm_mul_pow_rsqrt", "gelu_mul"],
    "neox": ["add_native_layer_norm", "gelu"],
    "loss": ["amax"],
}


@pytest.mark.slow
def test_blocks_and_loss_have_few_kernels_and_they_compile_for_each_gpu():
    pytest.importorskip("triton", reason="triton is not installed")
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(
        [sys.executable, SCRIPT], capture_output=True, text=True, env=environ, timeout=900
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    assert set(found) == set(MOST)
    for kind, kernels in found.items():
        assert len(kernels) <= MOST[kind], kind
        for together in JOINED[kind]:
            assert any(together in name for name in kernels), (kind, together)
        for name, sizes in kernels.items():
            assert len(sizes) == 3, name  # sm_80, sm_90, sm_100
            assert min(sizes) > 1000, name
