"""Lets the planner choose what a config leaves to it, on this machine, and predicts a run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from meshwright.errors import ConfigError
from meshwright.kernels.processor import processor
from meshwright.layout import Layout, Machine, resolve_layout
from meshwright.runtime.machines.machine import CPU_RANKS, gpu_memory, gpu_name
from meshwright.runtime.pricing.measured import CALIBRATION
from meshwright.spec.dump import MEASURED_HERE
from meshwright.spec.loading import Config
from meshwright.spec.resolve import default_precision

if TYPE_CHECKING:  # `config show` has no use for what they bring
    from meshwright.cost.inputs import CostInputs
    from meshwright.program.profile import StepProfile
    from meshwright.training.run_folder import Job

# Whose kernels an unknown GPU is taken to have.
_ANY_GPU: Final = "a100-80gb"


def settled(config: Config, machine: Machine, lacks: str | None = None) -> Config:
    """Return a config with its layout and `train.compile` chosen, if left to the planner.

    On GPUs, a missing precision and microbatch are chosen as well. `lacks` is a line on what
    torch.compile lacks here, or None. Raises `ConfigError` if no layout fits, or if the catalogue
    lacks the machine's GPUs.
    """
    config = in_precision_of(config, machine)
    if config.layout.auto:
        # Only here and below: `train --help` starts without the planner.
        from meshwright.planner.plan import planned

        machine_config = on_machine(config, machine)
        planned_config = planned(
            machine_config, lacks, processor(), slower(machine_config, machine)
        )
        changes = {
            "layout": planned_config.layout,
            "train": planned_config.train,
            "origins": planned_config.origins,
        }
        return config.model_copy(update=changes)
    on_gpus = machine.device == "cuda"
    if config.train.compile == "auto" and (on_gpus or config.cluster.calibration is not None):
        from meshwright.planner.choices import choose, decided, unmeasured

        layout = resolve_layout(config, machine)
        try:
            setting = cost_inputs_on(config, machine, layout)
        except ConfigError:  # a run with a layout needs no device that is known
            config = decided(config, unmeasured(config.train, lacks, on_gpus=on_gpus))
        else:
            is_kept = config.origins.get(CALIBRATION, "").startswith(MEASURED_HERE)
            if not on_gpus and setting.compile_gain is None and is_kept:
                return config  # nobody has asked for what is not measured
            config = decided(config, choose(setting, layout, lacks))
    return with_microbatch(config, machine) if on_gpus else config


def in_precision_of(config: Config, machine: Machine) -> Config:
    """Return a config with the usual precision of this machine's GPUs if it does not set one."""
    is_given = config.origins.get("train.precision", "default") != "default"
    if is_given or machine.device != "cuda" or config.cluster.preset != "local":
        return config
    default = default_precision(gpu_name() or "this GPU")
    train = config.train.model_copy(update={"precision": default.value})
    origins = {**config.origins, "train.precision": default.origin}
    return config.model_copy(update={"train": train, "origins": origins})


def with_microbatch(config: Config, machine: Machine) -> Config:
    """Return a config with the fastest predicted microbatch that fits, unless it sets one.

    For GPUs that the catalogue lacks, it is the largest that fits into the memory stated by the
    driver. The config is unchanged if none fits, or if the memory is unknown.
    """
    if config.layout.microbatch is not None:
        return config
    from meshwright.planner.choices import fastest, largest

    layout = resolve_layout(config, machine)
    try:
        choice = fastest(cost_inputs_on(config, machine, layout), layout)
    except ConfigError:  # a run with a layout needs no device that is known
        memory = gpu_memory()
        if memory is None:
            return config
        # The bytes of a layout are the same on all GPUs.
        cluster = config.cluster.model_copy(update={"preset": _ANY_GPU})
        alike = config.model_copy(update={"cluster": cluster})
        choice = largest(cost_inputs_on(alike, machine, layout), layout, memory)
    if choice is None:
        return config
    section = config.layout.model_copy(update={"microbatch": choice.layout.microbatch})
    origins = {**config.origins, "layout.microbatch": choice.reason}
    return config.model_copy(update={"layout": section, "origins": origins})


def cost_inputs_on(config: Config, machine: Machine, layout: Layout) -> CostInputs:
    """Return the cost inputs of a layout on this machine; raises `ConfigError` as `on_machine`."""
    from meshwright.planner.plan import cost_inputs_of, on_cluster

    ranks_per_node = layout.world // config.cluster.nodes
    priced = cost_inputs_of(
        on_machine(config, machine),
        processor=processor(),
        slower=slower(config, machine, ranks_per_node),
    )
    return on_cluster(priced, layout)


def slower(config: Config, machine: Machine, ranks: int | None = None) -> float:
    """Return how many times slower a rank of this machine is than the catalogue's CPU device.

    `ranks` is their number per node; None means `cluster.devices_per_node` or the default. Ranks
    share a CPU's cores; the catalogue's device is the share of one rank with the default number of
    ranks. 1.0 for GPUs.
    """
    if machine.device != "cpu" or config.cluster.preset != "local":
        return 1.0
    count = ranks or config.cluster.devices_per_node or machine.devices
    return count / min(CPU_RANKS, machine.cores)


def on_machine(config: Config, machine: Machine) -> Config:
    """Return a config whose `cluster` is this machine's devices, for the planner.

    A CPU gets as many ranks as the config's degrees need. Raises `ConfigError` if the machine's
    GPUs are not in the catalogue.
    """
    from meshwright.cost.catalogue import device_named
    from meshwright.planner.space import degree_of, given

    devices = machine.devices
    if not machine.is_fixed:
        devices = max(devices, -(-degree_of(given(config)) // config.cluster.nodes))
    config = in_precision_of(config, machine)
    changes: dict[str, object] = {"devices_per_node": devices, "device": machine.device}
    if machine.device == "cuda" and config.cluster.preset == "local":
        name = gpu_name()
        device = None if name is None else device_named(name)
        if device is None:
            raise ConfigError(
                f"cluster.preset = 'local': {name or 'the GPU of this machine'} is not in the "
                "catalogue. Name a similar one, as in cluster.preset=h100-sxm, or plan for the "
                "CPU with cluster.device=cpu"
            )
        changes["preset"] = device.name
    return config.model_copy(update={"cluster": config.cluster.model_copy(update=changes)})


def predicted(job: Job) -> StepProfile | None:
    """Return the predicted step profile of a run; None if the catalogue lacks the device."""
    from meshwright.cost.profile import predicted_profile

    try:
        setting = cost_inputs_on(job.config, job.machine, job.layout)
    except ConfigError:
        return None
    return predicted_profile(setting, job.layout)
