"""Which weights of a user's model stay in fp32 in half precision: those that transformers keeps."""

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
    """Return the modules whose weights half precision would falsify, by the model's own lists.

    Raises `ConfigError` if such a module has other weights, too: FSDP2 casts a module as a whole.
    """
    names = dict.fromkeys(_kept_names(model, precision))
    owners = dict.fromkeys(name.rpartition(".")[0] for name in names)
    found = []
    for owner in owners:
        module = model.get_submodule(owner)
        if any(owner.startswith(f"{other}.") for other in owners):
            continue  # a part of another one
        at = f"{owner}." if owner else ""
        others = [name for name, _ in module.named_parameters(prefix=owner) if name not in names]
        if others:
            kept = next(name for name in names if name.startswith(at))
            rule = f"the model keeps {kept} in fp32, and {others[0]} of the same module is not"
            raise ConfigError(
                refusal(f"{rule} (train.precision = {precision})", legal=["train.precision = fp32"])
            )
        found.append(module)
    return found


def _kept_names(model: nn.Module, precision: Precision) -> Iterator[str]:
    """Yield the names of the weights that a model or one of its parts lists."""
    lists = {"fp32": (), "bf16": (_STRICT,), "fp16": (_STRICT, _IN_FP16)}[precision]
    for at, module in model.named_modules():
        patterns = [pattern for name in lists for pattern in getattr(module, name, None) or ()]
        if not patterns:
            continue
        every = "|".join(re.escape(pattern).replace(r"\*", ".*") for pattern in patterns)
        form = re.compile(rf"(?:^|\.)(?:{every})(?:\.|$)")
        for name, _ in module.named_parameters():
            if form.search(name):
                yield f"{at}.{name}" if at else name
