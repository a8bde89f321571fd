"""Questions before a run: fewest devices, largest batch, longest context, cheapest token."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from meshwright.cost.catalogue import Cluster, cluster_of, find_device
from meshwright.cost.price import Prediction, estimated, price
from meshwright.cost.setting import Setting
from meshwright.errors import ConfigError
from meshwright.layout import Layout, broken
from meshwright.planner.lightest import Lengths, divisions, lightest, lightest_of, with_train
from meshwright.planner.rank import MARGIN, Search
from meshwright.planner.space import RECOMPUTES
from meshwright.spec.training import Recompute

# A pipeline gets this many microbatches for each of its ranks: a fifth of the time to its bubble.
_FILL = 4
# A batch is at speed with this share of the fastest's tokens per second.
_AT_SPEED = 0.9
# Contexts are tried from the shortest of these lengths to the longest, each octave in eighths.
_SHORTEST, _LONGEST = 1 << 4, 1 << 27
_OCTAVE = 8
# The keys of a layout that `lightest_of` chooses, as a division has them.
_PLAIN = {"zero": 0, "schedule": "1f1b", "virtual_stages": 1}
# A microbatch is no larger than this, in sequences on a rank.
_MOST_SEQUENCES = 1 << 16


def on_devices(cluster: Cluster, devices: int) -> Cluster:
    """Return a cluster of the same kind with another number of devices."""
    per_node = min(cluster.per_node, devices)
    return replace(cluster, nodes=-(-devices // per_node), per_node=per_node)


def sizes_up_to(cluster: Cluster, devices: int) -> list[int]:
    """Return the numbers of devices that can be rented: parts of a node, whole nodes."""
    node = cluster.per_node
    parts = [size for size in range(1, min(node, devices) + 1) if node % size == 0]
    return parts + list(range(2 * node, devices + 1, node))


def fewest_devices(
    setting: Setting, devices: int, margin: float = MARGIN
) -> tuple[int, Prediction] | None:
    """Return the fewest devices on which a layout fits, and the fastest layout there.

    Tries divisors of a node, then whole nodes, up to a maximum. None where nothing fits.
    """
    for count in sizes_up_to(setting.cluster, devices):
        tried = replace(setting, cluster=on_devices(setting.cluster, count))
        light = lightest(tried, count)
        if light is None or light.bytes > _limit(setting, margin):
            continue
        if ranked := Search(tried, count, margin).run(1).ranked:
            return count, ranked[0]
    return None


@dataclass(frozen=True)
class LargestBatch:
    """The most sequences that fit at once with one recomputation policy.

    `sequences` is dp x microbatch. `batch` is the global batch of the prediction: one microbatch,
    or with a pipeline four for each of its ranks. `at_speed`: within a tenth of the fastest of its
    policy; otherwise the most at any speed.
    """

    recompute: Recompute
    sequences: int
    batch: int
    found: Prediction
    at_speed: bool


def largest_batches(setting: Setting, devices: int, margin: float = MARGIN) -> list[LargestBatch]:
    """Return the largest batch that fits at once for each recomputation policy.

    For each policy: the largest one, over all divisions of the devices, whose speed is within a
    tenth of the fastest in tokens per second. The last entry is the largest at any speed. Larger
    global batches accumulate microbatches of this size and need no more memory.
    """
    everything = list(divisions(setting, devices))
    limit = _limit(setting, margin)
    best, every = [], []
    for policy in RECOMPUTES:
        found = [
            batch
            for one in everything
            if (batch := _largest_of(setting, one, policy, limit)) is not None
        ]
        every += found
        enough = _AT_SPEED * max((one.found.tokens_per_s for one in found), default=0.0)
        fast = [one for one in found if one.found.tokens_per_s >= enough]
        best += _first_priced(setting, fast, limit)
    most = _first_priced(setting, every, limit)
    return best + [replace(one, at_speed=False) for one in most if one not in best]


def _first_priced(setting: Setting, found: list[LargestBatch], limit: float) -> list[LargestBatch]:
    """Return the price of the largest of some batches that are known in closed form, if any.

    One that needs more than the limit by its price gives way to a smaller one of its division.
    """
    left = sorted(found, key=_largest_first)
    while left:
        one, *left = left
        layout = one.found.layout
        priced = price(with_train(setting, batch=one.batch), layout)
        if priced.memory.total <= limit:
            return [replace(one, found=priced)]
        size = min(int(layout.microbatch * limit / priced.memory.total), layout.microbatch - 1)
        plain = layout.model_copy(update=_PLAIN)
        smaller = _of_size(setting, plain, size) if size else None
        left = sorted([*left, *([] if smaller is None else [smaller])], key=_largest_first)
    return []


def _largest_first(one: LargestBatch) -> tuple[int, float]:
    return -one.sequences, -one.found.tokens_per_s


def _largest_of(
    setting: Setting, one: Layout, recompute: Recompute, limit: float
) -> LargestBatch | None:
    """Return the largest batch of a division, or None where no sequence fits."""
    one = one.model_copy(update={"recompute": recompute})
    size = _most(setting, one, limit)
    return _of_size(setting, one, size) if size else None


def _of_size(setting: Setting, one: Layout, size: int) -> LargestBatch | None:
    """Return the batch of a division whose microbatch has so many sequences, in closed form."""
    count = _microbatches(one)
    own = with_train(setting, batch=size * one.dp * count)
    light = lightest_of(own, one.model_copy(update={"microbatch": size}), count)
    if light is None or broken(own.model, own.train, light.layout) is not None:
        return None
    found = estimated(own, light.layout)
    return LargestBatch(one.recompute, size * one.dp, own.train.batch, found, at_speed=True)


def _microbatches(one: Layout) -> int:
    return _FILL * one.pp if one.pp > 1 else 1


def _most(setting: Setting, one: Layout, limit: float) -> int:
    """Return the largest microbatch of a division that fits, 0 where none does."""

    def fits(size: int) -> bool:
        layout = one.model_copy(update={"microbatch": size})
        light = lightest_of(setting, layout, _microbatches(one))
        return light is not None and light.bytes <= limit

    if not fits(1):
        return 0
    low, high = 1, 2
    while high < _MOST_SEQUENCES and fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def longest_context(
    setting: Setting, devices: int, margin: float = MARGIN
) -> tuple[int, Prediction] | None:
    """Return the longest sequences that fit, in tokens, with the fastest layout.

    The batch stays the same. Tries powers of two and seven lengths between each two of them,
    without offload. None where not even the shortest fits.
    """
    fits = Lengths(setting, devices, _limit(setting, margin)).fit

    def exactly(length: int) -> Prediction | None:
        if not fits(length):
            return None
        one = with_train(setting, seq_len=length)
        found = Search(one, devices, margin, {"offload": "none"}).run(1)
        return found.ranked[0] if found.ranked else None

    octave = 1 << 10
    while octave < _LONGEST and fits(2 * octave):
        octave *= 2
    # The closed form is a few percent off: what it takes for the longest may not fit.
    while (least := exactly(octave)) is None:
        octave //= 2
        if octave < _SHORTEST:
            return None
    step = octave // _OCTAVE
    for length in range(octave + (_OCTAVE - 1) * step, octave, -step):
        if (found := exactly(length)) is not None:
            return length, found
    return octave, least


@dataclass(frozen=True)
class Offer:
    """A number of devices of one kind, their speed, and the cost of a million tokens."""

    device: str
    devices: int
    found: Prediction
    price_per_hour: float

    @property
    def cost(self) -> float:
        """Price of a million tokens, in the currency of the price."""
        return self.price_per_hour * self.devices / 3600 / self.found.tokens_per_s * 1e6


def cheapest(
    setting: Setting, prices: Mapping[str, float], devices: int, margin: float = MARGIN
) -> list[Offer]:
    """Return the kinds of devices that have a price and fit, the cheapest token first.

    `prices` are per device and hour, by name in the catalogue. Tries powers of two up to `devices`.
    Raises `ConfigError` without any price, or for a name that is not in the catalogue.
    """
    if not prices:
        raise ConfigError(
            "nothing has a price: give cluster.price for an hour of one device, or "
            "--price h100-sxm=PRICE for each kind to compare"
        )
    offers = []
    for name, each in prices.items():
        own = setting.cluster
        if name != own.device.name:
            own = cluster_of(find_device(name), find_device(name).per_node)
        for count in _by_powers(devices):
            tried = replace(setting, cluster=on_devices(own, count))
            light = lightest(tried, count)
            if light is None or light.bytes > _limit(tried, margin):
                continue
            offers += [
                Offer(name, count, one, each) for one in Search(tried, count, margin).run(1).ranked
            ]
    return sorted(offers, key=lambda offer: (offer.cost, offer.devices))


def _by_powers(devices: int) -> Iterator[int]:
    count = 1
    while count < devices:
        yield count
        count *= 2
    yield devices


def _limit(setting: Setting, margin: float) -> float:
    return setting.cluster.device.memory * (1 - margin)
