"""Kernels that the compiler makes of blocks and of the loss, compiled ahead for GPUs; needs Triton.

Without a GPU PyTorch's compiler writes Triton code for tensors of a CPU, by a setting of its own.
What it has written is caught here, and compiled by Triton for each architecture.
Run as `python kernels_ahead.py`: writes one JSON document.
"""

import importlib.util
import json
import re
import sys
import tempfile
from pathlib import Path

import torch
import torch._inductor.config as settings
import triton
from torch._inductor.async_compile import AsyncCompile
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from meshwright.models import build_model, init_model
from meshwright.parallel.loss import loss_and_gradient
from meshwright.spec.resolve import model_spec

ARCHITECTURES = (80, 90, 100)
SIZES = {"vocab_size": 4096, "dim": 256, "n_layers": 1, "n_heads": 4, "ffn_dim": 512}
KINDS = {
    "llama": {"n_kv_heads": 2},
    "qwen3": {"family": "qwen3", "n_kv_heads": 2},
    "gemma2": {"family": "gemma2", "n_kv_heads": 2, "layer_pattern": [{}]},
    "neox": {"family": "neox"},
}
TOKENS = 128


class Driver:
    """What Triton asks of a GPU that is not there."""

    def get_current_target(self):
        return GPUTarget("cuda", ARCHITECTURES[0], 32)

    def get_current_device(self):
        return 0

    def get_device_interface(self):
        return torch.cpu


class Nothing:
    """A kernel that is not launched."""

    def __getattr__(self, name):
        return lambda *_, **__: None


def caught(run):
    """Return name and source of each kernel that the compiler writes while something runs."""
    found = []

    def keep(self, name, source, device_str="cuda"):
        found.append((name, source))
        return Nothing()

    real, AsyncCompile.triton = AsyncCompile.triton, keep
    torch.compiler.reset()
    try:
        run()
    finally:
        AsyncCompile.triton = real
    return found


def of_block(**more):
    spec = model_spec(**{**SIZES, **more})
    model = init_model(build_model(spec, device="cpu"), spec, 0).to(torch.bfloat16)
    block = model.layers["0"]
    block.attn.rope.reach(TOKENS, torch.device("cpu"))
    x = torch.randn(2, TOKENS, spec.dim).bfloat16().requires_grad_()
    return caught(lambda: torch.compile(block.forward, fullgraph=True)(x).sum().backward())


def of_loss():
    logits = torch.randn(64, SIZES["vocab_size"]).bfloat16()
    targets, grad = torch.zeros(64, dtype=torch.int64), torch.ones(())
    return caught(lambda: torch.compile(loss_and_gradient)(logits, targets, -100, grad))


def compiled(name, source, folder):
    """Return the bytes of a kernel for each architecture."""
    meta = re.search(r"'signature': (\{[^}]*\})", source)
    signature = eval(meta[1])  # a literal of the compiler's own
    plain = source[: source.index("@triton_heuristics")] + source[source.index("@triton.jit") :]
    plain = plain.replace("triton_helpers.set_driver_to_cpu()", "")
    file = folder / f"{name}.py"
    file.write_text(plain)
    spec = importlib.util.spec_from_file_location(name, file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sizes = {
        arg: 16 if arg.startswith("R") else 8
        for arg, kind in signature.items()
        if kind == "constexpr"
    }
    kernel = getattr(module, name)
    places = {(kernel.arg_names.index(arg),): size for arg, size in sizes.items()}
    made = ASTSource(fn=kernel, signature=signature, constexprs=places)
    return [
        len(triton.compile(made, target=GPUTarget("cuda", one, 32)).asm["cubin"])
        for one in ARCHITECTURES
    ]


def main():
    settings.cpu_backend, settings.force_disable_caches, settings.compile_threads = (
        "triton",
        True,
        1,
    )
    triton.runtime.driver.set_active(Driver())
    found = {kind: of_block(**more) for kind, more in KINDS.items()} | {"loss": of_loss()}
    with tempfile.TemporaryDirectory() as path:
        sizes = {
            kind: {name: compiled(name, source, Path(path)) for name, source in kernels}
            for kind, kernels in found.items()
        }
    json.dump(sizes, sys.stdout)


if __name__ == "__main__":
    main()
