"""What was measured on an H100 on 2026-11-27, beside what is predicted today.

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


def predicted(preset, layers, rows, words):
    sizes = [f"model.preset={preset}", f"model.n_layers={layers}"]
    train = ["train.seq_len=4096", f"train.batch={4 * rows}", "train.precision=bf16"]
    device = ["cluster.preset=h100-sxm", "cluster.devices_per_node=1"]
    config, layout = load_config(None, [*sizes, *train, *device, *words]), Layout(microbatch=rows)
    return price(setting(config, layout), layout).time.total, peak(config, layout)


@pytest.mark.parametrize(("preset", "layers", "rows", "words", "seconds", "at_peak"), MEASURED)
def test_steps_of_a_gpu_are_predicted(preset, layers, rows, words, seconds, at_peak):
    step, memory = predicted(preset, layers, rows, words)
    assert step == pytest.approx(seconds, rel=0.06)
    assert memory == pytest.approx(at_peak, rel=0.03)
