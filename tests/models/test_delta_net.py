"""Gated DeltaNet: its norm and its gates."""

import torch
from torch.nn import functional as F

from meshwright.models.delta_net import _GatedNorm, gates


def test_the_gated_norm_and_the_gates_have_autograds_gradients():
    generator = torch.Generator().manual_seed(0)
    x, gate, weight = (
        torch.randn(*size, generator=generator, dtype=torch.float64).requires_grad_()
        for size in ((2, 3, 4, 5), (2, 3, 4, 5), (5,))
    )
    assert torch.autograd.gradcheck(
        lambda *leaves: _GatedNorm.apply(*leaves, 1e-3), (x, gate, weight)
    )
    norm = x / (x.square().mean(-1, keepdim=True) + 1e-3).sqrt() * weight * F.silu(gate)
    torch.testing.assert_close(_GatedNorm.apply(x, gate, weight, 1e-3), norm)
    b, a, a_log, dt_bias = (
        torch.randn(*size, generator=generator, dtype=torch.float64).requires_grad_()
        for size in ((2, 3, 6), (2, 3, 6), (6,), (6,))
    )
    assert torch.autograd.gradcheck(gates, (b, a, a_log, dt_bias))
    strength, decay = gates(b, a, a_log, dt_bias)
    torch.testing.assert_close(strength, b.sigmoid())
    torch.testing.assert_close(decay, -a_log.exp() * F.softplus(a + dt_bias))
