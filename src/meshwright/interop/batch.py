"""Shared by DeepSpeed, GPT-NeoX and Megatron: batch arithmetic, and the split of documents.

Global batch = microbatch x accumulation x data-parallel ranks. "949,50,1" divides documents into
those for training, validation and test.
"""

from __future__ import annotations

from typing import NamedTuple

from meshwright.errors import either
from meshwright.interop.source import ImportSource

_DEGREES = ("layout.dp_replicate", "layout.dp_shard")


class Names(NamedTuple):
    """A system's keys for the global batch, the microbatch and the accumulation."""

    total: str
    micro: str
    accumulation: str


def read_batch(source: ImportSource, names: Names) -> int | None:
    """Import the batch keys: derive missing ones, and report numbers that contradict each other.

    The data-parallel degree is that of the base config, else the number of devices divided by `pp`,
    `cp` and `tp`; if the user did not give the number of devices and the file has all three sizes,
    it follows from these. Sets `train.batch`, `layout.microbatch` and the data-parallel degree.
    Returns the accumulation; None if the file has no batch keys, or if they are contradictory.
    """
    total, micro, accumulation = (source.whole(name) for name in names)
    if total is None and micro is None:
        _spread(source, None, "")
        return None  # the base config's batch stays
    known = dict(zip(names, (total, micro, accumulation), strict=True))
    ranks, whence = _data_ranks(source, known, names)
    if ranks == 0:
        return None
    if not source.setting.is_fixed and total is not None and _from_devices(whence):
        ranks = _that_divide(ranks, total, (micro or 1) * (accumulation or 1))
    # What is left out follows: DeepSpeed infers the third of three, and accumulates once at least.
    if total is None:
        accumulation = accumulation or 1
        total = (micro or 1) * accumulation * ranks
    elif micro is None:
        micro = total // (ranks * (accumulation or 1))
        accumulation = accumulation or 1
    elif accumulation is None:
        accumulation = total // (micro * ranks)
    assert micro is not None
    if micro * accumulation * ranks != total or micro < 1:
        _contradiction(source, names, known, ranks, whence)
        return None
    product = f"{micro} x {accumulation} x {ranks} data-parallel ranks = {total}"
    note = f"{product}; {whence}"
    if known[names.total] is None:
        source.translate(names.micro, {"layout.microbatch": micro, "train.batch": total}, note)
    else:
        source.honour(names.total, {"train.batch": total}, note)
        source.honour(names.micro, {"layout.microbatch": micro})
    if names.accumulation in source.values and known[names.accumulation] is not None:
        follows = "follows here from train.batch / (layout.microbatch x data-parallel ranks)"
        source.translate(names.accumulation, {"train.batch": total}, follows)
    _fill(source, micro, total, ranks, note)
    return accumulation


def _from_devices(whence: str) -> bool:
    """Return whether the data-parallel degree only follows from this machine's devices."""
    return whence.startswith(_HERE)


def _that_divide(ranks: int, total: int, size: int) -> int:
    """Return the largest number of ranks, at most `ranks`, by which the batch is divisible.

    `size` is the number of sequences of a rank. `layout` resolves the degree by the same rule.
    """
    if total % size:
        return ranks
    return next(n for n in range(ranks, 0, -1) if (total // size) % n == 0)


_HERE = "the devices here"


def _data_ranks(
    source: ImportSource, known: dict[str, int | None], names: Names
) -> tuple[int, str]:
    """Return the data-parallel degree and its origin in words; 0 after reporting a contradiction.

    A contradiction is one of the file's degrees and sizes with each other or with the devices.
    """
    base = [source.target(key) for key in _DEGREES]
    is_asked = any(key in source.setting.given for key in _DEGREES)
    if any(base) and (is_asked or not source.setting.is_fixed):
        product = (base[0] or 1) * (base[1] or 1)
        return product, f"{' x '.join(_DEGREES)} = {product} of the config"
    total, micro, accumulation = (known[name] for name in names)
    if not source.setting.is_fixed and total and micro and accumulation:
        if total % (micro * accumulation):
            _contradiction(source, names, known, None, "")
            return 0, ""
        return total // (micro * accumulation), "the ranks that the three sizes mean"
    degrees = {key: int(source.target(f"layout.{key}") or 1) for key in ("pp", "cp", "tp")}
    ranks = degrees["pp"] * degrees["cp"] * degrees["tp"]
    text = " x ".join(f"{key} {degree}" for key, degree in degrees.items())
    devices = source.setting.devices
    if devices % ranks or devices < ranks:
        present = [key for key, size in known.items() if size is not None]
        nearest = max(1, round(devices / ranks)) * ranks
        rule = f"{text} = {ranks} ranks hold one model, but there are {devices} devices"
        source.contradict(present, f"{rule}; nearest: --devices {nearest}", ["train.batch"])
        return 0, ""
    origin = f"{devices} devices" if source.setting.is_fixed else f"{_HERE}, {devices},"
    return devices // ranks, f"{origin} / ({text})"


def _contradiction(
    source: ImportSource,
    names: Names,
    known: dict[str, int | None],
    ranks: int | None,
    whence: str,
) -> None:
    total = known[names.total] or 1
    present = [name for name, size in known.items() if size is not None]
    factors = [f"{name} = {known[name]}" for name in names[1:] if known[name] is not None]
    if ranks is not None:
        factors.append(f"{ranks} data-parallel ranks ({whence})")
    product = ranks or 1
    for name in names[1:]:
        product *= known[name] or 1
    lower, upper = total // product * product, (total // product + 1) * product
    exact = all(known[name] is not None for name in names[1:]) and ranks is not None
    legal = [product] if exact else [n for n in (lower, upper) if n]
    rule = f"{names.total} = {total} is not {'' if exact else 'a multiple of '}"
    text = f"{rule}{' x '.join(factors)} = {product}"
    nearest = either(f"{names.total} = {n}" for n in legal)
    source.contradict(present, f"{text}; nearest: {nearest}", ["train.batch"])


def _fill(source: ImportSource, micro: int, total: int, ranks: int, reason: str) -> None:
    """Set the microbatch, the batch and the data-parallel degrees that follow from the file."""
    for key, value in (("layout.microbatch", micro), ("train.batch", total)):
        if source.target(key) is None:
            source.fill(key, value, reason)
    _spread(source, ranks, reason)


def _spread(source: ImportSource, ranks: int | None, reason: str) -> None:
    """Set the data-parallel degrees: shards of all ranks under ZeRO, otherwise replicas.

    `ranks` None means the degree of the base config. Degrees that the user gave, or that the file
    has, stay.
    """
    overridden = source.setting.given
    of_file = [key for entry in source.entries.values() for key in entry.to]
    if any(key in overridden or key in of_file for key in _DEGREES):
        return
    shards = int(source.target("layout.zero") or 0) > 0
    base = [source.setting.base.get(key) for key in _DEGREES]
    if ranks is None:
        if not shards or not base[0] or base[1]:
            return
        ranks, reason = int(base[0]), "ZeRO shards over all data-parallel ranks of the config"
    elif ranks == (base[0] or 1) * (base[1] or 1) and base[1]:
        return  # the base config says how they divide
    source.imply(_DEGREES[0], 1 if shards else ranks, reason)
    source.imply(_DEGREES[1], ranks if shards else 1, reason)


def read_split(source: ImportSource, key: str) -> None:
    """Import the shares of training, validation and test documents as `data.validation`."""
    text = str(source.get(key))
    try:
        shares = [float(part) for part in text.replace("/", ",").split(",")]
    except ValueError:
        source.contradict([key], f"{text!r} must be numbers such as 969,30,1")
        return
    if not shares[0] > 0:
        source.contradict([key], f"{text!r} must have a training share above 0")
        return
    validation = round(1 - shares[0] / sum(shares), 6)
    note = "of documents, chosen by data.seed; validation and test together"
    source.translate(key, {"data.validation": validation}, note)
