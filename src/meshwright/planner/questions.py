"""Answers before a run: fewest devices, largest batch, longest context, lowest cost per token.

Also what can be fine-tuned on some devices: all weights, LoRA adapters, or adapters on NF4 weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Final

from meshwright.cost.catalogue import Cluster, cluster_of, find_device
from meshwright.cost.inputs import CostInputs
from meshwright.cost.price import Prediction, estimated, price
from meshwright.errors import ConfigError
from meshwright.layout import Layout, broken
from meshwright.planner.lightest import Lengths, divisions, lightest, lightest_of, with_train
from meshwright.planner.rank import MARGIN, Search
from meshwright.planner.space import RECOMPUTES
from meshwright.spec.lora import Lora, check_targets, own_layers
from meshwright.spec.model import ModelSpec
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
    """Return the cluster with `devices` devices, on as many nodes as they need."""
    per_node = min(cluster.per_node, devices)
    return replace(cluster, nodes=-(-devices // per_node), per_node=per_node)


def sizes_up_to(cluster: Cluster, devices: int) -> list[int]:
    """Return the numbers of devices to consider, at most `devices`: divisors of a node, then whole
    nodes."""
    node = cluster.per_node
    parts = [size for size in range(1, min(node, devices) + 1) if node % size == 0]
    return parts + list(range(2 * node, devices + 1, node))


def fewest_devices(
    setting: CostInputs, devices: int, margin: float = MARGIN
) -> tuple[int, Prediction] | None:
    """Return the fewest devices on which a layout fits, and the fastest layout on them.

    Tries divisors of a node, then whole nodes, up to `devices`. None if no layout fits on any.
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
    """The largest batch that fits without gradient accumulation under one recomputation policy.

    `sequences` is dp x microbatch. `batch` is the global batch of the prediction: one microbatch
    per data-parallel rank, or four for each pipeline rank. `at_speed` says that its tokens per
    second are at least 90% of the fastest with this policy; otherwise it is the largest batch at
    any speed.
    """

    recompute: Recompute
    sequences: int
    batch: int
    prediction: Prediction
    at_speed: bool


def largest_batches(
    setting: CostInputs, devices: int, margin: float = MARGIN
) -> list[LargestBatch]:
    """Return the largest batch that fits without gradient accumulation, for each recomputation
    policy.

    Each is the largest one, over all parallel degrees, with at least 90% of the most tokens per
    second of its policy. If another batch is the largest at any speed, it comes last. A larger
    global batch accumulates microbatches of this size and needs no more memory.
    """
    everything = list(divisions(setting, devices))
    limit = _limit(setting, margin)
    best, all_batches = [], []
    for policy in RECOMPUTES:
        batches = [
            batch
            for division in everything
            if (batch := _largest_of(setting, division, policy, limit)) is not None
        ]
        all_batches += batches
        enough = _AT_SPEED * max((batch.prediction.tokens_per_s for batch in batches), default=0.0)
        fast = [batch for batch in batches if batch.prediction.tokens_per_s >= enough]
        best += _first_priced(setting, fast, limit)
    largest = _first_priced(setting, all_batches, limit)
    return best + [replace(batch, at_speed=False) for batch in largest if batch not in best]


def _first_priced(
    setting: CostInputs, batches: list[LargestBatch], limit: float
) -> list[LargestBatch]:
    """Return a list with the largest of the batches that fits by its exact price, or an empty one.

    `batches` are priced in closed form. One that exceeds `limit` bytes is replaced by a smaller one
    with the same parallel degrees.
    """
    left = sorted(batches, key=_largest_first)
    while left:
        batch, *left = left
        layout = batch.prediction.layout
        priced = price(with_train(setting, batch=batch.batch), layout)
        if priced.memory.total <= limit:
            return [replace(batch, prediction=priced)]
        sequences = min(int(layout.microbatch * limit / priced.memory.total), layout.microbatch - 1)
        plain = layout.model_copy(update=_PLAIN)
        smaller = _of_size(setting, plain, sequences) if sequences else None
        left = sorted([*left, *([] if smaller is None else [smaller])], key=_largest_first)
    return []


def _largest_first(batch: LargestBatch) -> tuple[int, float]:
    return -batch.sequences, -batch.prediction.tokens_per_s


def _largest_of(
    setting: CostInputs, division: Layout, recompute: Recompute, limit: float
) -> LargestBatch | None:
    """Return the largest batch with the degrees of `division`, or None if not even one sequence
    fits."""
    division = division.model_copy(update={"recompute": recompute})
    sequences = _most(setting, division, limit)
    return _of_size(setting, division, sequences) if sequences else None


def _of_size(setting: CostInputs, division: Layout, sequences: int) -> LargestBatch | None:
    """Return the batch whose microbatch has `sequences` sequences, priced in closed form.

    None if no layout with these parallel degrees is legal.
    """
    count = _microbatches(division)
    sized_setting = with_train(setting, batch=sequences * division.dp * count)
    light = lightest_of(sized_setting, division.model_copy(update={"microbatch": sequences}), count)
    if light is None or broken(sized_setting.model, sized_setting.train, light.layout) is not None:
        return None
    prediction = estimated(sized_setting, light.layout)
    return LargestBatch(
        division.recompute,
        sequences * division.dp,
        sized_setting.train.batch,
        prediction,
        at_speed=True,
    )


def _microbatches(division: Layout) -> int:
    return _FILL * division.pp if division.pp > 1 else 1


def _most(setting: CostInputs, division: Layout, limit: float) -> int:
    """Return the most sequences in a microbatch that fit in `limit` bytes; 0 if not even one
    does."""

    def fits(sequences: int) -> bool:
        layout = division.model_copy(update={"microbatch": sequences})
        light = lightest_of(setting, layout, _microbatches(division))
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
    setting: CostInputs, devices: int, margin: float = MARGIN
) -> tuple[int, Prediction] | None:
    """Return the length in tokens of the longest sequences that fit, with the fastest layout.

    The batch stays the same. Tries powers of two and seven lengths between each two of them,
    without offload. None if even the shortest does not fit.
    """
    fits = Lengths(setting, devices, _limit(setting, margin)).fit

    def exactly(length: int) -> Prediction | None:
        if not fits(length):
            return None
        lengthened = with_train(setting, seq_len=length)
        result = Search(lengthened, devices, margin, {"offload": "none"}).run(1)
        return result.ranked[0] if result.ranked else None

    octave = 1 << 10
    while octave < _LONGEST and fits(2 * octave):
        octave *= 2
    # The closed form is a few percent off: what it takes for the longest may not fit.
    while (octave_prediction := exactly(octave)) is None:
        octave //= 2
        if octave < _SHORTEST:
            return None
    step = octave // _OCTAVE
    for length in range(octave + (_OCTAVE - 1) * step, octave, -step):
        if (prediction := exactly(length)) is not None:
            return length, prediction
    return octave, octave_prediction


@dataclass(frozen=True)
class Offer:
    """A number of devices of one kind, their fastest layout, and the price of a device for an
    hour."""

    device: str
    devices: int
    prediction: Prediction
    price_per_hour: float

    @property
    def cost(self) -> float:
        """Cost of a million tokens, in the same currency as the prices."""
        return self.price_per_hour * self.devices / 3600 / self.prediction.tokens_per_s * 1e6


def cheapest(
    setting: CostInputs, prices: Mapping[str, float], devices: int, margin: float = MARGIN
) -> list[Offer]:
    """Return the fastest layout on each kind and number of devices, the lowest cost per token
    first.

    `prices` has the price of a device for an hour, by its name in the catalogue. Tries powers of
    two below `devices`, and `devices`. Raises `ConfigError` without any price, or for an unknown
    name.
    """
    if not prices:
        raise ConfigError(
            "nothing has a price: give cluster.price for an hour of one device, or "
            "--price h100-sxm=PRICE for each kind to compare"
        )
    offers = []
    for name, price_per_hour in prices.items():
        cluster = setting.cluster
        if name != cluster.device.name:
            cluster = cluster_of(find_device(name), find_device(name).per_node)
        for count in _by_powers(devices):
            tried = replace(setting, cluster=on_devices(cluster, count))
            light = lightest(tried, count)
            if light is None or light.bytes > _limit(tried, margin):
                continue
            offers += [
                Offer(name, count, prediction, price_per_hour)
                for prediction in Search(tried, count, margin).run(1).ranked
            ]
    return sorted(offers, key=lambda offer: (offer.cost, offer.devices))


def _by_powers(devices: int) -> Iterator[int]:
    count = 1
    while count < devices:
        yield count
        count *= 2
    yield devices


def _limit(setting: CostInputs, margin: float) -> float:
    return setting.cluster.device.memory * (1 - margin)


# The rank of adapters where a config has none.
RANK: Final = 16


@dataclass(frozen=True)
class FineTuning:
    """One way to fine-tune: what is trained, and which layouts fit.

    `refused` says why the model cannot have adapters, None if it can. `prediction` is the fastest
    layout at `train.seq_len`, `longest` the longest sequences in tokens with the fastest layout for
    them; both are None if nothing fits.
    """

    trained: str
    prediction: Prediction | None = None
    longest: tuple[int, Prediction] | None = None
    refused: str | None = None


def fine_tunings(setting: CostInputs, devices: int, margin: float = MARGIN) -> list[FineTuning]:
    """Return the layouts that fit for training all weights, LoRA adapters, and adapters on NF4
    weights.

    Uses the model's adapters if it has some, otherwise adapters of rank `RANK` on every linear
    layer that can have one of its own.
    """
    model = setting.model
    lora = model.lora or Lora(rank=RANK, alpha=RANK, targets=_targets(model))
    name = f"adapters of rank {lora.rank}"
    ways: dict[str, Lora | None] = {
        "all weights": None,
        name: lora.model_copy(update={"base": "precision"}),
        f"{name}, 4-bit": lora.model_copy(update={"base": "nf4"}),
    }
    return [_way(setting, name, adapters, devices, margin) for name, adapters in ways.items()]


def _targets(model: ModelSpec) -> tuple[str, ...]:
    return tuple(own_layers(model.blocks))


def _way(
    setting: CostInputs, trained: str, lora: Lora | None, devices: int, margin: float
) -> FineTuning:
    model = setting.model
    try:
        check_targets(lora, model.blocks)
    except ValueError as error:
        return FineTuning(trained, refused=str(error))
    tuned_setting = replace(setting, model=model.model_copy(update={"lora": lora}))
    ranked = Search(tuned_setting, devices, margin).run(1).ranked
    return FineTuning(
        trained, ranked[0] if ranked else None, longest_context(tuned_setting, devices, margin)
    )
