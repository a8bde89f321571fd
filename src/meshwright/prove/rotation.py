"""RoPE frequencies of the reference model, with all kinds of scaling; shares no code with
`models.rope`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from meshwright.spec.model import ModelSpec
from meshwright.spec.rotary import RopeScaling


def rotation(spec: ModelSpec, layer: int, length: int) -> tuple[Tensor, float]:
    """Return a layer's RoPE frequencies, fp32 `[rotary_dim / 2]` in radians per position, and the
    factor of cosines and sines.

    `length` is the number of tokens of the document: longrope's frequencies depend on it.
    """
    layer_theta, scaling = spec.layer(layer).rope_theta, spec.rope_scaling
    base = spec.rope_theta if layer_theta is None else layer_theta
    plain = 1.0 / base ** (torch.arange(0, spec.rotary_dim, 2).float() / spec.rotary_dim)
    if scaling is None or layer_theta is not None:
        return plain, 1.0
    if scaling.kind == "linear":
        return plain / scaling.factor, 1.0
    if scaling.kind == "llama3":
        return _stretched(plain, scaling), 1.0
    if scaling.kind == "yarn":
        return _by_turns(plain, scaling, base), _yarn_length(scaling)
    fits = length <= scaling.original_context
    parts = torch.tensor(scaling.short_factor if fits else scaling.long_factor)
    # arXiv:2402.13753 and its code: sqrt(1 + ln s / ln L).
    growth = math.log(max(scaling.factor, 1.0), scaling.original_context)
    given = scaling.attention_factor
    return plain / parts, (1 + growth) ** 0.5 if given is None else given


def _by_turns(plain: Tensor, scaling: RopeScaling, base: float) -> Tensor:
    """Return YaRN's frequencies: low ones are divided by the scaling factor, high ones stay, and a
    ramp connects them. arXiv:2309.00071, section 3.2.

    The paper's ramp is linear in the number of turns; all implementations have it linear in the
    index of the pair.
    """
    log_turns = math.log(scaling.original_context / (2 * math.pi))
    step = math.log(base) / len(plain)  # by which the log of the turns falls from pair to pair
    ends = [(log_turns - math.log(beta)) / step for beta in (scaling.beta_fast, scaling.beta_slow)]
    if scaling.truncate:
        ends = [math.floor(ends[0]), math.ceil(ends[1])]
    low, high = max(ends[0], 0), min(ends[1], 2 * len(plain) - 1)
    high = low + 0.001 if low == high else high
    divided = torch.tensor([(i - low) / (high - low) for i in range(len(plain))]).clamp(0, 1)
    return plain * (1 - divided + divided / scaling.factor)


def _yarn_length(scaling: RopeScaling) -> float:
    """Return YaRN's factor of cosines and sines: arXiv:2309.00071, section 3.4, or by DeepSeek's
    `mscale`.
    """
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    grown = 0.1 * math.log(max(scaling.factor, 1.0))
    above, below = scaling.mscale, scaling.mscale_all_dim
    if above is None or below is None:
        return 1 + grown
    return (1 + above * grown) / (1 + below * grown)


def _stretched(plain: Tensor, scaling: RopeScaling) -> Tensor:
    """Return Llama 3.1's frequencies: turns of the context that was trained with decide."""
    turns = scaling.original_context * plain / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    retained = ((turns - low) / (high - low)).clamp(0, 1)
    return plain * (retained + (1 - retained) / scaling.factor)
