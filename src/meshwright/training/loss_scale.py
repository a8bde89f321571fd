"""The loss scale of fp16: as large as the gradients allow without overflow. No torch here."""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.spec.training import TrainSpec

START = 65536.0
# Doubled after this many steps without overflow, halved at one: arXiv:1710.03740, section 3.2, with
# the numbers of torch.amp.GradScaler.
GROWTH_STEPS = 2000


@dataclass
class LossScale:
    """The factor of the loss.

    `is_dynamic`: it follows the gradients. `skips`: a step that overflows is skipped; under fp16
    that is normal, otherwise something is wrong, and the config decides.
    """

    value: float = 1.0
    is_dynamic: bool = False
    skips: bool = False
    good_steps: int = 0

    @classmethod
    def of(cls, train: TrainSpec) -> LossScale:
        """Return the initial scale of a run: 1 unless the precision is fp16."""
        if train.precision != "fp16":
            return cls(skips=train.nonfinite == "skip")
        if train.loss_scale is not None:
            return cls(train.loss_scale, skips=True)
        return cls(START, is_dynamic=True, skips=True)

    @classmethod
    def settled(cls, train: TrainSpec) -> LossScale:
        """Return a constant scale for measurements: under fp16 the one that runs converge to."""
        scale = cls.of(train)
        return cls(2.0**10, skips=True) if scale.is_dynamic else scale

    def update(self, *, overflowed: bool) -> None:
        """Adapt to whether a step's gradients overflowed on any rank."""
        if not self.is_dynamic:
            return
        if overflowed:
            self.value, self.good_steps = max(self.value / 2, 2.0**-24), 0
            return
        self.good_steps += 1
        if self.good_steps == GROWTH_STEPS:
            self.value, self.good_steps = self.value * 2, 0
