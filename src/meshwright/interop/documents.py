"""How Megatron's kin divide documents: "949,50,1" for training, validation and test."""

from __future__ import annotations

from meshwright.interop.source import ImportSource


def read_split(source: ImportSource, key: str) -> None:
    """Take the shares of training, validation and test as `data.validation`."""
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
