"""Wraps the functions that clip gradients, in every module that has imported them."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

from torch import Tensor

# Where functions are that clip: (parameters, max_norm, ...), or with the norm as third argument.
_CLIPPERS: Final = (
    ("torch.nn.utils.clip_grad", "clip_grad_norm_"),
    ("torch.nn.utils", "clip_grads_with_norm_"),
    ("meshwright.parallel.user_models.parallelize", "clip_grad_norm"),
)


@contextlib.contextmanager
def around_clipping(
    around: Callable[[Callable[[], Any], float, Sequence[Tensor] | None], Any],
) -> Iterator[None]:
    """Inside the `with` block, replace torch's gradient clipping by `around(clip, max_norm,
    parameters)`, in every module that imported it.

    `clip()` clips, and returns the norm. `parameters` is None if the norm counts others than the
    parameters of the call.
    """
    homes = [(sys.modules.get(home), name) for home, name in _CLIPPERS]
    originals = [getattr(home, name) for home, name in homes if hasattr(home, name)]
    changed: list[tuple[Any, str, Any]] = []

    def wrapped(original: Callable[..., Any]) -> Callable[..., Any]:
        def clip(parameters: Any, max_norm: float, *args: Any, **kwargs: Any) -> Any:
            has_norm = original.__name__.endswith("clip_grads_with_norm_")
            given = [parameters] if isinstance(parameters, Tensor) else list(parameters)

            def proceed() -> Any:
                norm = original(given, max_norm, *args, **kwargs)
                return [*args, *kwargs.values()][0] if has_norm else norm

            return around(proceed, max_norm, None if has_norm else given)

        return clip

    for original in originals:
        ours = wrapped(original)
        for module in list(sys.modules.values()):
            names = list(getattr(module, "__dict__", {}).items())
            for name in [name for name, value in names if value is original]:
                changed.append((module, name, original))
                setattr(module, name, ours)
    fsdp = sys.modules.get("torch.distributed.fsdp.fully_sharded_data_parallel")
    if fsdp is not None:
        method = fsdp.FullyShardedDataParallel.clip_grad_norm_

        def clip_fsdp(self: Any, max_norm: float, *args: Any, **kwargs: Any) -> Any:
            return around(lambda: method(self, max_norm, *args, **kwargs), max_norm, None)

        changed.append((fsdp.FullyShardedDataParallel, "clip_grad_norm_", method))
        fsdp.FullyShardedDataParallel.clip_grad_norm_ = clip_fsdp
    try:
        yield
    finally:
        for module, name, original in changed:
            setattr(module, name, original)


def full(tensor: Any) -> Tensor:
    """Return the whole tensor of a DTensor (a collective); a plain tensor unchanged."""
    gathered: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return gathered


def number_of(value: Any) -> float:
    """Return a norm, a number or tensor, as a float; a collective for a DTensor."""
    return float(full(value)) if isinstance(value, Tensor) else float(value)
