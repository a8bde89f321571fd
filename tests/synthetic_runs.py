"""Steps of made-up runs: random gradients by microbatch, data rank and tp part, with faults."""

import itertools
import math
import random
from dataclasses import dataclass, field

import torch

from meshwright.prove.expected import Expected
from meshwright.prove.trainers.observed import (
    Contribution,
    GatheredTensor,
    MeshAxis,
    ObservedStep,
    RankCopy,
    ReplayedStep,
)

NAMES = [
    "embed.weight",
    *(f"layers.{n}.{p}" for n in range(3) for p in ("norm.weight", "mlp.gate", "mlp.experts.up")),
    "norm.weight",
    "head.weight",
]
NOISE = 2e-7


@dataclass
class MadeUpRun:
    """A run of dp x tp ranks, healthy until a fault changes what its ranks have."""

    seed: int
    dp: int
    tp: int
    microbatches: int
    steps: int = 1
    axes: list = field(init=False)

    def __post_init__(self):
        self.generator = torch.Generator().manual_seed(self.seed)
        self.random = random.Random(self.seed)
        ranks = [[d * self.tp + t for t in range(self.tp)] for d in range(self.dp)]
        self.axes = [
            MeshAxis("dp", tuple(zip(*ranks, strict=True))),
            MeshAxis("tp", tuple(map(tuple, ranks))),
        ]
        self.world = self.dp * self.tp
        self.shapes = {name: (8,) if "norm" in name else (12, 10) for name in NAMES}
        self.parts = {}  # of (data rank, microbatch, tp rank): the partial gradients
        self.targets = {}
        for d, m in itertools.product(range(self.dp), range(self.microbatches)):
            self.targets[d, m] = 10 + 7 * d + 3 * m
            for t in range(self.tp):
                self.parts[d, m, t] = {n: self.normal(n) for n in NAMES}
        self.rate = 0.1
        gradients = {n: self.exact(n) for n in NAMES}
        self.grads = {n: {r: self.noisy(gradients[n]) for r in range(self.world)} for n in NAMES}
        self.sharded = {n: ("tp",) for n in NAMES if "experts" in n and self.tp > 1}
        norm = math.sqrt(sum(g.square().sum().item() for g in gradients.values()))
        self.norms = {r: norm * (1 + 1e-8 * r) for r in range(self.world)}
        self.weights = {n: self.normal(n) for n in NAMES}
        self.starts = {n: dict.fromkeys(range(self.world), self.weights[n]) for n in NAMES}
        self.loss_values = {key: 3 + 0.1 * k for k, key in enumerate(self.targets)}
        self.updates = None

    def normal(self, name):
        return torch.randn(self.shapes[name], generator=self.generator, dtype=torch.float64)

    def noisy(self, tensor):
        noise = torch.randn(tensor.shape, generator=self.generator, dtype=torch.float64)
        size = tensor.norm().item() / math.sqrt(tensor.numel())
        return tensor + NOISE * size * noise

    def contribution(self, d, m, name):
        return sum(self.parts[d, m, t][name] for t in range(self.tp))

    def combined(self, name, weight=lambda d, m: 1.0):
        pairs = itertools.product(range(self.dp), range(self.microbatches))
        return sum(weight(d, m) * self.contribution(d, m, name) for d, m in pairs) / self.dp

    def exact(self, name):
        return self.combined(name)

    def set(self, names, value_of, ranks=None):
        """Give some ranks `value_of(name, rank)` as the gradient."""
        for name in names:
            for rank in range(self.world) if ranks is None else ranks:
                value = value_of(name, rank)
                self.grads[name][rank] = None if value is None else self.noisy(value)

    def observed(self):
        updates = self.updates or {
            n: {r: None if g is None else -self.rate * g for r, g in of.items()}
            for n, of in self.grads.items()
        }
        return ObservedStep(
            {n: gathered(of) for n, of in self.starts.items()},
            {n: gathered(of, self.sharded.get(n, ())) for n, of in self.grads.items()},
            {n: gathered(of) for n, of in updates.items()},
            self.norms,
            list(self.loss_values.values()),
        )

    def replayed(self):
        parts = [
            Contribution(d, m, {n: self.contribution(d, m, n) for n in NAMES}, count)
            for (d, m), count in self.targets.items()
        ]
        summed = {n: self.exact(n) * self.dp for n in NAMES}
        rounded = [{n: self.noisy(t) for n, t in summed.items()} for _ in range(3)]
        exact = {n: -self.rate * self.exact(n) for n in NAMES}
        updates = Expected(exact, [{n: self.noisy(t) for n, t in exact.items()} for _ in range(3)])
        losses = [(3 + 0.1 * k, 1e-6) for k in range(len(parts))]
        return ReplayedStep(parts, rounded, updates, losses)


def gathered(by_rank, sharded_over=()):
    return GatheredTensor(
        tuple(RankCopy((rank,), value) for rank, value in by_rank.items()), sharded_over
    )


# A fault: its kind, what it needs of a run, and what it changes.
FAULTS = {}


def fault(kind, needs=lambda run: True):
    def register(change):
        FAULTS[change.__name__] = (kind, needs, change)
        return change

    return register


def some(run):
    """Return one parameter, all, or those of one name."""
    one = run.random.choice(NAMES)
    return run.random.choice([[one], NAMES, [n for n in NAMES if n.endswith(one.split(".")[-1])]])


def whole(run):
    """Return parameters that tp does not shard."""
    return [n for n in NAMES if (n not in run.sharded and ".0." in n) or n == "norm.weight"]


@fault("missing sum", lambda run: run.tp > 1)
def tp_sum_missing(run):
    def part(name, rank):
        d_and_m = itertools.product(range(run.dp), range(run.microbatches))
        return sum(run.parts[d, m, rank % run.tp][name] for d, m in d_and_m) / run.dp

    run.set(whole(run), part)


@fault("missing average", lambda run: run.dp > 1)
def dp_average_missing(run):
    def own(name, rank):
        d = rank // run.tp
        return sum(run.contribution(d, m, name) for m in range(run.microbatches))

    run.set(some(run), own)


@fault("scaled")
def scaled(run):
    sizes = [k for k in (run.dp, run.tp, run.microbatches, run.dp * run.tp) if k > 1] or [3]
    k = run.random.choice(sizes)
    k = run.random.choice([k, 1 / k])
    # One kind of parameter: a ratio of all is a matter of the convention.
    run.set([n for n in NAMES if "experts" in n], lambda name, rank: k * run.exact(name))


@fault("summed again", lambda run: run.tp > 1 and run.microbatches > 1)
def tp_summed_again(run):
    last = run.microbatches - 1
    run.set(whole(run), lambda n, rank: run.combined(n, lambda d, m: run.tp ** (last - m)))


@fault("microbatch lost", lambda run: run.microbatches > 1)
def microbatch_lost(run):
    lost = run.random.randrange(run.microbatches)
    run.set(some(run), lambda n, rank: run.combined(n, lambda d, m: float(m != lost)))


@fault("data rank lost", lambda run: run.dp > 1)
def data_rank_lost(run):
    lost = run.random.randrange(run.dp)
    run.set(some(run), lambda n, rank: run.combined(n, lambda d, m: float(d != lost)))


@fault("local token count", lambda run: run.dp > 1 or run.microbatches > 1)
def local_token_count(run):
    total, count = sum(run.targets.values()), len(run.targets)
    weight = {key: total / count / n for key, n in run.targets.items()}
    run.set(NAMES, lambda n, rank: run.combined(n, lambda d, m: weight[d, m]))


@fault("local token count", lambda run: run.dp > 1)
def own_token_count(run):
    """Each rank divides the sum over all of them by its own number of targets."""
    counts = [sum(n for (d, _), n in run.targets.items() if d == own) for own in range(run.dp)]
    ratios = [sum(counts) / count for count in counts]
    run.set(NAMES, lambda n, rank: ratios[rank // run.tp] * run.exact(n))


@fault("replicas differ", lambda run: run.world > 1)
def one_rank_leaks(run):
    rank = run.random.randrange(run.world)
    run.set(some(run), lambda n, r: run.exact(n) + run.normal(n), ranks=[rank])


@fault("not finite")
def not_finite(run):
    run.set(some(run), lambda n, rank: torch.full_like(run.exact(n), math.nan))


@fault("no gradient")
def no_gradient(run):
    run.set(some(run), lambda n, rank: None)


@fault("wrong upstream")
def upstream_of_a_module(run):
    place = run.random.randrange(2, len(NAMES) - 1)
    run.set(NAMES[: place + 1], lambda n, rank: upstream[n])


upstream = {}


def change_upstream(run):
    upstream.clear()
    upstream.update({n: run.exact(n) + 0.5 * run.normal(n) for n in NAMES})


@fault("wrong norm", lambda run: run.tp > 1)
def norm_counts_experts_by_rank(run):
    more = sum(run.exact(n).square().sum().item() for n in NAMES if "experts" in n)
    run.norms = {r: math.sqrt(n**2 + (run.tp - 1) * more) for r, n in run.norms.items()}


@fault("wrong norm")
def norm_leaves_out_the_head(run):
    less = run.exact("head.weight").square().sum().item()
    run.norms = {r: math.sqrt(n**2 - less) for r, n in run.norms.items()}


@fault("clips differ", lambda run: run.world > 1)
def ranks_clip_differently(run):
    run.norms = {r: n * (1 + 0.1 * r) for r, n in run.norms.items()}


@fault("wrong update")
def decay_is_wrong(run):
    run.updates = {
        n: {r: -run.rate * g - 0.01 * run.weights[n] for r, g in of.items()}
        for n, of in run.grads.items()
    }


@fault("replicas differ", lambda run: run.world > 1)
def weights_drift(run):
    run.updates = {
        n: {r: -run.rate * (1 + r) * g for r, g in of.items()} for n, of in run.grads.items()
    }


@fault("replicas differ", lambda run: run.world > 1)
def weights_start_apart(run):
    for name in NAMES:
        run.starts[name] = {r: run.weights[name] + r for r in range(run.world)}


@fault("wrong loss")
def loss_is_off(run):
    run.loss_values = {key: value + 0.3 for key, value in run.loss_values.items()}


def drawn(seed, fault_name=None):
    """Return a run of random axes, and the kind of its fault if it is to have one."""
    rng = random.Random(seed)
    while True:
        run = MadeUpRun(rng.randrange(10**6), *(rng.randint(1, 3) for _ in range(3)))
        if fault_name is None:
            return run, None
        kind, needs, change = FAULTS[fault_name]
        if needs(run):
            if fault_name == "upstream_of_a_module":
                change_upstream(run)
            change(run)
            return run, kind
