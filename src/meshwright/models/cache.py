"""The key/value cache of generation."""

from __future__ import annotations

from torch import Tensor

from meshwright.errors import ConfigError


class KVCache:
    """Keys and values of past positions of each layer, preallocated for `capacity` positions.

    `length` is the number of positions that all layers have; the model advances it after each
    forward. Memory: 2 x layers x batch x kv_heads x capacity x head_dim elements; for latent
    attention, layers x batch x capacity x (kv_lora_rank + qk_rope_head_dim). A recurrent layer
    stores its state, whose size does not depend on the capacity.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.length = 0
        self._layers: dict[str, tuple[Tensor, Tensor]] = {}
        self._states: dict[str, tuple[Tensor, ...]] = {}

    def check(self, new: int) -> None:
        """Raise `ConfigError` if `new` more positions do not fit."""
        if self.length + new > self.capacity:
            raise ConfigError(
                f"the cache holds {self.length} of at most {self.capacity} positions; "
                f"{new} more do not fit"
            )

    def append(self, layer: str, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Store new keys and values `[batch, kv_heads, new, head_dim]`; return all so far.

        The last dim of keys may differ from that of values.
        """
        if layer not in self._layers:
            self._layers[layer] = (self._room(keys), self._room(values))
        all_keys, all_values = self._layers[layer]
        stop = self.length + keys.shape[2]
        all_keys[:, :, self.length : stop] = keys
        all_values[:, :, self.length : stop] = values
        return all_keys[:, :, :stop], all_values[:, :, :stop]

    def keep(self, layer: str, state: tuple[Tensor, ...]) -> None:
        """Store the state of a recurrent layer after all positions so far."""
        self._states[layer] = state

    def kept(self, layer: str) -> tuple[Tensor, ...] | None:
        """Return the stored state of a recurrent layer, or None before the first position."""
        return self._states.get(layer)

    def _room(self, x: Tensor) -> Tensor:
        return x.new_empty(*x.shape[:2], self.capacity, x.shape[3])


def kept_by(cache: KVCache | None, layer: str, count: int) -> tuple[Tensor | None, ...]:
    """Return the `count` tensors that a recurrent layer stored in a cache; None: none yet."""
    return (None,) * count if cache is None else cache.kept(layer) or (None,) * count
