"""Which layouts `benchmarks.gpu_ranks` proves, those that tell most in the least time first."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import combinations
from typing import Any, Final, NamedTuple

from meshwright.layout import Layout, broken
from meshwright.prove.case import Case
from meshwright.prove.matrix import matrix
from meshwright.spec.training import TrainSpec

# First the plain layouts, in bf16. They have one model and batch, so that what one device computes
# is computed once.
PLAIN: Final = {
    2: (
        *("dp2 mb2", "tp2 sp mb2", "shard2 zero3 mb2", "cp2-ring mb2", "zero3 cp2-ulysses mb2"),
        *("pp2 1f1b mb2", "shard2 zero2 mb2 recompute-selective", "pp2 zbv v2 mb2"),
        *("tp2 mb2 recompute-full", "shard2 zero3 mb2 offload-params"),
        *("pp2 interleaved_zero_bubble v2 mb2 offload-activations", "shard2 zero1 mb2"),
    ),
    4: (
        *("dp2 tp2 sp mb2", "dp2 shard2 zero3 mb2", "cp4-ring mb2", "tp2 sp pp2 zbv v2 mb2"),
        *("shard2 zero3 tp2 sp mb2", "tp2 cp2-ulysses mb2", "shard2 zero2 cp2-ring mb2"),
        "shard2 zero3 pp2 interleaved_1f1b v2 mb2",
    ),
}
# Then experts in bf16, for which GPUs have kernels of their own; a token has them all, so that
# rounding does not choose.
EXPERTS: Final = {
    2: ("shard2 zero3 ep2 mb2", "tp2 sp ep2 etp1 mb2", "dp2 ep2 mb2", "pp2 zbv v2 mb2"),
    4: ("dp2 tp2 sp ep4 etp1 mb2", "shard2 zero3 ep2 pp2 1f1b mb2"),
}
# Then so many of the table, of all kinds.
NUMBERS: Final = {2: 32, 4: 20}
# After so many of these comes one whose kernels a compiler makes, which takes long.
_BETWEEN: Final = 5
# Layouts with heads wide enough for FlexAttention, or with compiled blocks: family, precision.
_WIDE: Final = {
    2: (
        ("cp2-ring mb2", "gemma2", "bf16"),
        ("zero3 cp2-ulysses mb2", "gpt_oss", "fp32"),
        ("cp2-ring mb2", "mistral", "fp32"),
    ),
    4: (("tp2 sp cp2-ring mb2", "gemma3", "bf16"),),
}
_COMPILED: Final = {
    2: (
        ("tp2 sp mb2", "llama", "bf16"),
        ("shard2 zero3 mb1", "llama", "fp32"),
        ("pp2 zbv v2 mb2", "llama", "fp32"),
    ),
    4: (("shard2 zero3 tp2 sp mb2", "llama", "fp32"),),
}
# What is new of a case counts so much: a word of its layout, or another; a pair of words that has
# one of the layout, or has not.
_WORDS: Final = (50, 25)
_PAIRS: Final = (5, 1)
# Parts that have adapters, in a label.
_PARTS: Final = re.compile(r"(attn|mlp)\.\S+ ?")
# Words that say nothing of kinds: sizes, and what follows from others.
_SIZES: Final = re.compile(rf"mb\d+|\d+L|\d+x\d+|fsdp2|v\d+|{_PARTS.pattern}|tied|biased")


class Chosen(NamedTuple):
    """A case, and what tells it from others of its label."""

    case: Case
    more: str = ""

    @property
    def name(self) -> str:
        """A line that tells it from the others."""
        return _PARTS.sub("", self.case.label) + self.more

    @property
    def compiles(self) -> bool:
        """Whether a compiler makes kernels for it on a GPU."""
        return self.case.train.is_compiled or bool(self.more)


def chosen(world: int) -> list[Chosen]:
    """Return the cases of a number of ranks, in the order in which they are proven."""
    legal = (_by_fsdp2(case) for case in matrix(world) if case.refused is None)
    table = list(dict.fromkeys(legal))
    found = [Chosen(_like(table, label, "llama", "bf16")) for label in PLAIN[world]]
    found += [Chosen(_like(table, label, "olmoe", "bf16")) for label in EXPERTS[world]]
    slow = _slow(world, table)
    for number, case in enumerate(_telling(table, NUMBERS[world]), start=1):
        found.append(Chosen(case))
        if number % _BETWEEN == 0 and slow:
            found.append(slow.pop(0))
    return found + slow


def _by_fsdp2(case: Case) -> Case:
    """Return the case as GPUs have it, also for CPUs."""
    return replace(case, fsdp2=case.layout.zero > 0)


def _telling(table: Iterable[Case], number: int) -> Iterator[Case]:
    """Yield so many cases, each with the most in its time that none before has."""
    rest = {case: _features(case) for case in table}
    seen: set[tuple[str, ...]] = set()

    def told(case: Case) -> float:
        return sum(rest[case][one] for one in rest[case].keys() - seen) / _cost(case)

    for _ in range(number):
        best = max(rest, key=told)
        seen |= rest.pop(best).keys()
        yield best


def _features(case: Case) -> dict[tuple[str, ...], int]:
    """Return the words of a case and all pairs of them, with what each counts."""
    own = {word for word in case.layout.label.split() if not _SIZES.fullmatch(word)}
    _, _, model = case.label.partition(", ")
    others = {word for word in model.split() if not _SIZES.fullmatch(word)}
    words = own | others | {case.train.precision, case.optimizer.name}
    found: dict[tuple[str, ...], int] = {(word,): _WORDS[word not in own] for word in words}
    for pair in combinations(sorted(words), 2):
        found[pair] = _PAIRS[own.isdisjoint(pair)]
    return found


def _cost(case: Case) -> float:
    """Return about how many times as long as a case in fp32 one takes, on CPUs most of it."""
    if case.train.precision == "fp32":
        return 1.0
    return 6.0 if case.samples > 3 else 2.0


def _slow(world: int, table: Sequence[Case]) -> list[Chosen]:
    """Return the cases for whose kernels there is a compiler, in turns."""
    found = []
    for wide, compiled in zip(_WIDE[world], _COMPILED[world], strict=True):
        found.append(Chosen(_like(table, *wide, head_dim=32), ", wide heads"))
        found.append(Chosen(_like(table, *compiled, compile=True)))
    return found


def _like(
    table: Sequence[Case],
    label: str,
    family: str,
    precision: str,
    *,
    head_dim: int = 8,
    compile: bool = False,
) -> Case:
    """Return a case with the table's first model of a family; raises if it is illegal."""
    models = [case.model for case in table if case.model.family == family]
    model = next((one for one in models if one.experts == one.top_k), models[0])
    values: dict[str, Any] = {"batch": 8, "seq_len": 64, "precision": precision}
    train = TrainSpec(**values, compile=compile)
    model = model.model_copy(update={"head_dim": head_dim, "n_layers": 4})
    case = _by_fsdp2(Case(model, train, Layout.parse(label)))
    rule = broken(case.model, case.train, case.layout)
    assert rule is None, rule
    return case
