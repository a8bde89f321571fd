"""The sentences of a run's page: how it ended, its problems, and what to do about them."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping
from typing import Any, Final

from meshwright.layout.schedules import SCHEDULES
from meshwright.program.events import ending
from meshwright.program.profile import StepProfile
from meshwright.report.agreement import MEANINGS, agreement, name_in_events, peak_name
from meshwright.report.causes import CAUSE_NAMES, mean_causes
from meshwright.report.curves import series
from meshwright.report.figure import finite, seconds
from meshwright.report.record import RunRecord
from meshwright.spec.parts import parameter_count, trained_parameter_count
from meshwright.spec.words import busy
from meshwright.units import counted, format_bytes, format_count

# A problem, and what to do about it.
Advice = tuple[str, str]

# Shares that are worth a word: of the step idle, of it waiting for the batch or for messages, of
# the memory used, by which a prediction is off.
_BUBBLE, _INPUT, _MESSAGES, _FULL, _OFF = 0.20, 0.05, 0.20, 0.92, 0.10
# By how much throughput has to fall from the first half of a run to the last tenth.
_SLOWER: Final = 0.10


def verdict(run: RunRecord) -> list[str]:
    """Return sentences on how a run ended and how good its loss is."""
    sentences = [_ending(run)]
    losses = series(run.steps, "loss")[1]
    entropy = finite(run.start.get("unigram_entropy"))
    held_out_steps, held_out_losses = series(run.by_step("eval"), "loss")
    final = held_out_losses[-1] if held_out_losses else losses[-1] if losses else None
    if final is not None and entropy is not None:
        kind = "held-out" if held_out_losses else "training"
        is_below = final < entropy
        sentences.append(
            f"The last {kind} loss is {'below' if is_below else 'not below'} the unigram entropy: "
            + (
                "the model uses context."
                if is_below
                else "the model has not learnt to use context yet."
            )
        )
    if len(held_out_losses) > 2 and held_out_losses[-1] > min(held_out_losses) * 1.02:
        best = held_out_steps[held_out_losses.index(min(held_out_losses))]
        sentences.append(f"The held-out loss was lowest at step {best:.0f} and has risen since.")
    if not (losses or run.of("failed") or run.of("end")):
        sentences.append("No step was finished.")
    sentences += [str(event.get("says")) for event in run.of("measured")[-1:]]
    return [*sentences, *_compared(run.planned, run.measured)]


def _ending(run: RunRecord) -> str:
    steps = run.steps
    last = steps[-1]["step"] if steps else 0
    asked = run.start.get("steps") or run.values.get("train", {}).get("steps")
    end = ending(run.events)
    if end is not None and end["event"] == "failed":
        return f"Failed after step {last} of {asked}: {end['cause']}."
    if end is not None and end["stopped"]:
        return f"Stopped on request after step {end['step']} of {asked}."
    if end is not None and "early" in end:
        return f"Ended early after step {end['step']} of {asked}: {end['early']}."
    if end is not None:
        return f"Done: {counted(end['step'], 'step')}."
    return f"No end is recorded: step {last} of {asked} is the last one that was logged."


def _compared(planned: StepProfile | None, happened: StepProfile | None) -> list[str]:
    """Return a sentence, in a list, on the errors of predicted time, memory and bubble."""
    if planned is None or happened is None:
        return []
    comparisons = []
    if planned.step_time_s and happened.step_time_s:
        off = planned.step_time_s / happened.step_time_s - 1
        comparisons.append(
            f"step {seconds(planned.step_time_s)}, {happened.source} "
            f"{seconds(happened.step_time_s)} ({off:+.0%})"
        )
    predicted_peak, measured_peak = (
        profile.worst.peak if profile.worst else None for profile in (planned, happened)
    )
    if predicted_peak and measured_peak and measured_peak.total:
        off = predicted_peak.total / measured_peak.total - 1
        comparisons.append(
            f"{peak_name(measured_peak)} {format_bytes(predicted_peak.total)}, {happened.source} "
            f"{format_bytes(measured_peak.total)} ({off:+.1%})"
        )
    agreed = agreement(planned, happened) if happened.source == "measured" else None
    order = f"Of the recorded step: {agreed.words}." if agreed else ""
    return [
        *([f"Predicted: {'; '.join(comparisons)}."] if comparisons else []),
        *([order] if order else []),
    ]


def run_warnings(run: RunRecord) -> list[Advice]:
    """Return the problems of a run, each with advice; the most serious first."""
    return [
        *_failures(run),
        *_skipped(run),
        *_speed(run),
        *_shared_cores(run),
        *profile_warnings(run.planned, run.measured, _slowed_by(run)),
    ]


def _failures(run: RunRecord) -> Iterator[Advice]:
    restarts = run.of("restart")
    if restarts:
        lost = sum(int(e.get("lost_steps") or 0) for e in restarts)
        times = "once" if len(restarts) == 1 else f"{len(restarts)} times"
        causes = "; ".join(dict.fromkeys(str(e.get("cause", "?")) for e in restarts))
        yield (
            f"The ranks were restarted {times}, and recomputed {counted(lost, 'step')}: {causes}.",
            "A smaller checkpoint.every loses fewer steps; checkpoint.async hides its cost.",
        )
    if losses := run.of("replica_lost"):
        times = "once" if len(losses) == 1 else f"{len(losses)} times"
        causes = "; ".join(dict.fromkeys(str(e.get("cause", "?")) for e in losses))
        yield (
            f"A replica was lost {times}, and the others went on: {causes}.",
            "The steps meanwhile took longer, and no row was lost (cluster.elastic).",
        )
    for event in run.of("bad_checkpoint"):
        yield (
            f"A checkpoint was bad: {event.get('problem', '?')}.",
            "The one before it was taken. Look at the disk: `meshwright doctor` measures it.",
        )
    for event in run.of("slow_rank")[:4]:
        share = finite(event.get("others_wait"))
        waited = f", the others waited for it {share:.0%} of the time" if share else ""
        yield (
            f"Rank {event.get('rank')} was slow from step {event.get('from_step')} to "
            f"{event.get('step')}{waited}.",
            "Look for another process on its device, for heat, or for a slow link.",
        )


def _skipped(run: RunRecord) -> Iterator[Advice]:
    spikes = run.of("loss_spike")
    if spikes:
        spike_steps = ", ".join(str(event.get("step")) for event in spikes[:6])
        suffix = f" and {len(spikes) - 6} more" if len(spikes) > 6 else ""
        yield (
            f"The loss jumped at step {spike_steps}{suffix}.",
            "Where it does not come back: a lower optimizer.lr, more warmup_steps, a smaller "
            "train.clip_norm, or resume before it with another data.seed.",
        )
    overflows = run.of("overflow")
    if overflows:
        yield (
            f"{len(overflows)} steps were skipped since gradients were not finite (the last at "
            f"step {overflows[-1].get('step')}, {overflows[-1].get('tensor', '?')}).",
            "A few at the start of fp16 are usual while the loss scale settles; later ones ask for "
            "train.precision=bf16 or a lower rate.",
        )


def _speed(run: RunRecord) -> Iterator[Advice]:
    shares = series(run.steps, "data_time_share")[1]
    if shares and statistics.median(shares) > _INPUT:
        yield (
            f"The ranks wait for data {statistics.median(shares):.0%} of the time.",
            "More data.workers, a store on a local disk, or `meshwright data prepare` beforehand.",
        )
    rates = series(run.steps, "tokens_per_s")[1]
    if len(rates) >= 10:
        early = statistics.median(rates[1 : len(rates) // 2 + 1])
        late = statistics.median(rates[-max(len(rates) // 10, 3) :])
        if late < early * (1 - _SLOWER):
            yield (
                f"Throughput fell from {format_count(early)} to {format_count(late)} tokens/s.",
                "Look for another load on the machine, for heat, or for a disk that fills up.",
            )
    saves = [finite(e.get("stall_s")) or 0.0 for e in run.of("save")]
    times = series(run.steps, "step_time_s")
    total = sum(times[1]) / max(len(times[1]), 1) * (times[0][-1] if times[0] else 0)
    if total and sum(saves) > _INPUT * total:
        yield (
            f"Saving took {sum(saves) / total:.0%} of the time, {seconds(sum(saves))}.",
            "checkpoint.async=true saves beside the training; checkpoint.every can be larger.",
        )


def _shared_cores(run: RunRecord) -> Iterator[Advice]:
    if (shared := _of_cores(run)) is not None:
        yield (
            f"{shared}.",
            "While one computes another waits: measured times and the bubble say more about the "
            "machine than about the layout.",
        )


def _of_cores(run: RunRecord) -> str | None:
    """Return a phrase such as "4 ranks share 2 cores" if ranks share cores, else None."""
    cores, world = run.machine.get("cores"), run.layout.world if run.layout else 1
    if run.machine.get("device") == "cpu" and cores and world > cores:
        return f"{world} ranks share {counted(cores, 'core')}"
    return None


def _slowed_by(run: RunRecord) -> str | None:
    """Return a sentence on why the machine may have been slower than predicted, or None."""
    if (shared := _of_cores(run)) is not None:
        return f"{shared}. Compare a layout with a core for each rank."
    load, cores = finite(run.machine.get("load")), run.machine.get("cores")
    text = busy(load, cores) if load and cores else None
    return text and f"The load of the machine was {text}. Compare once it is idle."


def profile_warnings(
    planned: StepProfile | None, happened: StepProfile | None, slowed_by: str | None = None
) -> list[Advice]:
    """Return the problems of a step, each with advice: bubble, waits, memory, wrong predictions.

    `slowed_by` is a sentence on what slowed the machine, or None.
    """
    base = happened or planned
    if base is None:
        return []
    return [
        *_shape(base),
        *_full(base if base.worst else planned),
        *(_off(planned, happened, slowed_by) if planned and happened else ()),
    ]


def _shape(base: StepProfile) -> Iterator[Advice]:
    if base.idle is not None and base.idle > _BUBBLE:
        yield (
            f"The pipeline is idle for {base.idle:.0%} of its actions' time.",
            _to_fill(base.layout),
        )
    causes = mean_causes(base)
    total = sum(causes.values())
    sp, zero = base.layout.get("sp"), base.layout.get("zero")
    todo = {
        "tp": f"A smaller layout.tp{'' if sp else ', or layout.sp=true'}.",
        "cp": "A smaller layout.cp, or longer sequences on each rank.",
        "ep": "A smaller layout.ep, or ranks of ep within a node.",
        "data": "A larger train.batch"
        + (", or a smaller layout.zero where memory allows." if zero else "."),
    }
    for cause, text in todo.items():
        share = causes.get(cause, 0.0) / total if total else 0.0
        if share > _MESSAGES:
            yield f"{CAUSE_NAMES[cause].capitalize()} takes {share:.0%} of the step.", text
    if total and causes.get("input", 0.0) > _INPUT * total:
        yield (
            f"The step waits for its batch {causes['input'] / total:.0%} of the time.",
            "More data.workers, or a store on a local disk.",
        )


def _to_fill(layout: Mapping[str, Any]) -> str:
    """Return advice on reducing the pipeline bubble by options that the layout does not use."""
    ways = ["more microbatches (a larger train.batch or a smaller layout.microbatch)"]
    if layout.get("virtual_stages", 1) == 1:
        ways.append("virtual stages (layout.virtual_stages=2)")
    traits = SCHEDULES.get(str(layout.get("schedule")))
    if traits is None or not traits.splits_backward:
        ways.append("a zero-bubble schedule (layout.schedule=interleaved_zero_bubble)")
    *first, last = ways
    text = f"{', '.join(first)} or {last}" if first else last
    return f"{text[0].upper()}{text[1:]} would fill it."


def _full(base: StepProfile | None) -> Iterator[Advice]:
    worst = base.worst if base else None
    peak = worst.peak if worst else None
    if base is None or worst is None or peak is None or not base.memory_limit:
        return
    share = peak.total / base.memory_limit
    if share > _FULL:
        verb = "does not fit: it needs" if share > 1 else "uses"
        yield (
            f"Rank {worst.rank} {verb} {share:.0%} of its memory, at {peak.at}.",
            "layout.recompute=full, a higher layout.zero, a smaller layout.microbatch; "
            "`meshwright plan --after-oom RUN` ranks them.",
        )


def _off(planned: StepProfile, happened: StepProfile, slowed_by: str | None) -> Iterator[Advice]:
    if planned.step_time_s and happened.step_time_s:
        off = planned.step_time_s / happened.step_time_s - 1
        advice = "`meshwright bench device --out here.toml` measures this machine for the planner."
        if off < 0 and slowed_by is not None:  # the constants may be right: it was slower
            advice = slowed_by
        if abs(off) > _OFF:
            side = "short" if off < 0 else "long"
            yield f"The predicted step time is {abs(off):.0%} too {side}.", advice
    predicted_peak, measured_peak = (
        profile.worst.peak if profile.worst else None for profile in (planned, happened)
    )
    if (
        predicted_peak
        and measured_peak
        and measured_peak.total
        and abs(predicted_peak.total / measured_peak.total - 1) > _OFF
    ):
        off = predicted_peak.total / measured_peak.total - 1
        side = "low" if off < 0 else "high"
        yield (
            f"The predicted {peak_name(measured_peak)} is {abs(off):.0%} too {side}.",
            "Compare the areas and the line in the chart of memory: that tells which part it is.",
        )


def headline(run: RunRecord) -> list[tuple[str, str, str]]:
    """Return the run's key figures; each is a name, a value and a remark."""
    steps, start = run.steps, run.start
    key_figures: list[tuple[str, str, str]] = []
    count = finite(start.get("parameters"))
    family = run.values.get("model", {})
    if count:
        shape = f"{family.get('n_layers', '?')} layers of {family.get('dim', '?')}"
        key_figures.append(
            ("Parameters", format_count(count), f"{family.get('family', '')} {shape}")
        )
    key_figures += _adapters(run)
    world = start.get("world") or (run.layout.world if run.layout else None)
    if world:
        key_figures.append(("Ranks", str(world), str(start.get("device", ""))))
    key_figures += _progress(run)
    rates = series(steps, "tokens_per_s")[1]
    if rates:
        median = statistics.median(rates)
        per_rank = f"{format_count(median / int(world or 1))} a rank, median"
        key_figures.append(("Tokens a second", format_count(median), per_rank))
    if steps:
        utilised = finite(steps[-1].get("mfu"))
        context = "of the stated peak" if utilised is not None else "cluster.peak_tflops is not set"
        key_figures.append(("MFU", "–" if utilised is None else f"{utilised:.1%}", context))
    peak = peak_memory(run)
    if peak is not None:
        key_figures.append(_fact(peak[2], peak[1], peak[0]))
    worst = run.measured.worst if run.measured else None
    if worst is not None and worst.peak is not None:
        name = peak_name(worst.peak)
        if peak is None or name != peak[2]:
            key_figures.append(_fact(name, worst.peak.total, worst.rank))
    return key_figures


def _adapters(run: RunRecord) -> Iterator[tuple[str, str, str]]:
    """Yield the key figure on the trained parameters of a run with LoRA adapters."""
    model = run.program.model if run.program else None
    if model is None or model.lora is None:
        return
    trained, count = trained_parameter_count(model), parameter_count(model)
    lora, targets = model.lora, ", ".join(model.lora.targets)
    kind = f"LoRA, rank {lora.rank}, alpha {lora.alpha:g}, on {targets}"
    yield "Trained", format_count(trained), f"{trained / count:.1%} of the parameters: {kind}"


def _fact(name: str, byte_count: int, rank: int | str) -> tuple[str, str, str]:
    return name.capitalize(), format_bytes(byte_count), f"rank {rank}, {MEANINGS[name]}"


def _progress(run: RunRecord) -> Iterator[tuple[str, str, str]]:
    xs, losses = series(run.steps, "loss")
    if losses:
        held_out_losses = series(run.by_step("eval"), "loss")[1]
        context = f"held out {held_out_losses[-1]:.4f}" if held_out_losses else "training"
        yield "Final loss", f"{losses[-1]:.4f}", f"nats at step {xs[-1]:.0f}; {context}"


def peak_memory(run: RunRecord) -> tuple[str, int, str] | None:
    """Return the rank with the highest peak memory, its bytes, and which kind of peak it is.

    None if no event has it.
    """
    peak_by_rank: dict[str, int] = {}
    for event in run.steps:
        peaks: Any = event.get("peak_memory_bytes")
        for rank, byte_count in (peaks if isinstance(peaks, dict) else {}).items():
            peak_by_rank[rank] = max(peak_by_rank.get(rank, 0), int(byte_count))
    if not peak_by_rank:
        return None
    worst = max(peak_by_rank, key=lambda rank: peak_by_rank[rank])
    device = str(run.start.get("device", "")) or str(run.machine.get("device", ""))
    return worst, peak_by_rank[worst], name_in_events(device)
