"""What the oldest torch that the package takes computes: compiled blocks, and ZeRO by FSDP2.

Its compiler has faults of its own, which newer ones hide. `python3 -m ci.extras oldest-torch` makes
an environment with it, and runs this.
"""

import re
import shutil
from importlib.metadata import requires

import pytest
import torch

from kept import kept_bytes
from meshwright.models import flex
from test_compile import LABELS, MODELS, SIZES, holds

# As metadata says it: "torch<2.14,>=2.11; extra ...", in either order.
OLDEST = next(
    found[1]
    for one in requires("meshwright")
    if (found := re.match(r"torch[<\d.,]*>=([\d.]+)", one))
)
EXPERTS = {**SIZES, "experts": 4, "top_k": 2, "n_kv_heads": 2}
MORE = {
    "gemma2": {**SIZES, "family": "gemma2", "n_kv_heads": 2, "layer_pattern": [{"window": 7}, {}]},
    "dropout": {**SIZES, "dropout": 0.1},
    "qwen3_moe": {**EXPERTS, "family": "qwen3_moe"},
    "gpt_oss": {**EXPERTS, "family": "gpt_oss"},
}
ALONE = tuple((family, "mb2", "fp32" if family == "gpt_oss" else "bf16") for family in MORE)
# Not compiled.
PLAIN = (
    ("llama", "shard2 zero2 mb1", "fp32"),
    ("llama", "shard2 zero3 mb1 recompute-full", "bf16"),
    ("llama", "cp2-ring tp2 sp mb1", "fp32"),
    ("qwen3_moe", "dp2 ep2 mb1", "fp32"),
    ("neox", "pp2 zbv v2 mb1", "fp32"),
)


pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not torch.__version__.startswith(f"{OLDEST}."), reason=f"torch is not {OLDEST}"
    ),
]


@pytest.mark.skipif(shutil.which("g++") is None, reason="the compiler needs g++")
@pytest.mark.parametrize(("family", "label", "precision"), [*LABELS, *ALONE])
def test_compiled_blocks_have_the_gradients_of_one_device(family, label, precision):
    holds({**MODELS, **MORE}[family], label, precision, compiles=True)


@pytest.mark.parametrize(("family", "label", "precision"), PLAIN)
def test_layouts_have_the_gradients_of_one_device(family, label, precision):
    holds({**MODELS, **MORE}[family], label, precision, compiles=False)


@pytest.mark.skipif(shutil.which("g++") is None, reason="the compiler needs g++")
def test_a_compiled_block_that_recomputes_keeps_its_input_alone():
    assert kept_bytes("mb2 recompute-full") == 0
    assert kept_bytes("mb2") > 0


def test_whether_triton_is_there_ends_no_graph():
    def asks(x):
        return x + 1 if flex.HAS_TRITON else x - 1

    x = torch.zeros(2)
    assert torch.compile(asks, backend="eager", fullgraph=True)(x).equal(asks(x))
