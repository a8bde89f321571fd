"""Mamba-2: the steps of its tokens, and the norm of groups of features."""

import pytest
import torch
from torch.nn import functional as F

from meshwright.models.mamba import GroupNorm, steps


@pytest.mark.parametrize("limits", [None, (0.5, 1.1)])
def test_steps_have_autograds_gradients(limits):
    generator = torch.Generator().manual_seed(0)
    dt, a_log, dt_bias = (
        torch.randn(*size, generator=generator, dtype=torch.float64).requires_grad_()
        for size in ((2, 3, 6), (6,), (6,))
    )
    assert torch.autograd.gradcheck(lambda *leaves: steps(*leaves, limits), (dt, a_log, dt_bias))
    step, decay = steps(dt, a_log, dt_bias, limits)
    wanted = F.softplus(dt + dt_bias)
    wanted = wanted if limits is None else wanted.clamp(*limits)
    torch.testing.assert_close(step, wanted)
    torch.testing.assert_close(decay, -a_log.exp() * wanted)


@pytest.mark.parametrize("groups", [1, 3])
def test_the_norm_of_groups_has_autograds_gradients(groups):
    generator = torch.Generator().manual_seed(0)
    x, gate, weight = (
        torch.randn(*size, generator=generator, dtype=torch.float64).requires_grad_()
        for size in ((2, 3, 12), (2, 3, 12), (12,))
    )
    norm = GroupNorm(12, groups, 1e-3)
    assert torch.autograd.gradcheck(norm, (x, gate, weight))
    gated = (x * F.silu(gate)).unflatten(-1, (groups, -1))
    normed = gated / (gated.square().mean(-1, keepdim=True) + 1e-3).sqrt()
    torch.testing.assert_close(norm(x, gate, weight), normed.flatten(-2) * weight)
