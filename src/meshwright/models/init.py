"""Initial weights, each from its own seed: independent of mesh, order and device."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Final

import torch
from torch import Tensor

from meshwright.models.transformer import Transformer
from meshwright.spec.model import ModelSpec

# Values that are drawn at once.
_PIECE: Final = 1 << 22
# Rates of decays of Gated DeltaNet; away from 0, whose logarithm is infinite. As in transformers.
_RATES: Final = (0.01, 16.0)
_RESIDUAL_OUTPUTS = (".attn.o.weight", ".attn.out.weight", ".down.weight")


def parameter_seed(seed: int, name: str) -> int:
    """Return the 63-bit generator seed of one parameter: SHA-256 of the run's seed and the name."""
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def weight_std(name: str, spec: ModelSpec) -> float:
    """Return the standard deviation of a matrix.

    `init_std`, and for the two projections into the residual stream `init_std / sqrt(2 n_layers)`:
    GPT-2, "Language Models are Unsupervised Multitask Learners", section 2.3.
    """
    if name.endswith(_RESIDUAL_OUTPUTS):
        return spec.init_std / math.sqrt(2 * spec.n_layers)
    return spec.init_std


def norm_adds_one(name: str, spec: ModelSpec) -> bool:
    """Whether a parameter is the weight of a norm that multiplies by `1 + weight`."""
    return spec.norm_plus_one and name.endswith("norm.weight") and "gated_norm" not in name


def init_parameter(
    name: str,
    shape: Sequence[int],
    spec: ModelSpec,
    seed: int,
    rows: tuple[int, int] | None = None,
    on_piece: Callable[[], None] = lambda: None,
) -> Tensor:
    """Return the initial values of a parameter or buffer, fp32 on the CPU.

    `rows` selects rows (start, stop); None: all. Matrices are normal with `weight_std`, norms start
    as the factor 1, biases and sinks as 0. For Gated DeltaNet, `a_log` is the logarithm of a
    uniform decay rate, and `dt_bias` is 1. LoRA's A is uniform up to `1 / sqrt(in)`, as in PEFT,
    its B is 0. The CPU's generator draws from the first row on, so that every device and every
    sharding starts alike; rows before `rows` are skipped, and those after are not drawn. `on_piece`
    is called before each piece of values is drawn.
    """
    first, end = rows or (0, shape[0])
    size = (end - first, *shape[1:])
    is_bias = name.endswith((".bias", ".sinks", ".correction", ".lora_b"))
    if is_bias or (len(shape) == 1 and norm_adds_one(name, spec)):
        return torch.zeros(size, device="cpu")
    generator = torch.Generator(device="cpu").manual_seed(parameter_seed(seed, name))
    if name.endswith(".a_log"):
        rates = torch.empty(*shape, dtype=torch.float32, device="cpu")
        return rates.uniform_(*_RATES, generator=generator).log_()[first:end]
    if len(shape) == 1:
        return torch.ones(size, device="cpu")
    if name.endswith(".lora_a"):
        bound = 1 / math.sqrt(shape[-1])
        drawn = torch.empty(*shape, dtype=torch.float32, device="cpu")
        return drawn.uniform_(-bound, bound, generator=generator)[first:end]
    row, std = math.prod(shape[1:]), weight_std(name, spec)
    values = torch.empty(math.prod(size), dtype=torch.float32, device="cpu")
    for start, stop in _pieces(math.prod(shape), end * row):
        on_piece()
        if stop <= first * row:
            # One word of the generator for each value, as `normal_` takes them; the fastest way.
            torch.empty(stop - start, dtype=torch.uint8, device="cpu").random_(generator=generator)
            continue
        drawn = torch.empty(stop - start, dtype=torch.float32, device="cpu")
        drawn.normal_(0.0, std, generator=generator)
        low, high = max(start, first * row), min(stop, end * row)
        values[low - first * row : high - first * row] = drawn[low - start : high - start]
    return values.view(size)


def _pieces(count: int, end: int) -> Iterator[tuple[int, int]]:
    """Yield (start, stop) of the pieces in which `count` values are drawn, until `end` is covered.

    `normal_` draws 16 values together, and redraws the last 16 if the count is not a multiple of
    16: a piece is a multiple of 16, and the last one has at least 16.
    """
    starts = list(range(0, count, _PIECE))
    if len(starts) > 1 and count - starts[-1] < 16:
        starts.pop()
    for start, stop in pairwise([*starts, count]):
        if start < end:
            yield start, stop


@torch.no_grad()
def init_model(model: Transformer, spec: ModelSpec, seed: int) -> Transformer:
    """Initialise all tensors of a model, or of a pipeline stage, in place, and its rotary tables.

    Returns the model.
    """
    for name, tensor in model.state_dict().items():
        tensor.copy_(init_parameter(name, tensor.shape, spec, seed))
    model.init_tables(next(model.parameters()).device)
    return model
