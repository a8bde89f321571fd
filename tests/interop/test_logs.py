"""Logs of other trainers as measurements: which lines are taken, and what they say."""

import json

import pytest

from meshwright.cli import main
from meshwright.errors import ConfigError
from meshwright.interop.logs import LoggedRun, is_log, read_log
from meshwright.units import GIB

# 64 sequences of 4,096 tokens on 16 ranks, 2 of which work on one sequence.
RUN = LoggedRun(64, 4096, 16, 2)
# Seconds of ten steps: the first compiles, the seventh waits for a checkpoint.
STEPS = [30.0, 2.0, 2.01, 1.99, 2.0, 2.0, 9.0, 2.02, 2.0, 1.98]


def torchtitan(at, seconds):
    rate = 64 * 4096 / 16 / seconds
    return (
        f"[rank0]:[titan] 2026-11-28 - root - INFO - \x1b[31mstep: {at:2}  \x1b[32mloss:  8.1234  "
        f"\x1b[33mgrad_norm:  1.2345  \x1b[38mmemory: {40 + at % 3:5.2f}GiB(50.00%)  "
        f"\x1b[34mtps: {round(rate):,}  \x1b[36mtflops: 321.12  \x1b[35mmfu: 32.47%\x1b[39m"
    )


def megatron(at, seconds):
    return (
        f" [2026-11-28 10:00:00] iteration {at:8d}/     100 | consumed samples: {64 * at:12d} | "
        f"elapsed time per iteration (ms): {seconds * 1e3:.1f} | throughput per GPU "
        "(TFLOP/s/GPU): 400.1 | learning rate: 1.0E-04 | global batch size:    64 |"
    )


def deepspeed(at, seconds):
    return (
        "[2026-11-28 10:00:00,000] [INFO] [timer.py:264:stop] epoch=0/micro_step=8/"
        f"global_step={at}, RunningAvgSamplesPerSec=30.1, CurrSamplesPerSec={64 / seconds}, "
        f"MemAllocated=10.2GB, MaxMemAllocated={40 + at % 3}.0GB"
    )


def axolotl(at, seconds):
    rate = 64 * 4096 / 16 / seconds
    metrics = {
        "loss": 1.5,
        "learning_rate": 1e-4,
        "memory/max_active (GiB)": 30.0 + at % 3,
        "memory/device_reserved (GiB)": 40.0 + at % 3,
        "tokens/train_per_sec_per_gpu": rate,
        "epoch": 0.1,
    }
    return f"{metrics} | {at}/10"


WRITERS = {
    "torchtitan": torchtitan,
    "Megatron-LM": megatron,
    "DeepSpeed": deepspeed,
    "axolotl": axolotl,
}


@pytest.mark.parametrize("name", WRITERS)
def test_a_log_is_its_median_step_and_largest_peak(tmp_path, name):
    lines = ["starting"]
    for at, seconds in enumerate(STEPS, 1):
        lines += [WRITERS[name](at, seconds), "something else"]
    if name == "Megatron-LM":
        lines.append(
            "[Rank 0] (after 2 iterations) memory (MB) | allocated: 20000.00 | max allocated: "
            f"30000.00 | reserved: 40000.00 | max reserved: {42 * 1024}.00"
        )
    file = tmp_path / "train.log"
    file.write_text("\n".join(lines))
    assert is_log(file)
    found = read_log(file, RUN)
    assert found.seconds == pytest.approx(2.0, rel=1e-3)
    assert found.bytes == pytest.approx(42 * GIB)
    assert found.is_allocated == (name == "DeepSpeed")
    told = " ".join(found.says)
    assert name in told
    assert "the median of 8 steps (lines 4 to 20)" in told
    assert "left out: 1 of warm-up and 1 outlier" in told


def test_trainer_state_has_steps_or_the_whole_run(tmp_path):
    file = tmp_path / "trainer_state.json"
    entries = [
        {"step": at, "loss": 1.0, "train_tokens_per_second": 64 * 4096 / seconds}
        for at, seconds in enumerate(STEPS, 1)
    ]
    last = {"train_runtime": 100.0, "train_steps_per_second": 0.4, "step": 10}
    file.write_text(json.dumps({"log_history": [*entries, last]}))
    assert is_log(file)
    assert read_log(file, RUN).seconds == pytest.approx(2.0)
    file.write_text(json.dumps({"log_history": [{"step": 1, "loss": 1.0}, last]}))
    found = read_log(file, RUN)
    assert found.seconds == pytest.approx(2.5)
    assert "warm-up included" in found.says[0]
    file.write_text(json.dumps({"log_history": [{"step": 1, "loss": 1.0}]}))
    with pytest.raises(ConfigError, match="no entry of log_history has a time"):
        read_log(file, RUN)


def test_a_table_of_weights_and_biases(tmp_path):
    file = tmp_path / "wandb.csv"
    header = '"Step","run - time_metrics/end_to_end(s)","run - time_metrics/end_to_end(s)__MIN",'
    rows = [f'"{at}","{seconds}","0.1","{40 + at % 3}"' for at, seconds in enumerate(STEPS, 1)]
    file.write_text("\n".join([f'{header}"run - memory/max_reserved(GiB)"', *rows]))
    found = read_log(file, RUN)
    assert found.seconds == pytest.approx(2.0)
    assert found.bytes == pytest.approx(42 * GIB)
    assert "Weights & Biases" in found.says[0]


def test_a_log_without_steps_is_refused(tmp_path):
    file = tmp_path / "train.log"
    file.write_text("hello\n")
    assert not is_log(file)
    with pytest.raises(ConfigError, match="no line of a step"):
        read_log(file, RUN)


def test_plan_is_corrected_by_a_log_of_the_layout_that_like_gives(tmp_path, capsys):
    config, log = tmp_path / "run.toml", tmp_path / "train.log"
    config.write_text(
        '[model]\nname = "llama3"\nflavor = "8B"\n[training]\nlocal_batch_size = 4\n'
        "seq_len = 4096\nglobal_batch_size = 64\n[parallelism]\ntensor_parallel_degree = 2\n"
        '[activation_checkpoint]\nmode = "full"\n'
    )
    log.write_text("\n".join(torchtitan(at, seconds) for at, seconds in enumerate(STEPS, 1)))
    words = ["plan", "--like", str(config), "cluster.preset=h100-sxm", "cluster.nodes=2"]
    assert main([*words, "--measured", str(log), "--no-keep", "--json", "--top", "1"]) == 0
    captured = capsys.readouterr()
    assert "the median of 8 steps (lines 2 to 10)" in " ".join(captured.err.split())
    found = json.loads(captured.out)
    assert found["measured"][0]["of"].startswith("torchtitan.")
    assert found["like"]["as_given"]["step_time_s"] == pytest.approx(2.0, rel=0.02)
