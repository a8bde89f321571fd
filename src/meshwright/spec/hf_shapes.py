"""Reads a model from the shapes in its `config.json` alone, to plan it; it cannot be trained here.

Which layers attend, which have a recurrence and which have experts is read from the keys that say
so. What keys do not say, norms, biases and gates, is in `KNOWN` for the types that are known, and
as in Llama for others. `Planned.assumed` has each assumption in a line.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

from pydantic import ValidationError

from meshwright.errors import ConfigError, refusal
from meshwright.spec.families import FAMILIES
from meshwright.spec.families.base import FEATURES
from meshwright.spec.families.layers import shortest_pattern
from meshwright.spec.hf import spec_from_hf
from meshwright.spec.hf_text import text_config
from meshwright.spec.kinds import LARGEST
from meshwright.spec.mixers import Matrix, Mixer, Planned
from meshwright.spec.model import MOST_LAYERS, LayerSpec, ModelSpec
from meshwright.spec.recurrences import (
    Delta,
    Heads,
    KimiDelta,
    Mamba,
    indexer,
)
from meshwright.units import counted


class Traits(NamedTuple):
    """What a type has that no key says: features of `ModelSpec`, and how its layers are made.

    `single`: a layer has one sublayer. `beside`: a recurrence is beside attention in each layer.
    `unlike`: attention's sizes differ by layer. `corrects`: the correction of a router's scores is
    a parameter. `absent` has the values of keys that a file leaves out.
    """

    family: str = "llama"
    features: Mapping[str, Any] = {}
    single: bool = False
    beside: bool = False
    unlike: bool = False
    corrects: bool = False
    absent: Mapping[str, Any] = {}


_TIED: Final = {"tie_word_embeddings": True}
# Read in the sources of transformers 5.23.
KNOWN: Final[Mapping[str, Traits]] = {
    "deepseek_v32": Traits("deepseek_v3", {"router_scores": "sigmoid"}),
    "kimi_linear": Traits("deepseek_v3", {"router_scores": "sigmoid"}),
    "llama4_text": Traits(
        "qwen2_moe", {"router_scores": "sigmoid"}, absent={"num_experts_per_tok": 1}
    ),
    "ernie4_5_moe": Traits("deepseek_v3", corrects=True, absent=_TIED),
    "falcon_h1": Traits("llama", beside=True),
    "nemotron_h": Traits(
        "llama", {"router_scores": "sigmoid"}, single=True, absent={"mlp_hidden_act": "relu2"}
    ),
    "gemma4_text": Traits("gemma3", {"norm_placement": "both"}, unlike=True, absent=_TIED),
}
# Tables of a text model in a config of a model with images or sound.
_TEXT: Final = ("text_config", "llm_config", "language_config")
_LETTERS: Final = {"M": "linear_attention", "E": "moe", "*": "full_attention", "-": "mlp"}
_FULL: Final = ("full_attention", "attention", "indexed_attention")
_BOUNDED: Final = ("sliding_attention", "chunked_attention")
_RECURRENT: Final = ("linear_attention", "mamba", "mamba2")
_ALONE: Final = ("moe", "mlp")
# Activations of MLPs without a gate.
_UNGATED: Final = ("relu2", "xielu")
# Keys that may hold a size of the model; one of them that nothing read is told.
_SIZE: Final = re.compile(r"(_size|_dim|_rank|_heads|_width|_experts|_layers|_groups)$|^num_|^n_")


class _Keys:
    """The keys of a config, each under any of its names; remembers which were read."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.config, self.read = config, {"num_hidden_layers", "model_type"}
        self.model_type = str(config.get("model_type"))

    def find(self, *names: str) -> Any:
        """Return the value of the first name that is set, or None."""
        self.read.update(names)
        return next((v for name in names if (v := self.config.get(name)) is not None), None)

    def size(self, *names: str, default: int | None = None) -> int:
        """Return a whole number of at least 1; raises `ConfigError` where no name has one."""
        value = self.find(*names)
        if value is None and default is not None:
            return default
        if value is None:
            rule = f"model_type = {self.model_type!r}: its shapes cannot be read without {names[0]}"
            raise ConfigError(refusal(rule, legal=names))
        minimum = 0 if default == 0 else 1
        is_whole = isinstance(value, int) and not isinstance(value, bool)
        if not is_whole or not minimum <= value <= LARGEST:
            name = next(name for name in names if self.config.get(name) is not None)
            rule = f"{name} = {value!r} must be a whole number from {minimum} up to {LARGEST}"
            raise ConfigError(rule)
        return int(value)

    def flag(self, *names: str, default: bool = False) -> bool:
        """Return true or false."""
        value = self.find(*names)
        if value is not None and not isinstance(value, bool):
            raise ConfigError(f"{names[0]} = {value!r} must be true or false")
        return default if value is None else value

    def rows(self, *names: str) -> list[Any] | None:
        """Return a list, or None where no name is set."""
        value = self.find(*names)
        if value is not None and not isinstance(value, list | tuple):
            raise ConfigError(f"{names[0]} = {value!r} must be a list")
        return None if value is None else list(value)

    def of_layers(self, count: int, *names: str) -> list[Any] | None:
        """Return a list with a value for each of so many layers, or None where no name is set."""
        listed = self.rows(*names)
        if listed is not None and len(listed) != count:
            name = next(name for name in names if self.config.get(name) is not None)
            rule = f"{name} has {len(listed)} layers, but num_hidden_layers = {count}"
            raise ConfigError(rule)
        return listed

    def table(self, name: str) -> Mapping[str, Any]:
        """Return a table; empty where there is none."""
        value = self.find(name)
        if value is not None and not isinstance(value, Mapping):
            raise ConfigError(f"{name} = {value!r} must be a table")
        return {} if value is None else value


def is_trainable(config: Mapping[str, Any]) -> bool:
    """Whether the type of a `config.json` has modules here."""
    model_type = text_config(config).get("model_type")
    return any(family.model_type == model_type for family in FAMILIES.values())


def planned_from_hf(config: Mapping[str, Any]) -> ModelSpec:
    """Return the model that a Hugging Face `config.json` describes.

    If its `model_type` cannot be trained here, the result has `ModelSpec.planned`: parameters,
    FLOPs and bytes that are derived from the sizes in the file, enough for a plan and no more.
    Raises `ConfigError` where a size that a plan needs cannot be read, or for a kind of layer whose
    parts are not known.
    """
    if is_trainable(config):
        return spec_from_hf(config)
    outer_type = config.get("model_type")
    inner = next((config[key] for key in _TEXT if isinstance(config.get(key), Mapping)), None)
    assumed = [] if inner is None else ["its text model alone: images and sound are left out"]
    if inner is not None:
        tied = config.get("tie_word_embeddings")
        config = {**inner, **({} if tied is None else {"tie_word_embeddings": tied})}
    if not isinstance(config.get("model_type"), str):
        raise ConfigError(f"model_type = {config.get('model_type')!r} must be a string")
    if inner is not None and is_trainable(config):
        spec = spec_from_hf(config)
        planned = Planned(model_type=str(outer_type), assumed=tuple(assumed))
        return spec.model_copy(update={"planned": planned})
    return _Shapes(config, assumed).spec()


class _Shapes:
    """Reads one config."""

    def __init__(self, config: Mapping[str, Any], assumed: Sequence[str]) -> None:
        self.traits = KNOWN.get(str(config.get("model_type")), Traits())
        self.keys, self.assumed = _Keys({**self.traits.absent, **config}), list(assumed)
        keys = self.keys
        self.dim = keys.size("hidden_size", "n_embd", "d_model")
        kinds = keys.rows("layers_block_type", "layer_types")
        self.count = len(kinds) if self.traits.single and kinds else self._layer_count()
        self.heads = keys.size("num_attention_heads", "n_head")
        self.kv_heads = keys.size("num_key_value_heads", default=self.heads)
        self.experts = keys.size(
            *("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts"), default=0
        )
        self.head_dim = keys.size("head_dim", default=max(self.dim // self.heads, 1))
        if self.count > MOST_LAYERS:
            rule = f"num_hidden_layers = {self.count} is above {MOST_LAYERS}"
            raise ConfigError(refusal(rule, legal=[MOST_LAYERS]))
        self.kinds = self._kinds()

    def spec(self) -> ModelSpec:
        """Return the model."""
        keys = self.keys
        features = {**FEATURES, **self.traits.features, **self._biases(), **self._latent()}
        fields = {
            "family": self.traits.family,
            "vocab_size": keys.size("vocab_size"),
            "dim": self.dim,
            "n_layers": self.count,
            "n_heads": self.heads,
            "n_kv_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "context": keys.size(
                *("max_position_embeddings", "model_max_length", "max_seq_len"), default=131072
            ),
            "tie_embeddings": keys.flag("tie_word_embeddings"),
            **features,
            **self._feed_forward(),
        }
        if fields.get("kv_lora_rank"):
            fields["n_kv_heads"] = self.heads
            fields["head_dim"] = fields["qk_nope_head_dim"] + fields["qk_rope_head_dim"]
        if self.experts == 0:
            fields |= {"shared_gate": False, "router_scores": "softmax"}
        pattern = shortest_pattern(self._layers())
        fields["layer_pattern"] = () if pattern == (LayerSpec(),) else pattern
        if self.keys.find("hidden_act", "mlp_hidden_act", "hidden_activation") in _UNGATED:
            fields["gated_mlp"] = False
        fields["planned"] = Planned(model_type=keys.model_type, assumed=tuple(self._told()))
        try:
            return ModelSpec(**fields)
        except ValidationError as error:
            reasons = "; ".join(
                item["msg"].removeprefix("Value error, ") for item in error.errors()
            )
            rule = f"the shapes of model_type = {keys.model_type!r} describe no valid model"
            raise ConfigError(f"{rule}: {reasons}") from error

    def _layer_count(self) -> int:
        pattern = self._pattern()
        return len(pattern) if pattern else self.keys.size("num_hidden_layers", "n_layer")

    def _pattern(self) -> str:
        """Return the letters of the layers, as Nemotron-H has them; empty if there are none."""
        pattern = self.keys.find("hybrid_override_pattern")
        if pattern is not None and not isinstance(pattern, str):
            raise ConfigError(f"hybrid_override_pattern = {pattern!r} must be a text")
        return pattern or ""

    def _biases(self) -> dict[str, Any]:
        use = self.keys.flag("use_bias")
        attention = self.keys.flag("attention_bias", default=use)
        mlp = self.keys.flag("mlp_bias", default=use)
        return {"attention_bias": attention, "mlp_bias": mlp} if attention or mlp else {}

    def _latent(self) -> dict[str, Any]:
        """Return the sizes of latent attention, if it is that."""
        rank = self.keys.size("kv_lora_rank", default=0)
        if not rank:
            return {}
        names = ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
        low = self.keys.size("q_lora_rank", default=0)
        sizes = {name: self.keys.size(name) for name in names}
        return {"kv_lora_rank": rank, "q_lora_rank": low, **sizes}

    def _feed_forward(self) -> dict[str, Any]:
        """Return the widths of MLPs and experts."""
        keys = self.keys
        width = keys.find("moe_intermediate_size", "expert_ffn_dim")
        if not self.experts:
            widths = ("shared_intermediate_size", "intermediate_size", "n_inner")
            return {"ffn_dim": keys.size(*widths)}
        names = ("num_experts_per_tok", "num_experts_per_token", "moe_k", "top_k_experts")
        expert = width if isinstance(width, int) else keys.size("intermediate_size")
        fields = {
            "ffn_dim": keys.size("intermediate_size_mlp", "intermediate_size", default=expert),
            "experts": self.experts,
            "expert_ffn_dim": expert,
            "top_k": keys.size(*names, "moe_topk"),
            "shared_ffn_dim": self._shared(expert),
        }
        if keys.find("moe_latent_size") is not None:
            raise ConfigError("moe_latent_size: experts of a latent vector are not planned")
        return fields

    def _shared(self, width: int) -> int:
        """Return the width of the experts that see all tokens."""
        keys = self.keys
        if keys.model_type == "llama4_text":
            return keys.size("intermediate_size")
        names = ("n_shared_experts", "moe_num_shared_experts", "num_shared_experts")
        shared = keys.size(*names, default=0)
        wholes = ("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size")
        shared_width = keys.find(*wholes, "shared_intermediate_size")
        return shared_width if isinstance(shared_width, int) else shared * width

    def _kinds(self) -> list[str]:
        """Return what each layer does with a sequence, in transformers' words."""
        keys, layers = self.keys, range(self.count)
        listed = keys.of_layers(self.count, "layer_types", "layers_block_type", "block_types")
        if listed is None and (pattern := self._pattern()):
            listed = [_LETTERS.get(letter, letter) for letter in pattern]
        if listed is not None:
            return [str(kind) for kind in listed]
        if (period := keys.size("full_attention_interval", default=0)) > 0:
            return [_FULL[0] if (i + 1) % period == 0 else _RECURRENT[0] for i in layers]
        attending = _Keys(keys.table("linear_attn_config")).rows("full_attn_layers")
        if attending is not None:  # counted from one
            return [_FULL[0] if i + 1 in attending else _RECURRENT[0] for i in layers]
        if self._has_recurrence() and not self.traits.beside:
            attending = keys.rows("attn_layer_indices") or []
            return [_FULL[0] if i in attending else _RECURRENT[0] for i in layers]
        if keys.find("attention_chunk_size") is not None:
            period = keys.size("no_rope_layer_interval", default=4)
            rotates = keys.of_layers(self.count, "no_rope_layers")
            rotates = rotates or [(i + 1) % period for i in layers]
            return [_BOUNDED[1] if rotated else _FULL[0] for rotated in rotates]
        bounded = keys.find("sliding_window") is not None
        bounded &= keys.flag("use_sliding_window", default=True)
        period = keys.size("sliding_window_pattern", default=0)
        if bounded and period:
            return [_FULL[0] if (i + 1) % period == 0 else _BOUNDED[0] for i in layers]
        return [_BOUNDED[0] if bounded else _FULL[0]] * self.count

    def _has_recurrence(self) -> bool:
        """Whether any key is of a recurrence, also one that is not known."""
        starts = ("linear_num", "mamba_", "ssm_", "time_step_", "conv_L", "rwkv", "attn_layer_")
        return any(key.startswith(starts) for key in self.keys.config)

    def _sparse(self) -> list[bool]:
        """Return which layers have experts."""
        keys, layers = self.keys, range(self.count)
        if not self.experts:
            return [False] * self.count
        listed = keys.of_layers(self.count, "mlp_layer_types")
        if listed is not None:
            return [kind == "sparse" for kind in listed]
        if (numbers := keys.rows("moe_layers")) is not None:
            return [i in numbers for i in layers]
        if isinstance(keys.find("moe_layer_freq"), list):
            return [bool(value) for value in keys.of_layers(self.count, "moe_layer_freq") or ()]
        dense = keys.rows("mlp_only_layers") or []
        names = ("decoder_sparse_step", "interleave_moe_layer_step", "moe_layer_interval")
        period = keys.size(*names, "moe_layer_freq", default=1)
        first = keys.size("first_k_dense_replace", "moe_layer_start_index", default=0)
        is_open = keys.find("moe_layer_end_index") in (None, -1)
        last = self.count - 1 if is_open else keys.size("moe_layer_end_index")
        return [i not in dense and (i + 1) % period == 0 and first <= i <= last for i in layers]

    def _layers(self) -> list[LayerSpec]:
        layers = zip(self.kinds, self._sparse(), strict=True)
        return [self._layer(i, kind, is_sparse) for i, (kind, is_sparse) in enumerate(layers)]

    def _layer(self, index: int, kind: str, is_sparse: bool) -> LayerSpec:
        traits = self.traits
        if kind not in (*_FULL, *_BOUNDED, *_RECURRENT, *_ALONE):
            rule = f"layer_types has {kind!r}, whose shapes are not known"
            raise ConfigError(refusal(rule, legal=[_FULL[0], _BOUNDED[0], _RECURRENT[0]]))
        if kind in _ALONE:
            return LayerSpec(dense=kind == "mlp" and self.experts > 0, mixer=Mixer(feeds=True))
        window = None
        if kind in _BOUNDED:
            key = "sliding_window" if kind == _BOUNDED[0] else "attention_chunk_size"
            window = self.keys.size(key)
        mixer = self._mixer(index, kind, window)
        if (topk := self.keys.size("index_topk", default=0)) and kind in _FULL:
            window = topk
        if traits.single and mixer is None:  # attention and nothing after it
            mixer = Mixer(attends=True, feeds=False)
        if traits.corrects and is_sparse:
            mixer = (mixer or Mixer(attends=True)).model_copy(update={"vectors": self.experts})
        is_dense = self.experts > 0 and not is_sparse and not traits.single
        return LayerSpec(
            window=window if mixer is None or mixer.attends else None, dense=is_dense, mixer=mixer
        )

    def _mixer(self, index: int, kind: str, window: int | None) -> Mixer | None:
        traits = self.traits
        if kind in _RECURRENT:
            return self._recurrence()
        if traits.beside:
            return self._mamba(attends=True)
        if traits.unlike:
            return self._unlike(index, kind, window)
        if self.keys.find("index_n_heads") is not None:
            heads, head_dim = self.keys.size("index_n_heads"), self.keys.size("index_head_dim")
            return indexer(self.dim, self.keys.size("q_lora_rank", default=0), heads, head_dim)
        return None

    def _recurrence(self) -> Mixer:
        keys, find = self.keys, self.keys.size
        if keys.find("linear_num_value_heads") is not None:
            return Delta(
                self.dim,
                find("linear_num_key_heads"),
                find("linear_num_value_heads"),
                find("linear_key_head_dim"),
                find("linear_value_head_dim"),
                find("linear_conv_kernel_dim"),
            ).mixer()
        table = keys.table("linear_attn_config")
        inside = _Keys(table) if table else keys
        if inside.find("linear_num_heads", "num_heads") is not None:
            return KimiDelta(
                self.dim,
                inside.size("linear_num_heads", "num_heads"),
                inside.size("linear_head_dim", "head_dim"),
                inside.size("linear_conv_kernel_dim", "short_conv_kernel_size"),
            ).mixer()
        return self._mamba()

    def _mamba(self, *, attends: bool = False) -> Mixer:
        keys, find = self.keys, self.keys.size
        heads = find("mamba_n_heads", "mamba_num_heads")
        head_dim = find("mamba_d_head", "mamba_head_dim")
        inner = heads * head_dim
        has_norm = keys.flag("mamba_rms_norm") if self.traits.beside else True
        return Mamba(
            self.dim,
            heads,
            head_dim,
            find("mamba_d_state", "ssm_state_size"),
            find("mamba_n_groups", "n_groups"),
            find("mamba_d_conv", "conv_kernel"),
            find("mamba_chunk_size", "chunk_size", default=256),
            keys.flag("mamba_conv_bias", "use_conv_bias", default=True),
            keys.flag("mamba_proj_bias", "use_bias"),
            inner if has_norm else 0,
        ).mixer(attends=attends, feeds=not self.traits.single)

    def _unlike(self, index: int, kind: str, window: int | None) -> Mixer:
        """Return the attention of a layer of Gemma 4, and what else that layer has."""
        keys, is_full = self.keys, kind in _FULL
        table = keys.table("per_layer_config")
        by_layer = {int(key): value for key, value in table.items() if str(key).isdecimal()}
        sizes = _Keys(_Keys({"per_layer_config": by_layer.get(index)}).table("per_layer_config"))
        shares_values = keys.flag("attention_k_eq_v") and is_full
        head_dim = sizes.size("head_dim", default=self.head_dim)
        kv_heads = sizes.size("num_key_value_heads", default=self.kv_heads)
        if is_full and not table:
            head_dim = keys.size("global_head_dim", default=512)
            if shares_values:
                kv_heads = keys.size("num_global_key_value_heads", default=kv_heads)
        reuses = index >= self.count - keys.size("num_kv_shared_layers", default=0)
        extra: list[Matrix] = []
        vectors = 0
        if self.experts or (reuses and keys.flag("use_double_wide_mlp")):
            extra += self._second_mlp()
        if self.experts:  # three norms, the router's scale, and one of each expert
            vectors += 4 * self.dim + self.experts
        if low := keys.size("hidden_size_per_layer_input", default=0):
            extra += self._per_layer(low)
            vectors += self.dim + (low if index == 0 else 0)
        own_kv = 0 if reuses else kv_heads
        heads = Heads(self.dim, self.heads, own_kv, head_dim, window, shares_values)
        return heads.mixer(tuple(extra), vectors)

    def _second_mlp(self) -> Iterator[Matrix]:
        width = self.keys.size("intermediate_size")
        for name in ("gate", "up"):
            yield Matrix(name=f"mixer.{name}", outer=width, inner=self.dim, cut="outer")
        yield Matrix(name="mixer.down", outer=self.dim, inner=width, cut="inner")

    def _per_layer(self, low: int) -> Iterator[Matrix]:
        """Yield the tables of tokens that each layer has, and what takes their rows."""
        rows = self.keys.size("vocab_size_per_layer_input", "vocab_size")
        yield Matrix(name="mixer.table", outer=rows, inner=low, cut="outer", lookup=True)
        for name in ("table_projection", "table_gate"):
            yield Matrix(name=f"mixer.{name}", outer=low, inner=self.dim, cut="whole")
        yield Matrix(name="mixer.table_out", outer=self.dim, inner=low, cut="whole")

    def _told(self) -> Iterator[str]:
        """Yield what a plan assumes, a line each."""
        yield from self.assumed
        keys, kinds = self.keys, Counter(self.kinds)
        if keys.model_type not in KNOWN:
            yield (
                f"{keys.model_type} is not a type that is known: norms, biases and gates as in "
                "Llama: compare the number of parameters with the published one"
            )
        recurrent = sum(kinds[kind] for kind in _RECURRENT)
        recurrent = self.count if self.traits.beside else recurrent
        if recurrent:
            yield (
                f"{counted(recurrent, 'layer')} with a recurrence: its FLOPs in chunks at the rate "
                "of attention's kernel, its tensors at that of memory"
            )
        if kinds[_BOUNDED[1]]:
            yield "attention in chunks is priced as a window of a chunk"
        if keys.find("index_topk") is not None:
            yield "attention over picked keys is priced as a window of so many, beside their index"
        if keys.find("num_nextn_predict_layers", "mtp_num_hidden_layers"):
            yield "layers that predict further tokens are left out"
        if keys.find("quantization_config") is not None:
            yield "weights are planned in train.precision, not as the file has them quantized"
        unread = sorted(
            key
            for key, value in keys.config.items()
            if _SIZE.search(key) and key not in keys.read | _TOLD and _is_size(value)
        )
        if unread:
            yield f"keys that were not read: {', '.join(unread)}"


# Keys of sizes that change neither parameters nor prices.
_TOLD: Final = frozenset(
    {
        *("chunk_size_feed_forward", "n_group", "num_expert_group", "mamba_expand", "num_labels"),
        *("mamba_d_ssm", "qk_head_dim", "num_logits_to_keep", "mtp_num_hidden_layers"),
    }
)


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 1
