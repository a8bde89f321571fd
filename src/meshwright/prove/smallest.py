"""`smallest`: simplifies a failing case to the simplest one that still fails."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Final

from pydantic import ValidationError

from meshwright.layout import AXES, Layout, broken
from meshwright.layout.schedules import SCHEDULES
from meshwright.prove.case import SGD, Case
from meshwright.spec.families import FAMILIES
from meshwright.spec.families.base import FEATURES
from meshwright.spec.model import ModelSpec

MOST_TRIES: Final = 80

# Changes of a case: values of its own, of its sections, and `microbatches`.
_Update = Mapping[str, Any]

_PLAIN_LAYOUT: Final = {"recompute": "none", "offload": "none", "sp": False, "cp_kind": "ring"}
_NO_ROUTER: Final = {
    "router_aux_loss": 0.0,
    "router_z_loss": 0.0,
    "router_bias_rate": 0.0,
    "expert_capacity": None,
}
_PLAIN_TRAIN: Final = {
    **_NO_ROUTER,
    "precision": "fp32",
    "reduce_dtype": "fp32",
    "master": "fp32",
    "matmul": "torch",
    "clip_norm": 1.0,
    "seed": 0,
}
_PLAIN_MODEL: Final = {
    **FEATURES,
    "dropout": 0.0,
    "lora": None,
    "tie_embeddings": False,
    "rope_scaling": None,
    "family": "llama",
    "activation": "silu",
    "norm_eps": 1e-5,
    "rope_theta": 10000.0,
    # Sizes that most degrees divide.
    "dim": 64,
    "head_dim": 8,
    "ffn_dim": 128,
    "vocab_size": 128,
    "pad_vocab_to_multiple_of": None,
}
# Of the case itself: what is compared.
_PLAIN_CASE: Final = {
    "packed": False,
    "optimizer": SGD,
    "steps": 1,
    "chat": False,
    "fsdp2": False,
}
_PLAIN: Final[Mapping[str, Mapping[str, object]]] = {
    "layout": _PLAIN_LAYOUT,
    "train": _PLAIN_TRAIN,
    "model": _PLAIN_MODEL,
}
_SEQ_LENS: Final = (8, 16, 32)


def smallest(case: Case, fails: Callable[[Case], bool], most_tries: int = MOST_TRIES) -> Case:
    """Return the simplest case that still fails (`fails(case)` is true), after at most `most_tries`
    tries.

    Each try simplifies one thing: a smaller degree, fewer microbatches, a policy or flag turned
    off, an even size. If the case still fails, it stays simplified. Repeats until nothing helps.
    Only legal cases are tried.
    """
    tried = {case}
    has_changed = True
    while has_changed:
        has_changed = False
        for update in _updates(case):
            simpler = _updated(case, update)
            if simpler is None or simpler in tried or _complexity(simpler) >= _complexity(case):
                continue
            if len(tried) > most_tries:
                return case
            tried.add(simpler)
            if fails(simpler):
                case, has_changed = simpler, True
    return case


def _complexity(case: Case) -> int:
    """Return a measure that each simplification lowers: the sum of degrees and counts, and of
    values that differ from the plainest.
    """
    layout, model = case.layout, case.model
    counts = [*layout.mesh.shape, layout.ep, layout.microbatch, layout.virtual_stages, layout.zero]
    counts += [layout.folds, _microbatches(case), model.n_layers, model.n_heads, model.n_kv_heads]
    counts += [model.experts, model.top_k]
    if layout.is_pipelined:
        counts.append(list(SCHEDULES).index(layout.schedule))
    not_plain = (
        getattr(getattr(case, section), name) != value
        for section, values in _PLAIN.items()
        for name, value in values.items()
    )
    not_default = (getattr(case, name) != value for name, value in _PLAIN_CASE.items())
    is_odd = case.train.seq_len not in _SEQ_LENS
    return sum(map(int, (*counts, *not_plain, *not_default, is_odd)))


def _updates(case: Case) -> Iterator[_Update]:
    """Yield changes that may simplify a case, largest first: keys by section, and
    `microbatches`.
    """
    layout, model = case.layout, case.model
    yield {"layout": {"etp": None}}
    yield from ({"layout": {"ep": n, "etp": None}} for n in range(1, layout.ep))
    for axis in AXES:
        yield from ({"layout": {axis: n}} for n in range(1, getattr(layout, axis)))
    yield {"layout": {"microbatch": 1}}
    yield from ({"microbatches": n} for n in range(1, _microbatches(case)))
    if layout.is_pipelined:
        for traits in SCHEDULES.values():
            for virtual in range(traits.min_virtual, layout.virtual_stages + 1):
                yield {"layout": {"schedule": traits.name, "virtual_stages": virtual}}
    yield from ({"layout": {"zero": zero}} for zero in range(layout.zero))
    yield {
        "layout": {"ep": 1, "etp": None},
        "model": {"family": "llama", **FAMILIES["llama"].features, **_of_latent(model)},
        "train": _NO_ROUTER,
    }
    for section, values in _PLAIN.items():
        yield from ({section: {name: value}} for name, value in values.items())
    yield from ({"model": {"experts": n}} for n in range(model.top_k, model.experts))
    yield from ({"model": {"top_k": n}} for n in range(1, model.top_k))
    yield from ({"model": {"n_layers": n}} for n in range(layout.stages, model.n_layers))
    for heads in range(1, model.n_heads):
        yield {"model": {"n_heads": heads, "n_kv_heads": min(heads, model.n_kv_heads)}}
    yield from ({"train": {"seq_len": n}} for n in _SEQ_LENS if n <= case.train.seq_len)
    yield from ({name: value} for name, value in _PLAIN_CASE.items())


def _of_latent(model: ModelSpec) -> dict[str, int]:
    """Return a plain `head_dim` for a model that had latent attention, whose head size is a sum of
    two parts.
    """
    return {"head_dim": 8} if model.is_latent else {}


def _updated(case: Case, update: _Update) -> Case | None:
    """Return the case with a change; None if that is not legal."""
    changes = dict(update)
    microbatches = changes.pop("microbatches", _microbatches(case))
    layout = _settled(case.layout.model_copy(update=changes.pop("layout", {})))
    batch = layout.dp * layout.microbatch * microbatches
    train = case.train.model_copy(update={**changes.pop("train", {}), "batch": batch})
    model = case.model.model_copy(update=changes.pop("model", {}))
    model = model.model_copy(update=FAMILIES[model.family].of_width(model.dim))
    try:
        ModelSpec.model_validate_json(model.model_dump_json())
    except ValidationError:
        return None
    if broken(model, train, layout) is not None:
        return None
    return replace(case, model=model, train=train, layout=layout, **changes)


def _settled(layout: Layout) -> Layout:
    """Return the layout with default policies for each axis whose degree is 1."""
    update: dict[str, Any] = {}
    if layout.tp == 1:
        update |= {"sp": False}
    if layout.cp == 1:
        update |= {"cp_kind": "ring"}
    if layout.pp == 1:
        update |= {"schedule": "1f1b", "virtual_stages": 1}
    return layout.model_copy(update=update)


def _microbatches(case: Case) -> int:
    return case.layout.microbatches(case.train.batch)
