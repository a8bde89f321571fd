"""The keys of `config.json` for each layer's window, rotation, and MLP or experts."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple, TypeVar

from meshwright.errors import ConfigError, refusal

FULL: Final = "full_attention"
SLIDING: Final = "sliding_attention"
LINEAR: Final = "linear_attention"
_KINDS: Final = (FULL, SLIDING)
# What transformers called kinds of layers before.
_OLD_NAMES: Final = {"mamba": LINEAR, "attention": FULL}
_ROTATES: Final = "no_rope_layers"
_STEP: Final = "decoder_sparse_step"
_DENSE: Final = "mlp_only_layers"

T = TypeVar("T", bound=Hashable)


Recurrence = Literal["delta", "mamba"]
"""What a layer has in place of attention: Gated DeltaNet, or Mamba-2."""


class StoredLayer(NamedTuple):
    """A layer's window in tokens (None: it sees all), whether it rotates queries and keys and has
    one MLP where other layers have experts, and what it has in place of attention.
    """

    window: int | None = None
    rotary: bool = True
    dense: bool = False
    recurrence: Recurrence | None = None


@dataclass(frozen=True)
class LayerKeys:
    """The keys of a family for the window, rotation and MLP of its layers.

    `window` is the default of `sliding_window`. `is_windowed(config, layer)` says whether a layer
    has the window if a file has no `layer_types`; None: the family does not have that key, and all
    layers share the window. `switch` names a key that must be true for any layer to have a window.
    With `rotates`, the family has the key `no_rope_layers`, a list with 1 for each layer that
    rotates and 0 for the others. With `sparse`, it has `decoder_sparse_step` (every how many layers
    one has experts) and `mlp_only_layers` (the layers without experts).

    With a `recurrence`, layers that `layer_types` calls by the first of `names` have it, the others
    attention. Where a file has no such list, each `interval`-th layer attends, the default of
    `full_attention_interval`; 0: none does. `rotates_by` is a key that is "rope" if these rotate.
    In place of `layer_types`, a family may have a key `attending` with the numbers of the layers
    that attend. With `windows_rotate`, layers without a window do not rotate where a file has one.
    """

    window: int | None = None
    is_windowed: Callable[[Mapping[str, Any], int], bool] | None = None
    switch: str = ""
    rotates: bool = False
    sparse: bool = False
    recurrence: Recurrence | None = None
    interval: int = 0
    names: tuple[str, str] = (LINEAR, FULL)
    rotates_by: str = ""
    attending: str = ""
    windows_rotate: bool = False

    def read(self, config: Mapping[str, Any], count: int) -> tuple[StoredLayer, ...]:
        """Return for each of `count` layers its window, whether it rotates, whether it has one MLP.

        Raises `ConfigError` for an unknown kind of layer, and for a list shorter than the layers.
        """
        window = self._window(config)
        kinds = self._kinds(config, count, window)
        if window is None and SLIDING in kinds:
            rule = f"layer_types has {SLIDING}, but sliding_window sets no window"
            raise ConfigError(refusal(rule, legal=[FULL]))
        if self.windows_rotate:
            rotations: Sequence[bool] = [window is None or kind == SLIDING for kind in kinds]
        else:
            rotations = self._rotates(config, count)
        layers = zip(kinds, rotations, self._dense(config, count), strict=True)
        return tuple(
            StoredLayer(
                window if kind == SLIDING else None,
                rotary or kind == LINEAR,
                dense,
                self.recurrence if kind == LINEAR else None,
            )
            for kind, rotary, dense in layers
        )

    def write(self, layers: Sequence[StoredLayer], family: str) -> dict[str, Any]:
        """Return the keys that describe layers; `ConfigError` for layers that none can describe."""
        windows = {layer.window for layer in layers}
        sizes = sorted(size for size in windows if size is not None)
        rule = f"model.layer_pattern cannot be written as {family}:"
        if len(sizes) > 1:
            raise ConfigError(f"{rule} its windows have one size, but these have {sizes}")
        if self.recurrence:
            if sizes:
                raise ConfigError(f"{rule} none of its layers has a window")
            return self._sparse([*layers], rule) | self._recurrent(layers, rule)
        all_rotate = all(layer.rotary for layer in layers)
        if self.windows_rotate:
            if any(
                layer.rotary != bool(layer.window) for layer in layers if sizes or not all_rotate
            ):
                raise ConfigError(f"{rule} those with a window rotate, and no others")
        elif not self.rotates and not all_rotate:
            raise ConfigError(f"{rule} all of its layers rotate")
        # Without a switch, transformers asks for a window even if no layer has it.
        unused = None if self.switch or self.is_windowed is None else self.window
        if self.windows_rotate and all_rotate:
            unused = None
        keys: dict[str, Any] = {"sliding_window": sizes[0] if sizes else unused}
        if self.switch:
            keys[self.switch] = bool(sizes)
        if self.is_windowed is not None:
            keys["layer_types"] = [SLIDING if layer.window else FULL for layer in layers]
        elif len(windows) > 1:
            raise ConfigError(f"{rule} a window is of all of its layers")
        if self.switch and self.is_windowed is not None:
            # transformers 4 gives a window to the layers from this one on.
            kinds = keys["layer_types"]
            keys["max_window_layers"] = kinds.index(SLIDING) if sizes else len(kinds)
        if self.rotates:
            keys[_ROTATES] = [int(layer.rotary) for layer in layers]
        return keys | self._sparse(layers, rule)

    def _recurrent(self, layers: Sequence[StoredLayer], rule: str) -> dict[str, Any]:
        """Return the keys that say which layers have a recurrence, and whether others rotate."""
        recurrent, attending = self.names
        kinds = [recurrent if layer.recurrence else attending for layer in layers]
        rotations = {layer.rotary for layer in layers if not layer.recurrence}
        if rotations == {True, False} or (False in rotations and not self.rotates_by):
            which = "or none" if self.rotates_by else "of its layers with attention"
            raise ConfigError(f"{rule} all {which} rotate")
        position = {self.rotates_by: "nope" if False in rotations else "rope"}
        numbers = [index for index, layer in enumerate(layers) if not layer.recurrence]
        listed = {self.attending: numbers} if self.attending else {"layer_types": kinds}
        return listed | (position if self.rotates_by else {})

    def _sparse(self, layers: Sequence[StoredLayer], rule: str) -> dict[str, Any]:
        """Return the keys that say which layers have experts."""
        if self.sparse:
            dense = [index for index, layer in enumerate(layers) if layer.dense]
            return {_STEP: 1, _DENSE: dense}
        if any(layer.dense for layer in layers):
            raise ConfigError(f"{rule} all of its layers have experts")
        return {}

    def _dense(self, config: Mapping[str, Any], count: int) -> Sequence[bool]:
        if not self.sparse:
            return [False] * count
        period, dense_layers = config.get(_STEP), config.get(_DENSE)
        period = 1 if period is None else period
        if isinstance(period, bool) or not isinstance(period, int) or period < 1:
            raise ConfigError(f"{_STEP} = {period!r} must be a whole number of at least 1")
        dense_layers = _numbers(dense_layers, _DENSE)
        return [layer in dense_layers or (layer + 1) % period != 0 for layer in range(count)]

    def _window(self, config: Mapping[str, Any]) -> int | None:
        value = config.get("sliding_window", self.window)
        if self.switch and not config.get(self.switch, False):
            return None
        if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
            raise ConfigError(f"sliding_window = {value!r} must be a whole number of at least 1")
        if value is not None and value < 1:
            raise ConfigError(f"sliding_window = {value} must be at least 1")
        return value

    def _kinds(self, config: Mapping[str, Any], count: int, window: int | None) -> Sequence[str]:
        layer_types = config.get("layer_types")
        if self.recurrence:
            return self._linear(config, layer_types, count)
        if self.is_windowed is None:
            kind = FULL if window is None else SLIDING
            if isinstance(layer_types, list) and any(
                layer_kind != kind for layer_kind in layer_types[:count]
            ):
                # transformers takes a Mistral whose layers differ for another model.
                message = f"layer_types differs from sliding_window = {window}, by which all layers"
                raise ConfigError(
                    refusal(f"{message} are alike", legal=[f'"{kind}" for all layers'])
                )
            return [kind] * count
        if layer_types is None:
            rule = self.is_windowed
            is_there = window is not None
            return [SLIDING if is_there and rule(config, layer) else FULL for layer in range(count)]
        return _listed(layer_types, _KINDS, count)

    def _linear(self, config: Mapping[str, Any], layer_types: object, count: int) -> Sequence[str]:
        """Return the kinds of layers, of which some have linear attention."""
        if self.attending:
            numbers = _numbers(config.get(self.attending), self.attending)
            return [FULL if layer in numbers else LINEAR for layer in range(count)]
        if layer_types is not None:
            kinds = _listed(layer_types, (FULL, LINEAR, *_OLD_NAMES), count)
            return [_OLD_NAMES.get(kind, kind) for kind in kinds]
        if not self.interval:
            return [LINEAR] * count
        interval = config.get("full_attention_interval")
        interval = self.interval if interval is None else interval
        if isinstance(interval, bool) or not isinstance(interval, int) or interval < 1:
            raise ConfigError(f"full_attention_interval = {interval!r} must be at least 1")
        return [LINEAR if (layer + 1) % interval else FULL for layer in range(count)]

    def _rotates(self, config: Mapping[str, Any], count: int) -> Sequence[bool]:
        if self.rotates_by:
            return [config.get(self.rotates_by) == "rope"] * count
        if not self.rotates:
            return [True] * count
        listed = config.get(_ROTATES)
        if listed is None:
            period = config.get("no_rope_layer_interval", 4)
            if isinstance(period, bool) or not isinstance(period, int) or period < 1:
                raise ConfigError(f"no_rope_layer_interval = {period!r} must be at least 1")
            return [(layer + 1) % period != 0 for layer in range(count)]
        flags = _of_length(listed, _ROTATES, count)
        if not all(flag in (0, 1) for flag in flags):
            raise ConfigError(f"{_ROTATES} = {listed!r} must be a list of 1 (rotates) and 0")
        return [bool(flag) for flag in flags]


def starts_at(default: int) -> Callable[[Mapping[str, Any], int], bool]:
    """Return the rule that layers from `max_window_layers` on have a window."""

    def is_windowed(config: Mapping[str, Any], layer: int) -> bool:
        first = config.get("max_window_layers", default)
        if isinstance(first, bool) or not isinstance(first, int):
            raise ConfigError(f"max_window_layers = {first!r} must be a whole number")
        return layer >= first

    return is_windowed


# Qwen: with the switch on, the late layers have a window.
LATE_WINDOWS: Final = LayerKeys(window=4096, is_windowed=starts_at(28), switch="use_sliding_window")


def shortest_pattern(layers: Sequence[T]) -> tuple[T, ...]:
    """Return the shortest prefix of a sequence that gives all of it when repeated."""
    for length in range(1, len(layers)):
        if all(layer == layers[index % length] for index, layer in enumerate(layers)):
            return tuple(layers[:length])
    return tuple(layers)


def _listed(layer_types: object, legal: Sequence[str], count: int) -> Sequence[str]:
    """Return the kinds that a file lists; raises `ConfigError` for one that is not legal."""
    kinds = _of_length(layer_types, "layer_types", count)
    if unknown := sorted({str(kind) for kind in kinds} - set(legal)):
        raise ConfigError(refusal(f"layer_types has {unknown}: not supported", legal=legal))
    return [str(kind) for kind in kinds]


def _numbers(listed: object, key: str) -> Sequence[int]:
    """Return the numbers of layers that a file lists, none where it has no such key."""
    listed = [] if listed is None else listed
    if not isinstance(listed, list) or not all(type(layer) is int for layer in listed):
        raise ConfigError(f"{key} = {listed!r} must be a list of numbers of layers")
    return listed


def _of_length(listed: object, key: str, count: int) -> Sequence[Any]:
    if not isinstance(listed, list) or len(listed) < count:
        length = len(listed) if isinstance(listed, list) else repr(listed)
        raise ConfigError(f"{key} must be a list with one of each of {count} layers, not {length}")
    return listed[:count]
