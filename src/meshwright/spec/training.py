"""The specs of everything but the model: data, training, optimizer, cluster, checkpoints, log."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal, cast

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    WithJsonSchema,
    create_model,
    field_validator,
    model_validator,
)

from meshwright.errors import nearest, refusal
from meshwright.spec.groups import GroupSpec
from meshwright.spec.kinds import LARGEST, Spec, as_tuple
from meshwright.spec.model import MOST_LAYERS
from meshwright.spec.optimizers import OPTIMIZERS, StateDtype
from meshwright.units import GIB, parse_bytes


def _tuple(value: Any) -> Any:
    """TOML has lists only; a frozen spec holds tuples."""
    return tuple(value) if isinstance(value, list) else value


def _floats(value: Any) -> Any:
    """Take integers of a list for floats: weights are written as 3 as well as 0.75."""
    value = _tuple(value)
    if not isinstance(value, tuple):
        return value
    return tuple(float(item) if type(item) is int else item for item in value)


def _bytes(key: str) -> BeforeValidator:
    """Take a text such as "2GiB" for a number of bytes; `key` names it in messages."""

    def read(value: Any) -> Any:
        if not isinstance(value, str):
            return value
        try:
            return parse_bytes(value)
        except ValueError as error:
            raise ValueError(f"{key} = {error}") from None

    return BeforeValidator(read)


Bytes = Annotated[
    int,
    Field(gt=0),
    WithJsonSchema({"type": ["integer", "string"], "exclusiveMinimum": 0}),
]
# Of a microbatch, and of a job.
MOST_SEQUENCES: Final = 2**20
MOST_RANKS: Final = 2**20
Precision = Literal["fp32", "bf16", "fp16"]
Master = Literal["fp32", "none"]
OnError = Literal["stop", "skip"]
DataFormat = Literal["text", "chat"]
Zero = Literal[0, 1, 2, 3]
ContextKind = Literal["ring", "ulysses"]
Schedule = Literal[
    "naive",
    "gpipe",
    "1f1b",
    "interleaved_1f1b",
    "looped_bfs",
    "interleaved_zero_bubble",
    "zbv",
    "dualpipev",
]
Recompute = Literal["none", "selective", "full"]
Offload = Literal["none", "optimizer", "params", "activations"]


class DataSpec(Spec):
    """The data of a run.

    `source`: "stdlib", "tinystories", "hf:NAME", or paths of text files, jsonl files, folders, an
    indexed store, which may be in an object store, or a Megatron `.bin`/`.idx` pair. With
    `weights`, one for each source, samples are drawn in these proportions; without, the sources are
    concatenated into one corpus. `tokenizer`: "bytes", "gpt2" or the path of a `tokenizer.json`.
    `packing`: "stream" divides the concatenated documents into samples; "documents" divides them in
    the same way but keeps attention and targets inside each document. `validation` is the share of
    documents held out. `text_key` is the field of rows and of HF data sets. `on_error` is the
    reaction to a file or a row without text, and to damaged token ids: "stop" ends the preparation
    or the run, "skip" counts and names them, and leaves their rows out. `cache` is the folder for
    prepared stores and downloads; of stores in object stores, it keeps `cache_size` bytes.
    `separator` ends a document inside a text file (two newlines: blank lines, "": none, a file is
    one document); by default, it is `<|endoftext|>` if the first MiB of the file has it. `eos`
    names the token of a tokenizer.json that ends a document; by default, it is detected. `bos` says
    whether each text begins with the BOS token; by default, it does if the tokenizer's files put
    one before every text. With `streaming`, an "hf:NAME" is read during training, and nothing is
    stored; `shuffle_buffer` is then how many documents are shuffled at a time. `format` "chat"
    reads rows as conversations and trains the assistant's turns; `chat_template` is a file with a
    template that replaces the tokenizer's own.
    """

    source: Annotated[str | tuple[str, ...], BeforeValidator(_tuple)] = "stdlib"
    weights: Annotated[tuple[float, ...] | None, BeforeValidator(_floats)] = None
    tokenizer: str = "bytes"
    packing: Literal["stream", "documents"] = "stream"
    seed: int = Field(default=0, ge=0)
    validation: float = Field(default=0.02, ge=0, lt=1)
    text_key: str = "text"
    on_error: OnError = "stop"
    cache: str | None = None
    cache_size: Annotated[Bytes, _bytes("data.cache_size")] = 20 * GIB
    workers: int | None = Field(default=None, ge=1, le=1024)
    separator: str | None = None
    eos: str | None = None
    bos: bool | None = None
    streaming: bool = False
    shuffle_buffer: int = Field(default=1000, ge=1, le=LARGEST)
    format: DataFormat = "text"
    chat_template: str | None = None

    @property
    def sources(self) -> tuple[str, ...]:
        """The sources as a tuple, even for a single one."""
        return (self.source,) if isinstance(self.source, str) else self.source

    @model_validator(mode="after")
    def _rules(self) -> DataSpec:
        if self.streaming:
            self._check_stream()
        self._check_format()
        if self.weights is None:
            return self
        rule, count = f"data.weights = {list(self.weights)}", len(self.sources)
        if len(self.weights) != count:
            raise ValueError(
                f"{rule}: {len(self.weights)} weights for {count} sources; data.source and "
                "data.weights are lists of the same length"
            )
        if min(self.weights) <= 0:
            raise ValueError(
                f"{rule}: each must be above 0; to draw nothing from a source, remove it"
            )
        return self

    def _check_format(self) -> None:
        if self.format == "chat" and self.packing == "stream":
            rule = (
                "data.packing = 'stream' would have answers attend to other conversations, which "
                "data.format = 'chat' keeps apart"
            )
            raise ValueError(refusal(rule, legal=["data.packing = 'documents'"]))
        if self.format == "text" and self.chat_template is not None:
            rule = f"data.chat_template = {self.chat_template!r} is for conversations"
            raise ValueError(refusal(rule, legal=["data.format = 'chat'"]))

    def _check_stream(self) -> None:
        if len(self.sources) > 1 or self.weights is not None:
            raise ValueError(
                f"data.streaming = true reads one source, data.source names {len(self.sources)}; "
                "prepared stores can be blended"
            )
        source = self.sources[0]
        if not source.startswith("hf:"):
            legal = [] if source in ("stdlib", "tinystories") else [f"hf:{source}"]
            rule = f"data.streaming = true reads hf:NAME or hf:PATH, data.source = {source!r}"
            raise ValueError(refusal(rule, legal=legal))
        if self.on_error != "stop":
            rule = "data.streaming = true stops at a row without text"
            raise ValueError(refusal(rule, legal=["data.on_error = 'stop'"]))


class TrainSpec(Spec):
    """The optimizer steps: how many, how large, in which precision.

    With `epochs`, a start sets `steps` to as many as read the training data that often.

    `batch` is the global batch in sequences of `seq_len` tokens. `eval_every` = 0 means no
    evaluation; `eval_batches` is how many global batches of the held-out split each one reads.
    After `stop_after_evals` = n evaluations in a row that are no better than the best, a run ends;
    0: never.
    `loss_scale` is what fp16 multiplies the loss with; left out, it starts at 65536 and adapts.
    `reduce_dtype` is the dtype in which gradients are summed over ranks: fp32, or the same as the
    compute's. `master` "fp32" has the optimizer train fp32 weights beside the copy that products
    use; "none" trains the bf16 weights themselves, each update of which is computed in fp32 and
    rounded. `nonfinite` says what a step does whose gradient is not finite, outside of fp16:
    "stop" ends the run, "skip" leaves the weights as they are and goes on. `check_every` = n
    compares the weights that ranks hold copies of, every n steps; 0 never does. `matmul` is what
    computes fp32 products on a CPU: torch's own library, oneDNN, or the one of them that was found
    to be faster on such a processor; GPUs do so in TF32, unless it is torch's own. `compile`
    compiles the blocks: always, never, or where it was measured to pay (`cluster.calibration`)
    within the run; where that is not measured, on GPUs. `engine` does the steps: our own, or
    DeepSpeed's for data-parallel layouts. `fp8` computes the products of the blocks' linear layers
    in float8, and has FSDP2 gather their weights in it. `async_tp` has the compiler compute them in
    pieces beside the messages of sequence parallelism. Of models with experts, `router_aux_loss`
    weighs the loss that has each sequence's tokens meet all experts equally often, `router_z_loss`
    that of large scores; `router_bias_rate` is what a step adds to the corrections of sigmoid
    routers, or takes off; `expert_capacity` = f has an expert take at most f times its even share
    of each sequence's tokens, rounded up: the first ones, while later ones skip this expert, i.e.
    are dropped; left out, no token is dropped. `routing` = "balanced" has tokens meet experts in
    turn, whatever their scores: for measurements alone. `imbalance` is for predictions alone: how
    many times the mean of pairs of token and expert the busiest of `ep` ranks gets; left out, it is
    the calibration's.
    """

    steps: int = Field(default=200, gt=0, le=LARGEST)
    epochs: float | None = Field(default=None, gt=0)
    batch: int = Field(default=16, gt=0, le=LARGEST)
    seq_len: int = Field(default=256, gt=0, le=LARGEST)
    precision: Precision = "fp32"
    fp8: bool = False
    async_tp: bool = False
    loss_scale: float | None = Field(default=None, gt=0)
    reduce_dtype: Literal["fp32", "same"] = "fp32"
    master: Master = "fp32"
    seed: int = Field(default=0, ge=0)
    clip_norm: float = Field(default=1.0, ge=0)
    log_every: int = Field(default=1, gt=0, le=LARGEST)
    eval_every: int = Field(default=0, ge=0)
    eval_batches: int = Field(default=4, gt=0, le=LARGEST)
    stop_after_evals: int = Field(default=0, ge=0)
    compile: bool | Literal["auto"] = "auto"
    matmul: Literal["auto", "torch", "onednn"] = "auto"
    nonfinite: Literal["stop", "skip"] = "stop"
    check_every: int = Field(default=0, ge=0)
    engine: Literal["native", "deepspeed"] = "native"
    router_aux_loss: float = Field(default=0.0, ge=0)
    router_z_loss: float = Field(default=0.0, ge=0)
    router_bias_rate: float = Field(default=0.0, ge=0)
    expert_capacity: float | None = Field(default=None, ge=1, allow_inf_nan=False)
    routing: Literal["learned", "balanced"] = "learned"
    imbalance: float | None = Field(default=None, ge=1, le=MOST_RANKS)

    @property
    def is_compiled(self) -> bool:
        """Whether blocks are compiled; "auto" has no effect until it is resolved."""
        return self.compile is True

    @property
    def weight_dtype(self) -> Precision:
        """The dtype of the weights that the optimizer trains, whatever products compute in."""
        return "bf16" if self.master == "none" else "fp32"

    @property
    def reduced_dtype(self) -> Precision:
        """The dtype in which gradients are summed over ranks."""
        return "fp32" if self.reduce_dtype == "fp32" else self.precision

    @property
    def gradient_dtype(self) -> Precision:
        """The dtype of the summed gradients that the optimizer reads."""
        return self.reduced_dtype if self.master == "none" else "fp32"


# More iterations of Newton-Schulz bring nothing: torch.optim.Muon refuses them, too.
MOST_NS_STEPS: Final = 99


def _known_optimizer(name: str) -> str:
    if name not in OPTIMIZERS:
        raise ValueError(
            refusal(
                f"optimizer.name = {name!r} is not known",
                legal=nearest(name, OPTIMIZERS, 1) or sorted(OPTIMIZERS),
            )
        )
    return name


OptimizerName = Annotated[str, AfterValidator(_known_optimizer)]


class OptimizerSpec(Spec):
    """The optimizer and its schedule.

    The learning rate rises linearly over `warmup_steps`, then follows `schedule` down to
    `lr * min_lr_ratio` at the last step; "wsd" (warmup, stable, decay) holds it until the last
    `decay_steps`, by default a fifth of all. `schedule_steps` is the length of the schedule, if it
    differs from the run's; after it, the lowest rate stays. `weight_decay` is decoupled and applies
    to matrices only: not to norms, biases (also those of experts) and sinks. AdamW keeps its
    moments in `state_dtype` (in int8 those of matrices), and updates them in fp32. With stochastic
    `rounding`, a moment in bf16, or a weight without `train.master`, that lies between two numbers
    of bf16 is rounded up as often as it is near the upper one. `groups` change the rate and the
    decay of parameters by their names; of several that match, the first one counts.

    Muon orthogonalizes the momentum of hidden matrices by `ns_steps` iterations of Newton-Schulz in
    `ns_precision`. `scale` multiplies its rate: "original" by the root of rows over columns, if
    they are more; "match_rms_adamw" by a fifth of the root of the longer side, so that a rate of
    AdamW serves both.
    """

    name: OptimizerName = "adamw"
    lr: float = Field(default=3e-3, gt=0)
    betas: Annotated[tuple[float, float], BeforeValidator(_tuple)] = (0.9, 0.95)
    eps: float = Field(default=1e-8, gt=0)
    weight_decay: float = Field(default=0.1, ge=0)
    groups: Annotated[tuple[GroupSpec, ...], BeforeValidator(as_tuple)] = ()
    state_dtype: StateDtype = "fp32"
    rounding: Literal["nearest", "stochastic"] = "nearest"
    momentum: float = Field(default=0.0, ge=0, lt=1)
    nesterov: bool = True
    ns_steps: int = Field(default=5, ge=1, le=MOST_NS_STEPS)
    ns_precision: Literal["bf16", "fp32"] = "bf16"
    scale: Literal["original", "match_rms_adamw"] = "match_rms_adamw"
    schedule: Literal["cosine", "linear", "wsd", "constant"] = "cosine"
    warmup_steps: int = Field(default=20, ge=0)
    decay_steps: int | None = Field(default=None, ge=1)
    schedule_steps: int | None = Field(default=None, ge=1)
    min_lr_ratio: float = Field(default=0.1, ge=0, le=1)

    @model_validator(mode="before")
    @classmethod
    def _of_optimizer(cls, values: Any) -> Any:
        """Fill an optimizer's own defaults, where they are not given."""
        name = values.get("name") if isinstance(values, dict) else None  # of any type
        known = OPTIMIZERS.get(name) if isinstance(name, str) else None
        return values if known is None else {**known.defaults, **values}

    @model_validator(mode="after")
    def _rules(self) -> OptimizerSpec:
        for beta in self.betas:
            if not 0 <= beta < 1:
                raise ValueError(f"optimizer.betas = {list(self.betas)}: each must be in [0, 1)")
        if self.state_dtype != "fp32" and "state_dtype" not in OPTIMIZERS[self.name].keys:
            able = [name for name, other in OPTIMIZERS.items() if "state_dtype" in other.keys]
            rule = f"optimizer.state_dtype = {self.state_dtype}: the states of {self.name} are fp32"
            legal = ["optimizer.state_dtype = fp32", *(f"optimizer.name = {name}" for name in able)]
            raise ValueError(refusal(rule, legal=legal))
        return self


class LayoutSection(Spec):
    """The [layout] section as written; `layout.resolve_layout` makes a `Layout` from it.

    A missing degree is 1; if both data-parallel degrees are missing, one of them uses the remaining
    devices. `etp` is how many ranks of `tp` cut an expert's width: by default all; with 1, `ep`
    divides ranks of tp, too. `microbatch` is in sequences; by default, it is chosen automatically.
    With `auto`, the planner chooses missing keys and keeps the given ones.
    """

    auto: bool = False
    pp: int = Field(default=1, gt=0, le=MOST_RANKS)
    dp_replicate: int | None = Field(default=None, gt=0, le=MOST_RANKS)
    dp_shard: int | None = Field(default=None, gt=0, le=MOST_RANKS)
    cp: int = Field(default=1, gt=0, le=MOST_RANKS)
    tp: int = Field(default=1, gt=0, le=MOST_RANKS)
    ep: int = Field(default=1, gt=0, le=MOST_RANKS)
    etp: int | None = Field(default=None, gt=0, le=MOST_RANKS)
    zero: Zero = 0
    sp: bool = False
    cp_kind: ContextKind = "ring"
    schedule: Schedule = "1f1b"
    virtual_stages: int = Field(default=1, gt=0, le=MOST_LAYERS)
    microbatch: int | None = Field(default=None, gt=0, le=MOST_SEQUENCES)
    recompute: Recompute = "none"
    offload: Offload = "none"


class ClusterSpec(Spec):
    """The machine: "local" is this one; or a device of the catalogue to plan for.

    `device` "auto" is CUDA if there is a GPU, otherwise the CPU. `devices_per_node` defaults to all
    GPUs, or on a CPU to up to two ranks that share its cores. `peak_tflops` is the dense peak of
    one device in the training precision; without it, MFU is unknown, because a peak is never
    guessed. `memory` is how much a rank may allocate for training, in bytes or as "2GiB"; a rank
    that needs more ends the run. By default, there is no limit. On a CPU, it does not count the
    interpreter and its libraries. `links` are names of the catalogue, within a node and across; by
    default, the usual ones for the device. `calibration` is a file of `bench device`, or "shipped";
    by default, this machine's measurements. `port` is the rendezvous port of local ranks, by
    default a free one. `timeout` is the limit for a collective in seconds. If no rank does anything
    for `hang` seconds, the supervisor says which one the others wait for, and ends them; 0: never.
    `hang_setup` (until the first step has ended), `hang_step`, `hang_save` and `hang_eval` are the
    limits of those parts of a run, `hang` by default.
    With `elastic`, a failure ends and restarts the ranks of one replica only, see `dp_replicate`.
    """

    preset: str = "local"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    nodes: int = Field(default=1, gt=0, le=MOST_RANKS)
    devices_per_node: int | None = Field(default=None, gt=0, le=MOST_RANKS)
    memory: Annotated[Bytes | None, _bytes("cluster.memory")] = None
    links: Annotated[tuple[str, str] | None, BeforeValidator(_tuple)] = None
    calibration: str | None = None
    peak_tflops: float | None = Field(default=None, gt=0)
    price: float | None = Field(default=None, gt=0)
    port: int | None = Field(default=None, gt=0, lt=65536)
    timeout: float = Field(default=600.0, gt=0)
    hang: float = Field(default=300.0, ge=0)
    hang_setup: float | None = Field(default=None, ge=0)
    hang_step: float | None = Field(default=None, ge=0)
    hang_save: float | None = Field(default=None, ge=0)
    hang_eval: float | None = Field(default=None, ge=0)
    elastic: bool = False

    @field_validator("device", mode="before")
    @classmethod
    def _known_device(cls, value: object) -> object:
        if value in ("mps", "xpu"):
            vendor = "Apple" if value == "mps" else "Intel"
            rule = f"cluster.device = {value!r}: GPUs of {vendor} are not supported"
            raise ValueError(refusal(rule, legal=["'cpu'", "'cuda', which AMD's GPUs are, too"]))
        return value

    @model_validator(mode="after")
    def _rules(self) -> ClusterSpec:
        limits = {"hang": self.hang, **{f"hang_{part}": s for part, s in self.hang_of.items()}}
        for key, limit_s in limits.items():
            if limit_s >= self.timeout:
                rule = f"cluster.{key} = {limit_s:g} must be below cluster.timeout"
                rule += f" = {self.timeout:g}"
                hint = "Once collectives time out, all ranks fail, and no cause can be found"
                raise ValueError(refusal(rule, legal=[f"{self.timeout / 2:g}"], hint=hint))
        return self

    @property
    def hang_of(self) -> dict[str, float]:
        """The limits in seconds of the parts of a run that have one: setup, step, save, eval."""
        limits = {
            "setup": self.hang_setup,
            "step": self.hang_step,
            "save": self.hang_save,
            "eval": self.hang_eval,
        }
        return {part: limit_s for part, limit_s in limits.items() if limit_s is not None}


# `async` is a word of the language, so that no class body can name a field by it.
_Async: Any = create_model("_Async", __base__=Spec, **cast(Any, {"async": (bool, False)}))


class CheckpointSpec(_Async):  # type: ignore[misc]
    """When a run is saved: every `every` steps (0: at the end only), the newest `keep` stay.

    With `keep_best`, also each step with the lowest held-out loss so far; the last one stays.
    `async` writes during training. `dir` is the run folder's `checkpoints` unless given; all ranks
    must reach it under that path. A run ends after so many `restarts` of the ranks in a row without
    a newer saved step (if no intermediate steps are saved: without a later step); 0: it is never
    restarted.
    """

    every: int = Field(default=0, ge=0)
    keep: int = Field(default=2, gt=0)
    keep_best: bool = False
    dir: str | None = None
    restarts: int = Field(default=3, ge=0)

    @property
    def is_async(self) -> bool:
        """Whether steps are written during training."""
        return bool(getattr(self, "async"))


class LogSpec(Spec):
    """Where metrics go besides `events.jsonl` and the terminal, and which steps are recorded.

    `trace` = n records an early step and every n-th into `ledger.json`, 0 none; `trace_memory` also
    records the memory of an early one. `core_dumps`: whether the C++ stacks of a crashed rank are
    kept; by default, those of ranks on CPUs.
    """

    dir: str = "runs"
    name: str | None = None
    tensorboard: bool = False
    wandb: str | None = None
    trackio: str | None = None
    mlflow: str | None = None
    trace: int = Field(default=100, ge=0)
    trace_memory: bool = True
    core_dumps: bool | Literal["auto"] = "auto"
