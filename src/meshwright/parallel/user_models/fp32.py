"""Which weights of a user's model stay in fp32 under mixed precision: those transformers lists."""

from __future__ import annotations

import re
from collections.abc import Iterator

from torch import nn

from meshwright.errors import ConfigError, refusal
from meshwright.spec.training import Precision

# Lists of names on transformers' models: for either half precision, and for fp16 alone.
_STRICT = "_keep_in_fp32_modules_strict"
_IN_FP16 = "_keep_in_fp32_modules"


def kept_in_fp32(model: nn.Module, precision: Precision) -> list[nn.Module]:
    """Return the modules whose weights must stay in fp32, by the lists of transformers' models.

    Raises `ConfigError` if such a module has other weights, too: FSDP2 casts a module as a whole.
    """
    names = dict.fromkeys(_kept_names(model, precision))
    owners = dict.fromkeys(name.rpartition(".")[0] for name in names)
    modules = []
    for owner in owners:
        module = model.get_submodule(owner)
        if any(owner.startswith(f"{other}.") for other in owners):
            continue  # a part of another one
        prefix = f"{owner}." if owner else ""
        unlisted = [name for name, _ in module.named_parameters(prefix=owner) if name not in names]
        if unlisted:
            listed = next(name for name in names if name.startswith(prefix))
            rule = f"the model keeps {listed} in fp32, and {unlisted[0]} of the same module is not"
            raise ConfigError(
                refusal(f"{rule} (train.precision = {precision})", legal=["train.precision = fp32"])
            )
        modules.append(module)
    return modules


def _kept_names(model: nn.Module, precision: Precision) -> Iterator[str]:
    """Yield the names of the weights that the model or one of its modules lists."""
    lists = {"fp32": (), "bf16": (_STRICT,), "fp16": (_STRICT, _IN_FP16)}[precision]
    for path, module in model.named_modules():
        patterns = [pattern for name in lists for pattern in getattr(module, name, None) or ()]
        if not patterns:
            continue
        alternatives = "|".join(re.escape(pattern).replace(r"\*", ".*") for pattern in patterns)
        form = re.compile(rf"(?:^|\.)(?:{alternatives})(?:\.|$)")
        for name, _ in module.named_parameters():
            if form.search(name):
                yield f"{path}.{name}" if path else name
