"""Seconds of a microbatch's work on a device: products, attention, memory-bound operations."""

from __future__ import annotations

from typing import Final, NamedTuple

from meshwright.predict.calibration import Calibration
from meshwright.predict.catalogue import Device
from meshwright.predict.network import Network
from meshwright.predict.stacks import CAUSAL, Stack
from meshwright.predict.work import LayoutWork, Product, Work
from meshwright.program.operations import ATTENTION_BACKWARD, PRODUCT_BACKWARD, loss_rows
from meshwright.program.target import Matmul

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


class Seconds(NamedTuple):
    """Time of one microbatch in a layer or an end, forward and backward, by cause."""

    forward: float
    backward: float
    recompute: float
    tp_forward: float
    tp_backward: float
    tp_recompute: float
    cp: float

    @property
    def total(self) -> float:
        """All of it."""
        return sum(self)


def forward_moved(work: Work, stack: Stack) -> float:
    """Return the bytes that a forward moves beside products and attention, with a stack's norms."""
    return work.moved + work.norm_moved * (1 if stack.fused_norm else _EAGER_NORM)


class Kernels:
    """Prices work on a device with the kernels of a stack.

    Products take the roofline of their peak and their bytes (Williams et al., 2009), the peak
    lowered by `d / (d + half)` for each dimension d, since tiles at the edges are not full; below
    a host's launch time the device waits for the host. `compile_gain` divides what a layer
    computes. `matmul` names the way of fp32 products that has constants of its own.
    """

    def __init__(
        self,
        device: Device,
        stack: Stack,
        calibration: Calibration,
        network: Network,
        precision: str,
        products: str,
        compile_gain: float = 1.0,
        matmul: Matmul = "auto",
    ) -> None:
        kinds = (f"{stack.name}.{device.kind}", stack.name, device.kind)
        find = calibration.find

        def own(what: str) -> float:
            """What was measured of the model's own blocks, else of any."""
            found = calibration.constants.get(f"{device.kind}.blocks.{what}")
            return find(what, *kinds) if found is None else found

        self.network, self.stack, self.compile_gain = network, stack, compile_gain
        self.on_cpu = device.kind == "cpu"
        share = find(f"products.{products}.{matmul}", *kinds)
        self.peak = device.peaks[products.split("-")[0]] * share
        share = find(f"products.{precision}.{matmul}", *kinds)
        self.head_peak = device.peaks[precision] * share
        self.half = find(f"products.half.{precision}.{matmul}", *kinds)
        self.bandwidth = device.bandwidth * find("memory", *kinds)
        self.optimizer_bandwidth = self.bandwidth * find("optimizer", *kinds)
        self.moves = own(f"moves.{precision}")
        self.loss_moves = find(f"moves.loss.{precision}", *kinds)
        peak = device.peaks["bf16" if precision != "fp32" else "fp32"]
        self.attention_peak = peak * own(f"attention.{stack.attention}.{precision}")
        # What the host takes, for a layer and so on.
        self.per_layer = own(f"overhead.layer.{precision}")
        self.per_microbatch = find("overhead.microbatch", *kinds)
        self.per_unit = find("overhead.unit", *kinds)
        self.launch = find("launch", *kinds)
        self.exposed_pp = find("exposed.pp", *kinds)
        self.overlap = find("overlap", *kinds)
        self.fixed = find("fixed", *kinds) + find("overhead.step", *kinds)
        self.host_bandwidth = find("host_bandwidth", *kinds)
        self.idle = find("idle", *kinds)
        self.data_latency = find("data.latency", *kinds)
        self.tp_exposed = find("exposed.tp", *kinds)
        self.cast = find("casts", *kinds) if products != precision else 0.0

    def product(self, shape: Product, peak: float, element: int) -> float:
        """Return the seconds of one pass of a product."""
        rows, inner, outer, _ = shape
        half = self.half
        share = rows / (rows + half) * (inner / (inner + half)) * (outer / (outer + half))
        moved = element * (rows * inner + inner * outer + rows * outer)
        return max(shape.flops / (peak * share), moved / self.bandwidth)

    def layer(
        self,
        found: LayoutWork,
        cp: int,
        tp: int,
        cp_kind: str,
        recompute: str,
        *,
        defers: bool = False,
    ) -> Seconds:
        """Return the seconds of one layer; `defers`: its weights' gradients are computed later."""
        work, element = found.layer, found.sizes.element
        products = sum(self.product(shape, self.peak, element) for shape in work.products)
        widened = sum(shape.rows * (shape.inner + shape.outer) for shape in work.products)
        products += self.cast * widened * element / self.bandwidth
        attention = self._attention(work, element)
        moved = self._moved(work)
        host = (len(work.products) + _SMALL_KERNELS) * self.launch
        backward = PRODUCT_BACKWARD * products + attention[1] + _MOVED_BACKWARD * moved
        forward = self._with_host(products + attention[0] + moved, host, 1)
        backward = self._with_host(backward, host, PRODUCT_BACKWARD)
        again = {
            "none": 0.0,
            "full": forward,
            "selective": self._selective(products, attention[0], moved),
        }[recompute]
        tp_forward, tp_backward, tp_again = self._borders(found, work, tp, self.peak, defers)
        return Seconds(
            forward / self.compile_gain,
            backward / self.compile_gain,
            again / self.compile_gain,
            tp_forward,
            tp_backward,
            tp_again if recompute == "full" or self.stack.selective == "blocks" else 0.0,
            self._context(work, cp, tp, cp_kind, sum(attention)),
        )

    def _with_host(self, device: float, launches: float, passes: int) -> float:
        """Return the seconds of so many passes of a layer with what the host takes for them.

        A CPU is the host, which computes when it has called; before a GPU the host runs ahead.
        """
        device, calls = max(device, passes * launches), self.per_layer * passes / PASSES
        return device + calls if self.on_cpu else max(device, calls)

    def _selective(self, products: float, attention: float, moved: float) -> float:
        """Return what is computed again: see the stack for which part it keeps."""
        if self.stack.selective == "attention":  # arXiv:2205.05198, section 5
            return attention
        return moved + (products / 2 if self.stack.selective == "half" else 0.0)

    def _attention(self, work: Work, element: int) -> tuple[float, float]:
        kernel = self.stack.attention
        squares = 1 if CAUSAL[kernel] else 2
        forward = squares * work.attention_flops / self.attention_peak
        backward = forward * ATTENTION_BACKWARD
        if not CAUSAL[kernel]:  # the scores are kept: two products forward, four backward
            passes = _SCORE_PASSES[kernel] * work.scores * element / self.bandwidth
            return forward + passes, 2 * (forward + passes)
        return forward, backward

    def ends(self, found: LayoutWork, tp: int, *, defers: bool = False) -> tuple[Seconds, Seconds]:
        """Return the seconds of the first and of the last stage's own operations; see `layer`."""
        ends = []
        for work in (found.first, found.last):
            rounds = self._rounds(found, work)
            products = sum(
                rounds
                * self.product(
                    shape._replace(rows=-(-shape.rows // rounds)),
                    self.head_peak,
                    found.sizes.element,
                )
                for shape in work.products
            )
            moved, loss = self._moved(work), self._loss(work)
            head = products + loss  # of the forward, where the backward doesn't make it
            late = head if self.stack.fuses_loss else 0.0
            tp_forward, tp_backward, _ = self._borders(found, work, tp, self.head_peak, defers)
            ends.append(
                Seconds(
                    moved + head - late,
                    PRODUCT_BACKWARD * products + _MOVED_BACKWARD * (moved + loss) + late,
                    0.0,
                    tp_forward,
                    tp_backward,
                    0.0,
                    0.0,
                )
            )
        return ends[0], ends[1]

    def _rounds(self, found: LayoutWork, work: Work) -> int:
        """Return in how many rounds the backward makes the logits, 1 for what makes none."""
        if not (self.stack.fuses_loss and work.loss_moved):
            return 1
        tokens, element = found.sizes.tokens, found.sizes.element
        return -(-tokens // loss_rows(tokens, element, on_cpu=self.on_cpu))

    def _moved(self, work: Work) -> float:
        """Return the seconds of a forward beside products and attention."""
        return self.moves * forward_moved(work, self.stack) / self.bandwidth

    def _loss(self, work: Work) -> float:
        """Return the seconds of the loss's forward."""
        return self.loss_moves * work.loss_moved / self.bandwidth

    def _borders(
        self, found: LayoutWork, work: Work, tp: int, peak: float, defers: bool
    ) -> tuple[float, float, float]:
        """Return the exposed seconds of tensor parallelism, forward, backward and again.

        Of what travels beside one of the two backward products of column-parallel layers, what is
        longer than those. Of other systems `exposed.tp` was fitted to all that ours waits for.
        """
        sums = [0.0, 0.0, 0.0]
        columns = [shape for shape in work.products if shape.is_column]
        rounds = self._rounds(found, work)  # the gradient of their input travels beside the last
        room = sum(self.product(shape, peak, found.sizes.element) for shape in columns) / rounds
        hides = self.overlap if self.stack.overlaps_tp else 0.0
        for message in work.messages:
            if message.axis != "tp" or (message.beside == "inputs" and not hides):
                continue
            often = rounds if message.phase.startswith("loss") else 1
            each = often * self.network.seconds(message.kind, message.bytes / often, tp, 1, "tp")
            seconds = message.times * each * self.tp_exposed
            if message.beside == "inputs" or (message.beside and not defers):
                seconds -= hides * min(seconds, room)
            is_late = self.stack.fuses_loss and message.phase.startswith(("head", "loss"))
            is_backward = message.beside or "gradient" in message.phase or is_late
            sums[2 if message.phase.startswith("recompute") else bool(is_backward)] += seconds
        return sums[0], sums[1], sums[2]

    def _context(self, work: Work, cp: int, tp: int, cp_kind: str, attention: float) -> float:
        """Return the exposed seconds of context parallelism.

        The ring sends while it computes with what it has: arXiv:2310.01889, section 3. A second
        forward's messages are in the program's counts.
        """
        seconds = sum(
            message.times * self.network.seconds(message.kind, message.bytes, cp, tp, "cp")
            for message in work.messages
            if message.axis == "cp" and message.kind != "recv"  # both ways at once
        )
        hidden = self.overlap * min(seconds, attention) if cp_kind == "ring" else 0.0
        return seconds - hidden
