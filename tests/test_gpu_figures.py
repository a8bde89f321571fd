"""What was measured on an H100 and an H200 on 2026-11-27, beside what is predicted today.

Rows of docs/benchmarks/gpu.md, each with its config: seconds of a step and bytes at its peak.
"""

import pytest
from benchmarks.gpu_predicted import peak, setting

from meshwright.layout import Layout
from meshwright.predict.price import price
from meshwright.spec.loading import load_config

# Preset, layers, rows of a microbatch, overrides, seconds, bytes.
MEASURED = [
    ("llama-3-8b", 11, 2, ["train.compile=false"], 1.2056, 77.56e9),
    ("llama-3-8b", 11, 2, ["train.compile=true"], 1.0847, 77.03e9),
    ("llama-3-8b", 11, 2, ["train.compile=true", "train.fp8=true"], 0.8686, 77.70e9),
    ("llama-3.2-1b", 16, 4, ["train.compile=false"], 1.2313, 46.10e9),
    ("llama-3.2-1b", 16, 4, ["train.compile=true"], 1.0112, 45.04e9),
    ("olmoe-1b-7b", 9, 2, ["train.compile=false"], 0.6232, 78.91e9),
    ("olmoe-1b-7b", 9, 2, ["train.compile=true"], 0.4852, 80.62e9),
]


# On an H200; its constants of memory, products and attention were set from these: preset, layers,
# rows of a microbatch, tokens of a row, words of the layout, overrides, seconds; and bytes where
# nothing else was in memory.
SAME = [
    ("llama-3-8b", 23, 2, 4096, "", ["train.compile=false"], 2.2207, 138.37e9),
    ("llama-3-8b", 23, 2, 4096, "", ["train.compile=true"], 2.0458, 137.85e9),
    ("llama-3.2-1b", 16, 4, 4096, "", ["train.compile=false"], 1.1866, 46.10e9),
    ("llama-3.2-1b", 16, 4, 4096, "", ["train.compile=true"], 1.0073, 45.04e9),
    ("olmoe-1b-7b", 16, 2, 4096, "", ["train.compile=false"], 0.9509, None),
    ("olmoe-1b-7b", 16, 2, 4096, "", ["train.compile=true"], 0.7749, None),
    ("llama-3-8b", 23, 2, 4096, "", ["train.compile=true", "train.fp8=true"], 1.5584, None),
]
# Shapes and layouts from which no constant was set.
OTHERS = [
    ("llama-3-8b", 23, 1, 8192, "", ["train.compile=true"], 2.2107, None),
    ("llama-3.2-1b", 16, 2, 8192, "", ["train.compile=true"], 1.1413, None),
    ("qwen3-8b", 25, 2, 4096, "", ["train.compile=true"], 2.0571, None),
    ("qwen3-30b-a3b", 10, 2, 4096, "", ["train.compile=true"], 0.6349, None),
    ("pythia-6.9b", 28, 4, 2048, "", ["train.compile=true"], 2.1139, None),
    ("moonlight-16b-a3b", 12, 2, 4096, "", ["train.compile=true"], 0.8137, None),
    ("llama-3-8b", 30, 2, 4096, " offload-activations", ["train.compile=true"], 5.1018, None),
]


def predicted(preset, layers, rows, length, more, words, device):
    sizes = [f"model.preset={preset}", f"model.n_layers={layers}"]
    train = [f"train.seq_len={length}", f"train.batch={4 * rows}", "train.precision=bf16"]
    cluster = [f"cluster.preset={device}", "cluster.devices_per_node=1"]
    config = load_config(None, [*sizes, *train, *cluster, *words])
    layout = Layout.parse(f"mb{rows}{more}")
    return price(setting(config, layout), layout).time.total, peak(config, layout)


@pytest.mark.parametrize(("preset", "layers", "rows", "words", "seconds", "at_peak"), MEASURED)
def test_steps_of_a_gpu_are_predicted(preset, layers, rows, words, seconds, at_peak):
    step, memory = predicted(preset, layers, rows, 4096, "", words, "h100-sxm")
    assert step == pytest.approx(seconds, rel=0.03)
    assert memory == pytest.approx(at_peak, rel=0.03)


@pytest.mark.parametrize(
    ("preset", "layers", "rows", "length", "more", "words", "seconds", "at_peak"), [*SAME, *OTHERS]
)
def test_another_gpu_and_other_shapes_are_predicted(
    preset, layers, rows, length, more, words, seconds, at_peak
):
    step, memory = predicted(preset, layers, rows, length, more, words, "h200")
    assert step == pytest.approx(seconds, rel=0.06)
    assert at_peak is None or memory == pytest.approx(at_peak, rel=0.03)
