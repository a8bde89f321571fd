"""Builds the unsharded twin of a model: the same classes with whole weights, in one process."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from meshwright.errors import ConfigError
from meshwright.prove.trainers.gather import clean_names, unwrapped

# Of a module, hooks of engines and of Python: a twin has none.
_HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)


def make_twin(
    model: nn.Module,
    weights: Mapping[str, Tensor],
    reference: Callable[[], nn.Module] | None = None,
) -> nn.Module:
    """Build an unsharded model on the CPU with the parameters of `model`, by `reference()` if it is
    given.

    Models of transformers are built from their config; others are copied module by module, without
    the hooks of engines. Dropout is off. Raises `ConfigError` if it lacks a parameter of `weights`.
    """
    if reference is not None:
        twin = reference()
    elif _is_of_transformers(model):
        twin = _of_config(model)
        _copy_buffers(model, twin)
    else:
        named_weights = {
            id(p): weights[name] for name, p in clean_names(model).items() if name in weights
        }
        twin = _copied(model, named_weights, {})
    twin = twin.to("cpu")
    _check_names(twin, weights)
    for parameter in twin.parameters():
        parameter.grad = None
    without_dropout(twin)
    return twin.train(model.training)


def fill(twin: nn.Module, weights: Mapping[str, Tensor], dtype: torch.dtype) -> None:
    """Give a twin some weights and a dtype; complex buffers, as of rotary angles, stay complex."""
    twin._apply(lambda tensor: _cast(tensor, dtype))  # type: ignore[no-untyped-call]
    with torch.no_grad():
        for name, parameter in clean_names(twin).items():
            if name in weights:
                parameter.copy_(weights[name])


def _cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a tensor in a dtype: `Module.to` would drop the imaginary part of complex numbers."""
    if tensor.is_complex():
        return tensor.to(torch.complex128 if dtype == torch.float64 else torch.complex64)
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def _check_names(twin: nn.Module, weights: Mapping[str, Tensor]) -> None:
    parameters = clean_names(twin)
    missing = [name for name in weights if name not in parameters]
    if missing:
        raise ConfigError(
            f"the unsharded model has no {missing[0]} ({len(missing)} of {len(weights)} trained "
            "parameters are missing); pass reference=, a function that returns the model before "
            "it is sharded"
        )


def _is_of_transformers(model: nn.Module) -> bool:
    return hasattr(model, "config") and hasattr(type(model), "_from_config")


def _of_config(model: Any) -> nn.Module:
    """Build a new model of the same transformers class from its config, unsharded."""
    config = copy.deepcopy(model.config)
    for name in ("distributed_config", "tp_size", "device_mesh"):
        if getattr(config, name, None) is not None:
            setattr(config, name, None)
    kind: Any = _plain_class(type(model))
    generator = torch.get_rng_state()
    if getattr(config, "_experts_implementation", None) is not None:
        config._experts_implementation = "eager"  # grouped products have no fp64
    twin: nn.Module = kind._from_config(
        config, attn_implementation=getattr(config, "_attn_implementation", None)
    )
    torch.set_rng_state(generator)
    return twin


def _plain_class(kind: type) -> type:
    """Return the model's class from before FSDP2 changed it."""
    from torch.distributed.fsdp import FSDPModule

    return next(base for base in kind.__mro__ if not issubclass(base, FSDPModule))


def _copy_buffers(model: nn.Module, twin: nn.Module) -> None:
    buffers = dict(model.named_buffers())
    with torch.no_grad():
        for name, buffer in twin.named_buffers():
            value = buffers.get(name)
            if value is not None and value.shape == buffer.shape:
                buffer.copy_(value.full_tensor() if isinstance(value, DTensor) else value)


def _copied(module: nn.Module, weights: Mapping[int, Tensor], copies: dict[int, Any]) -> nn.Module:
    """Copy a module and its children, without hooks and wrappers, with whole weights.

    `weights` has the whole weights by the id of the parameter, `copies` what is copied already.
    """
    module = unwrapped(module)
    if id(module) in copies:
        twin: nn.Module = copies[id(module)]
        return twin
    kind: Any = _plain_class(type(module))
    twin = kind.__new__(kind)
    copies[id(module)] = twin
    state = {k: v for k, v in module.__dict__.items() if k not in ("forward", "_original_forward")}
    twin.__dict__.update(state)
    for name in _HOOKS:
        if name in state:
            twin.__dict__[name] = type(state[name])()
    twin.__dict__["_parameters"], twin.__dict__["_modules"] = {}, {}
    twin.__dict__["_buffers"] = {n: _copy_of(b) for n, b in module._buffers.items()}
    for name, parameter in module._parameters.items():
        twin._parameters[name] = _whole_parameter(parameter, weights, copies)
    for name, inner in module._modules.items():
        twin._modules[name] = None if inner is None else _copied(inner, weights, copies)
    return twin


def _copy_of(buffer: Tensor | None) -> Tensor | None:
    if buffer is None:
        return None
    return (buffer.full_tensor() if isinstance(buffer, DTensor) else buffer).detach().cpu().clone()


def _whole_parameter(
    parameter: nn.Parameter | None, weights: Mapping[int, Tensor], copies: dict[int, Any]
) -> nn.Parameter | None:
    """Return the copy of a parameter with its whole weights; a tied parameter is copied once."""
    if parameter is None:
        return None
    if id(parameter) not in copies:
        value = weights.get(id(parameter))
        value = parameter.detach().cpu() if value is None else value
        copies[id(parameter)] = nn.Parameter(value.clone(), parameter.requires_grad)
    copied: nn.Parameter = copies[id(parameter)]
    return copied


def without_dropout(model: nn.Module) -> list[str]:
    """Set all dropout probabilities of a model to 0, and return the names of the modules that had
    one.
    """
    changed = []
    for name, module in model.named_modules():
        keys = [key for key in vars(module) if "dropout" in key or key == "drop_prob"]
        if "Dropout" in type(module).__name__:
            keys.append("p")
        for key in keys:
            value = getattr(module, key, None)
            if isinstance(value, float) and value > 0:
                setattr(module, key, 0.0)
                changed.append(name)
    return changed


@contextmanager
def no_dropout(model: nn.Module) -> Iterator[list[str]]:
    """Turn dropout off inside the `with` block; yields the names of the modules that had some."""
    before = [(module, dict(vars(module))) for module in model.modules()]
    changed = without_dropout(model)
    try:
        yield changed
    finally:
        for module, state in before if changed else ():
            for key, value in state.items():
                if isinstance(value, float) and vars(module).get(key) == 0.0:
                    setattr(module, key, value)
