"""The keys of `config.json` for each layer's window, rotation, and MLP or experts."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, TypeVar

from meshwright.errors import ConfigError, refusal

FULL: Final = "full_attention"
SLIDING: Final = "sliding_attention"
_KINDS: Final = (FULL, SLIDING)
_ROTATES: Final = "no_rope_layers"
_STEP: Final = "decoder_sparse_step"
_DENSE: Final = "mlp_only_layers"

T = TypeVar("T", bound=Hashable)


class StoredLayer(NamedTuple):
    """A layer's window in tokens (None: it sees all), whether it rotates queries and keys, and
    whether it has one MLP where other layers have experts.
    """

    window: int | None = None
    rotary: bool = True
    dense: bool = False


@dataclass(frozen=True)
class LayerKeys:
    """The keys of a family for the window, rotation and MLP of its layers.

    `window` is the default of `sliding_window`. `is_windowed(config, layer)` says whether a layer
    has the window if a file has no `layer_types`; None: the family does not have that key, and all
    layers share the window. `switch` names a key that must be true for any layer to have a window.
    With `rotates`, the family has the key `no_rope_layers`, a list with 1 for each layer that
    rotates and 0 for the others. With `sparse`, it has `decoder_sparse_step` (every how many layers
    one has experts) and `mlp_only_layers` (the layers without experts).
    """

    window: int | None = None
    is_windowed: Callable[[Mapping[str, Any], int], bool] | None = None
    switch: str = ""
    rotates: bool = False
    sparse: bool = False

    def read(self, config: Mapping[str, Any], count: int) -> tuple[StoredLayer, ...]:
        """Return for each of `count` layers its window, whether it rotates, whether it has one MLP.

        Raises `ConfigError` for an unknown kind of layer, and for a list shorter than the layers.
        """
        window = self._window(config)
        kinds = self._kinds(config, count, window)
        if window is None and SLIDING in kinds:
            what = f"layer_types has {SLIDING}, but sliding_window sets no window"
            raise ConfigError(refusal(what, legal=[FULL]))
        each = zip(kinds, self._rotates(config, count), self._dense(config, count), strict=True)
        return tuple(
            StoredLayer(window if kind == SLIDING else None, rotary, dense)
            for kind, rotary, dense in each
        )

    def write(self, layers: Sequence[StoredLayer], family: str) -> dict[str, Any]:
        """Return the keys that describe layers; `ConfigError` for what no key can describe."""
        windows = {layer.window for layer in layers}
        sizes = sorted(size for size in windows if size is not None)
        what = f"model.layer_pattern cannot be written as {family}:"
        if len(sizes) > 1:
            raise ConfigError(f"{what} its windows have one size, but these have {sizes}")
        if not self.rotates and not all(layer.rotary for layer in layers):
            raise ConfigError(f"{what} all of its layers rotate")
        # Without a switch, transformers asks for a window even if no layer has it.
        unused = None if self.switch or self.is_windowed is None else self.window
        found: dict[str, Any] = {"sliding_window": sizes[0] if sizes else unused}
        if self.switch:
            found[self.switch] = bool(sizes)
        if self.is_windowed is not None:
            found["layer_types"] = [SLIDING if one.window else FULL for one in layers]
        elif len(windows) > 1:
            raise ConfigError(f"{what} a window is of all of its layers")
        if self.switch and self.is_windowed is not None:
            # transformers 4 gives a window to the layers from this one on.
            kinds = found["layer_types"]
            found["max_window_layers"] = kinds.index(SLIDING) if sizes else len(kinds)
        if self.rotates:
            found[_ROTATES] = [int(one.rotary) for one in layers]
        if self.sparse:
            found[_STEP] = 1
            found[_DENSE] = [at for at, one in enumerate(layers) if one.dense]
        elif any(one.dense for one in layers):
            raise ConfigError(f"{what} all of its layers have experts")
        return found

    def _dense(self, config: Mapping[str, Any], count: int) -> Sequence[bool]:
        if not self.sparse:
            return [False] * count
        every, given = config.get(_STEP), config.get(_DENSE)
        every = 1 if every is None else every
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise ConfigError(f"{_STEP} = {every!r} must be a whole number of at least 1")
        given = [] if given is None else given
        if not isinstance(given, list) or not all(type(one) is int for one in given):
            raise ConfigError(f"{_DENSE} = {given!r} must be a list of numbers of layers")
        return [layer in given or (layer + 1) % every != 0 for layer in range(count)]

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
        given = config.get("layer_types")
        if self.is_windowed is None:
            kind = FULL if window is None else SLIDING
            if isinstance(given, list) and any(one != kind for one in given[:count]):
                # transformers takes a Mistral whose layers differ for another model.
                what = f"layer_types differs from sliding_window = {window}, by which all layers"
                raise ConfigError(refusal(f"{what} are alike", legal=[f'"{kind}" for all layers']))
            return [kind] * count
        if given is None:
            rule = self.is_windowed
            is_there = window is not None
            return [SLIDING if is_there and rule(config, one) else FULL for one in range(count)]
        kinds = _of_length(given, "layer_types", count)
        if others := sorted({str(one) for one in kinds} - set(_KINDS)):
            raise ConfigError(refusal(f"layer_types has {others}: not supported", legal=_KINDS))
        return [str(one) for one in kinds]

    def _rotates(self, config: Mapping[str, Any], count: int) -> Sequence[bool]:
        if not self.rotates:
            return [True] * count
        given = config.get(_ROTATES)
        if given is None:
            every = config.get("no_rope_layer_interval", 4)
            if isinstance(every, bool) or not isinstance(every, int) or every < 1:
                raise ConfigError(f"no_rope_layer_interval = {every!r} must be at least 1")
            return [(layer + 1) % every != 0 for layer in range(count)]
        found = _of_length(given, _ROTATES, count)
        if not all(one in (0, 1) for one in found):
            raise ConfigError(f"{_ROTATES} = {given!r} must be a list of 1 (rotates) and 0")
        return [bool(one) for one in found]


def _is_late(config: Mapping[str, Any], layer: int) -> bool:
    first = config.get("max_window_layers", 28)
    if isinstance(first, bool) or not isinstance(first, int):
        raise ConfigError(f"max_window_layers = {first!r} must be a whole number")
    return layer >= first


# Qwen: with the switch on, the layers from `max_window_layers` on have a window.
LATE_WINDOWS: Final = LayerKeys(window=4096, is_windowed=_is_late, switch="use_sliding_window")


def shortest_pattern(every: Sequence[T]) -> tuple[T, ...]:
    """Return the shortest beginning of a sequence that gives all of it when repeated."""
    for size in range(1, len(every)):
        if all(one == every[at % size] for at, one in enumerate(every)):
            return tuple(every[:size])
    return tuple(every)


def _of_length(given: object, key: str, count: int) -> Sequence[Any]:
    if not isinstance(given, list) or len(given) < count:
        size = len(given) if isinstance(given, list) else repr(given)
        raise ConfigError(f"{key} must be a list with one of each of {count} layers, not {size}")
    return given[:count]
