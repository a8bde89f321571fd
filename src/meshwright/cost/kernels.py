"""Seconds of a microbatch's work on a device: matmuls, attention, memory-bound operations, and
exposed messages."""

from __future__ import annotations

from collections.abc import Sequence
from operator import mul
from typing import Final, NamedTuple

from meshwright.cost.attending import rates
from meshwright.cost.calibration import Calibration
from meshwright.cost.catalogue import Device
from meshwright.cost.modules import hidden_bytes, made_again
from meshwright.cost.network import Network, Picks
from meshwright.cost.systems import CAUSAL, System
from meshwright.cost.work import LayoutWork, Message, Product, Work
from meshwright.program.messages import Phase
from meshwright.program.saved import PRODUCT_BACKWARD
from meshwright.program.sizes import loss_rows
from meshwright.program.target import Matmul, Target

# Kernels that a pass of a layer launches beside its products: norms, rotation, residuals, casts.
_SMALL_KERNELS = 10
# Passes over the scores of kernels that write them: made, masked and scaled, softmax read and
# written, read for the second product; a fused softmax leaves out the mask's. Backward: twice that.
_SCORE_PASSES = {"scores": 6.0, "softmax": 4.0}
# A norm of separate operations widens to fp32, squares, averages, scales, narrows and multiplies:
# 36 bytes of a bf16 element against the 4 of one kernel (torch's LlamaRMSNorm, operation by one).
_EAGER_NORM = 9.0
# What moves backward beside products: the incoming gradient, the kept input, the outgoing one.
_MOVED_BACKWARD = 2.0
# A forward and a backward of twice its size.
PASSES: Final = 1 + PRODUCT_BACKWARD
_NONE: Final = (0.0, 0.0, 0.0)
_ANY: Final = Target("gpu")


class Seconds(NamedTuple):
    """Seconds of one microbatch in a layer, or in an end of the model, by cause and pass.

    The messages of tp, cp and ep count only as far as they are exposed.
    """

    forward: float
    backward: float
    recompute: float
    tp_forward: float
    tp_backward: float
    tp_recompute: float
    cp_forward: float
    cp_backward: float
    cp_recompute: float
    ep_forward: float
    ep_backward: float
    ep_recompute: float

    @property
    def total(self) -> float:
        """The seconds of all causes."""
        return sum(self)


class Shown(NamedTuple):
    """Shares of the messages of tp, cp and ep that no computation ever hides."""

    tp: float
    cp: float
    ep: float

    def of(self, seconds: Seconds) -> float:
        """Return a lower bound of the exposed seconds of a forward and a backward, whatever there
        is to compute beside them."""
        return (
            self.tp * (seconds.tp_forward + seconds.tp_backward)
            + self.cp * (seconds.cp_forward + seconds.cp_backward)
            + self.ep * (seconds.ep_forward + seconds.ep_backward)
        )


def _mixed(narrow: float, wide: float, share: float) -> float:
    """Return the mean FLOP/s of matmuls of which the share `share` runs at `wide` and the others at
    `narrow`."""
    return 1 / ((1 - share) / narrow + share / wide) if share else narrow


def forward_moved(work: Work, system: System) -> float:
    """Return the bytes that a forward reads and writes outside of matmuls and attention, norms
    included."""
    return work.moved + work.norm_moved * (1 if system.fused_norm else _EAGER_NORM)


class Kernels:
    """Prices the work of a layer on a device with the kernels of a training system.

    Matmuls follow the roofline of their peak and their bytes (Williams et al., 2009). The peak is
    reduced by `d / (d + half)` for each dimension d, because tiles at the edges are not full. A
    kernel never takes less than the host's launch time. `compile_gain` divides the time of a layer.
    Where it was not measured, `saves` is what compiling saves, in times of the bytes that a layer
    moves outside of matmuls, and `loss_saves` likewise for the loss. `products` is the dtype of
    matmuls, `matmul` the route of fp32 matmuls. `unquantised` is the share of layers whose matmuls
    stay in `precision`; every layer is priced as the mean. `routed` describes routing to experts,
    None without experts.
    """

    def __init__(
        self,
        device: Device,
        system: System,
        calibration: Calibration,
        network: Network,
        precision: str,
        products: str,
        compile_gain: float = 1.0,
        matmul: Matmul = "auto",
        target: Target = _ANY,
        routed: Picks | None = None,
        saves: float = 0.0,
        loss_saves: float = 0.0,
        unquantised: float = 0.0,
    ) -> None:
        kinds = (f"{system.name}.{device.kind}", system.name, device.kind)
        find = calibration.find

        def own(constant: str) -> float:
            """Return the measurement of the model's own blocks, otherwise that of any model."""
            measured = calibration.constants.get(f"{device.kind}.blocks.{constant}")
            return find(constant, *kinds) if measured is None else measured

        # What was measured of this system here: how many times longer it computes.
        self.slower = find("measured.compute", *kinds)
        self.network, self.system = network, system
        self.compile_gain = compile_gain / self.slower
        self.saves, self.target = saves, target
        narrow, wide = (device.peak(dtype, tf32=target.tf32) for dtype in (products, precision))
        self.head_peak = wide * find(f"products.{precision}.{matmul}", *kinds)
        narrow *= find(f"products.{products}.{matmul}", *kinds)
        self.peak = _mixed(narrow, self.head_peak, unquantised)
        self.half = find(f"products.half.{precision}.{matmul}", *kinds)
        self.bandwidth = device.bandwidth * find("memory", *kinds)
        self.optimizer_bandwidth = self.bandwidth * find("optimizer", *kinds)
        self.moves = own(f"moves.{precision}")
        self.loss_moves = find(f"moves.loss.{precision}", *kinds)
        self.loss_saves = min(loss_saves, self.loss_moves)
        peak = device.peaks["bf16" if precision != "fp32" else "fp32"]
        attention = f"attention.{system.attention}.{precision}"
        self.attention_peak = peak * own(attention)
        is_own = f"{device.kind}.blocks.{attention}" in calibration.constants
        self.attends = {} if is_own else rates(target, lambda constant: find(constant, *kinds))
        # What the host takes, for a layer and so on.
        self.per_layer = own(f"overhead.layer.{precision}")
        self.per_microbatch = find("overhead.microbatch", *kinds)
        self.per_unit = find("overhead.unit", *kinds)
        self.launch = find("launch", *kinds)
        self.exposed_pp = find("exposed.pp", *kinds)
        self.overlap = find("overlap", *kinds)
        self.fixed = find("fixed", *kinds) + find("overhead.step", *kinds)
        self.host_bandwidth = find("host_bandwidth", *kinds)
        self.idle, self.data_latency = find("idle", *kinds), find("data.latency", *kinds)
        self.tp_exposed = find("exposed.tp", *kinds)
        self.routed = routed if system.sends_once else None
        self.ep_exposed = find("exposed.ep", *kinds)
        self.of_experts = find("experts.products", *kinds)
        self.per_experts = find("experts.launch", *kinds)
        self.cast = find("casts", *kinds) if products != precision else 0.0

    def never_hidden(self, cp_kind: str) -> Shown:
        """Return the shares of messages that are exposed beside any computation.

        All are 0 where messages go through shared memory, whose rate differs from the links' up to
        a size: their seconds per byte may grow with the bytes.
        """
        if self.network.channel:
            return Shown(0.0, 0.0, 0.0)
        exposed = max(1 - self.overlap, 0.0)
        return Shown(
            exposed if self.system.overlaps_tp else 1.0,
            exposed if cp_kind == "ring" else 1.0,
            exposed if self.system.overlaps_shared else 1.0,
        )

    def product(self, shape: Product, peak: float, element: int) -> float:
        """Return the seconds of the forward of a matmul at `peak` FLOP/s, with `element` bytes per
        element."""
        rows, inner, outer, _, groups, *_ = shape
        rows_per_group = rows / groups
        half = self.half
        share = (
            rows_per_group
            / (rows_per_group + half)
            * (inner / (inner + half))
            * (outer / (outer + half))
        )
        if groups > 1:
            peak *= self.of_experts
        moved = element * (rows * inner + groups * inner * outer + rows * outer)
        return max(shape.flops / (peak * share), moved / self.bandwidth)

    def layer(
        self,
        layout_work: LayoutWork,
        work: Work,
        cp: int,
        tp: int,
        cp_kind: str,
        recompute: str,
        ep: int = 1,
        etp: int | None = None,
        *,
        defers: bool = False,
    ) -> Seconds:
        """Return the seconds of a microbatch in a layer with this work.

        `etp` is as in `Layout`. `defers` says that the schedule computes weight gradients later.
        """
        element = layout_work.sizes.element
        product_seconds = [self.product(shape, self.peak, element) for shape in work.products]
        with_casts = product_seconds
        if self.cast:
            with_casts = [
                seconds
                + self.cast * shape.rows * (shape.inner + shape.outer) * element / self.bandwidth
                for seconds, shape in zip(product_seconds, work.products, strict=True)
            ]
        products = sum(with_casts)
        of_products = sum(map(mul, with_casts, (shape.backward for shape in work.products)))
        attention = self._attention(work, element)
        moved, saved = self._moved(work), self._saved(work)
        host = (len(work.products) + _SMALL_KERNELS) * self.launch
        if any(shape.groups > 1 for shape in work.products):
            host += self.per_experts
        backward = of_products + attention[1] + _MOVED_BACKWARD * (moved - saved)
        forward = self._with_host(products + attention[0] + moved - saved, host, 1)
        backward = self._with_host(backward, host, PRODUCT_BACKWARD)
        recomputed = {
            "none": 0.0,
            "full": forward,
            "selective": self._selective(layout_work, work, product_seconds, attention[0], moved),
        }[recompute]
        pairs = zip(product_seconds, work.products, strict=True)
        columns = sum(seconds for seconds, shape in pairs if shape.is_column)
        tp_forward, tp_backward, tp_again = self._tp_regions(layout_work, work, tp, columns, defers)
        return Seconds(
            forward / self.compile_gain,
            backward / self.compile_gain,
            recomputed / self.compile_gain,
            tp_forward,
            tp_backward,
            self._tp_recompute(recompute, tp_forward, tp_again),
            *self._context(work, cp, tp, cp_kind, attention),
            *self._dispatch(work, ep, tp if etp is None else etp, with_casts),
        )

    def _with_host(self, device: float, launches: float, passes: int) -> float:
        """Return the seconds of a layer's passes including the host's overhead.

        A GPU computes while the host runs ahead, so the longer counts; a CPU is itself the host, so
        both add up. A backward has twice the `passes` of a forward.
        """
        device, calls = max(device, passes * launches), self.per_layer * passes / PASSES
        return max(device, calls) if self.target.traits.runs_ahead else device + calls

    def _selective(
        self,
        layout_work: LayoutWork,
        work: Work,
        products: Sequence[float],
        attention: float,
        moved: float,
    ) -> float:
        """Return the seconds of selective recomputation, which differs by training system."""
        if self.system.selective == "attention":  # arXiv:2205.05198, section 5
            return attention
        if self.system.selective == "modules":
            seconds_per_byte = self.moves / self.bandwidth
            norms = (
                seconds_per_byte * work.norm_moved * (1 if self.system.fused_norm else _EAGER_NORM)
            )
            # Both inputs of a gated activation are read, and its result is written.
            activation = seconds_per_byte * 3 * hidden_bytes(layout_work.sizes, work)
            return made_again(self.system.modules, work, products, attention, norms, activation)
        half = sum(products) / 2
        return moved + (half if self.system.selective == "half" else 0.0)

    def _tp_recompute(self, recompute: str, forward: float, resent: float) -> float:
        """Return the seconds of tensor-parallel messages that recomputation sends again."""
        if recompute == "full" or self.system.selective == "blocks":
            return resent
        # Those of the feed-forward are half of a layer's.
        is_mlp = recompute == "selective" and "mlp" in self.system.modules
        return forward / 2 if is_mlp else 0.0

    def _attention(self, work: Work, element: int) -> tuple[float, float]:
        kernel = self.system.attention
        squares = 1 if CAUSAL[kernel] else 2
        peak = self.attention_peak * self.attends.get(work.attends, 1.0)
        forward = squares * work.attention_flops / peak
        backward = squares * work.attention_backward / peak
        if not CAUSAL[kernel]:  # the scores are kept: two products forward, four backward
            passes = _SCORE_PASSES[kernel] * work.scores * element / self.bandwidth
            return forward + passes, 2 * (forward + passes)
        return forward, backward

    def ends(
        self, layout_work: LayoutWork, tp: int, *, defers: bool = False
    ) -> tuple[Seconds, Seconds]:
        """Return the seconds of a microbatch in the embedding, and in the last norm, head and loss;
        see `layer`."""
        ends = []
        for work in (layout_work.first, layout_work.last):
            rounds = self._rounds(layout_work, work)
            product_seconds = [
                rounds
                * self.product(
                    shape._replace(rows=-(-shape.rows // rounds)),
                    self.head_peak,
                    layout_work.sizes.element,
                )
                for shape in work.products
            ]
            products = self.slower * sum(product_seconds)
            of_products = self.slower * sum(
                map(mul, product_seconds, (shape.backward for shape in work.products))
            )
            moved, loss = self.slower * self._moved(work), self.slower * self._loss(work, tp)
            head = products + loss  # of the forward, where the backward doesn't make it
            late = head if self.system.fuses_loss else 0.0
            columns = sum(
                self.product(shape, self.head_peak, layout_work.sizes.element)
                for shape in work.products
                if shape.is_column
            )
            tp_forward, tp_backward, _ = self._tp_regions(layout_work, work, tp, columns, defers)
            ends.append(
                Seconds(
                    moved + head - late,
                    of_products + _MOVED_BACKWARD * (moved + loss) + late,
                    0.0,
                    tp_forward,
                    tp_backward,
                    0.0,
                    *_NONE,
                    *_NONE,
                )
            )
        return ends[0], ends[1]

    def _rounds(self, layout_work: LayoutWork, work: Work) -> int:
        """Return in how many chunks of tokens the backward computes the logits; 1 for a system that
        does so in the forward."""
        if not (self.system.fuses_loss and work.loss_moved):
            return 1
        tokens, element = layout_work.sizes.tokens, layout_work.sizes.element
        return -(-tokens // loss_rows(tokens, element, self.target))

    def _moved(self, work: Work) -> float:
        """Return the seconds of a forward outside of matmuls and attention."""
        return self.moves * forward_moved(work, self.system) / self.bandwidth

    def _saved(self, work: Work) -> float:
        """Return the seconds that compiling saves of a layer's forward."""
        return self.saves * forward_moved(work, self.system) / self.bandwidth

    def _loss(self, work: Work, tp: int) -> float:
        """Return the seconds of the loss's forward; with tp, its saving by compiling does not
        apply."""
        moves = self.loss_moves - (self.loss_saves if tp == 1 else 0.0)
        return moves * work.loss_moved / self.bandwidth

    def _tp_regions(
        self, layout_work: LayoutWork, work: Work, tp: int, columns: float, defers: bool
    ) -> tuple[float, float, float]:
        """Return the exposed seconds of tensor-parallel messages in forward, backward and
        recomputation.

        A message that overlaps with one of the two backward matmuls of column-parallel layers,
        which take `columns` seconds in a forward, is exposed only as far as it is longer. For other
        systems, the constant `exposed.tp` was fitted to all their exposed messages.
        """
        if tp == 1:
            return _NONE
        sums: dict[Phase, float] = {"forward": 0.0, "backward": 0.0, "recompute": 0.0}
        # The gradient of their input travels beside the last round.
        rounds = self._rounds(layout_work, work)
        room = columns / rounds
        hides = self.overlap if self.system.overlaps_tp else 0.0
        for message in work.messages:
            if message.axis != "tp" or (message.overlaps == "inputs" and not hides):
                continue
            often = rounds if message.purpose == "loss" else 1
            per_message = often * self.network.seconds(
                message.kind, message.bytes / often, tp, 1, "tp"
            )
            seconds = message.times * per_message * self.tp_exposed
            if message.overlaps == "inputs" or (message.overlaps and not defers):
                seconds -= hides * min(seconds, room)
            sums[self._phase(message)] += seconds
        return sums["forward"], sums["backward"], sums["recompute"]

    def _phase(self, message: Message) -> Phase:
        """Return the pass in which a message is sent; systems that do not fuse the loss compute
        logits in the forward."""
        is_early = message.purpose in ("logits", "loss") and not self.system.fuses_loss
        return "forward" if is_early else message.phase

    def _dispatch(
        self, work: Work, ep: int, apart: int, products: Sequence[float]
    ) -> tuple[float, float, float]:
        """Return the exposed seconds of expert dispatch and combine in forward, backward and
        recomputation.

        Meshwright overlaps them with the shared expert; for other systems, the exposed share is
        fitted. `apart` is the distance between the ranks of `ep`; `products` are the seconds of the
        layer's matmuls.
        """
        if ep == 1:
            return _NONE
        sums: dict[Phase, float] = {"forward": 0.0, "backward": 0.0, "recompute": 0.0}
        alongside = sums.copy()
        for message in work.messages:
            if message.axis == "ep":
                per_message = self.network.seconds(
                    message.kind, message.bytes, ep, apart, "ep", self.routed
                )
                seconds = message.times * per_message * self.ep_exposed
                sums[message.phase] += seconds
                alongside[message.phase] += seconds * (message.overlaps == "shared")
        if self.system.overlaps_shared:
            pairs = [*zip(products, work.products, strict=True)]
            shared = sum(seconds for seconds, shape in pairs if shape.of_shared)
            back = sum(seconds * shape.backward for seconds, shape in pairs if shape.of_shared)
            room: dict[Phase, float] = {"forward": shared, "backward": back, "recompute": shared}
            for phase, computes in room.items():
                sums[phase] -= self.overlap * min(alongside[phase], computes)
        return sums["forward"], sums["backward"], sums["recompute"]

    def _context(
        self, work: Work, cp: int, tp: int, cp_kind: str, attention: tuple[float, float]
    ) -> tuple[float, float, float]:
        """Return the exposed seconds of context-parallel messages in forward, backward and
        recomputation.

        A ring sends while it computes with the keys it has: arXiv:2310.01889, section 3. The states
        of a recurrence are waited for.
        """
        if cp == 1:
            return _NONE
        forward, backward = attention
        compute_seconds: dict[Phase, float] = {
            "forward": forward,
            "backward": backward,
            "recompute": forward,
        }
        waits = []
        for phase, computes in compute_seconds.items():
            sent = waited = 0.0
            for message in work.messages:
                # Of a ring's, those both ways at once.
                if (message.axis, message.phase) != ("cp", phase) or message.kind == "recv":
                    continue
                seconds = message.times * self.network.seconds(
                    message.kind, message.bytes, cp, tp, "cp"
                )
                if message.kind == "send":
                    sent += seconds
                else:
                    waited += seconds
            waits.append(waited + sent - self.overlap * min(sent, computes))
        return waits[0], waits[1], waits[2]
