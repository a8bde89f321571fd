"""Makes a program that nobody has changed compute less: fewer layers, smaller sizes, fewer tokens.

Layers and sizes are reduced where the program makes its model, rows and their length where it calls
it. Outputs get their places back, as zeros, so that the program's own loss can be computed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn

from meshwright.errors import ConfigError
from meshwright.torch_private import tree_flatten, tree_map

DEPTH: Final = "num_hidden_layers"
# Numbers of a transformers config that may be smaller, each with the least that is tried.
SIZES: Final = {
    DEPTH: 1,
    "num_experts": 2,
    "num_local_experts": 2,
    "n_routed_experts": 2,
    "moe_intermediate_size": 8,
    "intermediate_size": 8,
    "num_key_value_heads": 1,
    "num_attention_heads": 2,
    "hidden_size": 8,
}


@dataclass(frozen=True)
class Reduction:
    """What a program computes less of; what is empty or None stays as it is.

    `layers` has the number of layers that are kept of each class that a list of modules has,
    `sizes` numbers of a transformers config. `rows` and `length` are those of a microbatch.
    """

    layers: Mapping[str, int] = field(default_factory=dict)
    sizes: Mapping[str, int] = field(default_factory=dict)
    rows: int | None = None
    length: int | None = None

    @classmethod
    def from_json(cls, text: str) -> Reduction:
        """Return the reduction that a JSON text states; raises `ConfigError`."""
        try:
            reduction = cls(**json.loads(text))
            numbers = [*reduction.layers.values(), *reduction.sizes.values()]
            numbers += [n for n in (reduction.rows, reduction.length) if n is not None]
        except (TypeError, ValueError, AttributeError) as error:
            raise ConfigError(f"--case takes what --smallest has printed: {error}") from None
        if not all(type(number) is int and number > 0 for number in numbers):
            raise ConfigError(f"--case {text}: every number must be 1 or more")
        return reduction

    def as_json(self) -> str:
        """Return it as JSON, without what stays as it is."""
        return json.dumps({key: value for key, value in asdict(self).items() if value})

    @property
    def cuts(self) -> bool:
        """Whether rows or tokens are left out."""
        return self.rows is not None or self.length is not None

    def reduce_lists(self) -> None:
        """Keep the first layers of lists of modules that this process makes from now on."""
        if not self.layers:
            return
        list_init, sequence_init = nn.ModuleList.__init__, nn.Sequential.__init__

        def init_list(self_: nn.ModuleList, modules: Iterable[nn.Module] | None = None) -> None:
            list_init(self_, None if modules is None else self._kept(list(modules)))

        def init_sequence(self_: nn.Sequential, *args: Any) -> None:
            sequence_init(self_, *self._kept(list(args)))

        setattr(nn.ModuleList, "__init__", init_list)  # noqa: B010
        setattr(nn.Sequential, "__init__", init_sequence)  # noqa: B010

    def _kept(self, modules: list[Any]) -> list[Any]:
        kinds = {type(module).__name__ for module in modules}
        count = self.layers.get(kinds.pop()) if len(kinds) == 1 else None
        return modules[:count]

    def reduce_configs(self, modeling: Any) -> None:
        """Change the config of each model that `transformers.modeling_utils` makes from now on."""
        original: Callable[..., None] = modeling.PreTrainedModel.__init__

        def init(model: Any, config: Any, *args: Any, **kwargs: Any) -> None:
            self.reduce_config(config)
            original(model, config, *args, **kwargs)

        modeling.PreTrainedModel.__init__ = init

    def reduce_config(self, config: Any) -> None:
        """Set the sizes that a config has larger ones of, and shorten its lists of layers."""
        depth = getattr(config, DEPTH, None)
        for key, size in self.sizes.items():
            before = getattr(config, key, None)
            if not isinstance(before, int) or before <= size:
                continue
            for name, value in list(vars(config).items()):
                if key == DEPTH and isinstance(value, list) and len(value) == depth:
                    setattr(config, name, value[:size])
            setattr(config, key, size)


class InputShape(NamedTuple):
    """Rows and length of a microbatch, from the first tensor of its inputs; 0 if there is none."""

    rows: int
    length: int


def input_shape(inputs: Any) -> InputShape:
    """Return the shape of a microbatch: of the ids, if an input has integers in rows."""
    tensors = [leaf for leaf in tree_flatten(inputs)[0] if isinstance(leaf, Tensor) and leaf.dim()]
    ids = [x for x in tensors if x.dim() == 2 and not x.is_floating_point()]
    first = next(iter(ids or tensors), None)
    if first is None:
        return InputShape(0, 0)
    return InputShape(first.shape[0], first.shape[1] if first.dim() > 1 else 0)


class InputCut:
    """Leaves out rows and tokens of a forward's inputs, and puts zeros in their places after it."""

    def __init__(self, reduction: Reduction) -> None:
        self._reduction = reduction
        self._before, self._after = InputShape(0, 0), InputShape(0, 0)

    def inputs(self, inputs: Any) -> Any:
        """Return the first rows and tokens of inputs."""
        rows, length = self._before = input_shape(inputs)
        asked = self._reduction
        self._after = InputShape(min(rows, asked.rows or rows), min(length, asked.length or length))
        return tree_map(self._cut, inputs)

    def _cut(self, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or not leaf.dim():
            return leaf
        if leaf.shape[0] == self._before.rows:
            leaf = leaf[: self._after.rows]
        # A mask of attention has the length twice, at its end; anything else in its second dim.
        dims = (2, 3) if leaf.dim() == 4 else (1,)
        for dim in dims:
            if self._before.length and dim < leaf.dim() and leaf.shape[dim] == self._before.length:
                leaf = leaf.narrow(dim, 0, self._after.length)
        return leaf

    def output(self, leaf: Tensor) -> Tensor:
        """Return an output with zeros where rows and tokens were left out."""
        for dim, (before, after) in enumerate(zip(self._before, self._after, strict=True)):
            if before > after and leaf.dim() > dim and leaf.shape[dim] == after:
                shape = list(leaf.shape)
                shape[dim] = before - after
                leaf = torch.cat([leaf, leaf.new_zeros(shape)], dim)
        return leaf


def case_of(model: nn.Module, shape: InputShape, microbatches: int) -> dict[str, Any]:
    """Return what there is to reduce of a run, as JSON: layers, sizes, rows, length.

    For models of transformers also what makes them again: classes, config and distributed config.
    """
    config = getattr(model, "config", None)
    lists = [m for m in model.modules() if isinstance(m, nn.ModuleList | nn.Sequential)]
    layers = dict[str, int]()
    for modules in lists:
        kinds = {type(module) for module in modules}
        if len(kinds) == 1 and len(modules) > 1 and any(True for _ in modules[0].parameters()):
            name = kinds.pop().__name__.removeprefix("FSDP")
            layers[name] = max(len(modules), layers.get(name, 0))
    facts: dict[str, Any] = {
        "model": f"{type(model).__module__}.{type(model).__qualname__}",
        "microbatches": microbatches,
        "rows": shape.rows,
        "length": shape.length,
        "layers": layers,
        "sizes": {},
    }
    if hasattr(config, "to_diff_dict") and hasattr(type(model), "_from_config"):
        numbers = {key: getattr(config, key, None) for key in SIZES}
        facts["sizes"] = {key: n for key, n in numbers.items() if isinstance(n, int)}
        facts["layers"] = {} if DEPTH in facts["sizes"] else layers
        facts["transformers"] = _of_transformers(model)
    return facts


def _of_transformers(model: Any) -> dict[str, Any] | None:
    """Return names and values that make a model of transformers again; None without a layout."""
    layout = getattr(model.config, "distributed_config", None)
    if layout is None or not hasattr(layout, "to_dict"):
        return None
    kind = next(k for k in type(model).__mro__ if k.__module__.startswith("transformers."))
    values = model.config.to_diff_dict()
    left_out = ("distributed_config", "dtype", "transformers_version", "architectures")
    try:
        facts: dict[str, Any] = json.loads(
            json.dumps(
                {
                    "class": kind.__name__,
                    "config_class": type(model.config).__name__,
                    "config": {k: v for k, v in values.items() if k not in left_out},
                    "layout": {k: v for k, v in layout.to_dict().items() if v is not None},
                }
            )
        )
    except TypeError:
        return None
    return facts
