"""Faults injected for tests: a rank is killed, stopped or corrupted in a given phase and step.

`FAULT=rank:phase:step:action` in the environment of `train`; docs/faults.md lists the actions. Does
not import torch: `runtime.ranks.worker` executes them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from meshwright.checkpoint.commit import PLACES
from meshwright.comm.flight_recorder_file import PHASES
from meshwright.errors import ConfigError, nearest, refusal

# The phases of a flight recorder, and the places of a save.
MOMENTS: Final = (*PHASES, *(f"save.{place}" for place in PLACES))
ACTIONS: Final = ("kill", "stop", "segfault", "hang_gil", "sleep", "raise", "exit", "nan")


@dataclass(frozen=True)
class Fault:
    """An action on a rank in a phase of a step; `step` None means each step.

    `always` means in every attempt, not only in the first.
    """

    rank: int
    phase: str
    step: int | None
    action: str
    argument: str = ""
    always: bool = False

    @classmethod
    def parse(cls, text: str) -> Fault:
        """Parse `rank:phase:step:action[=argument][:always]`, with `*` for every step.

        Raises `ConfigError` naming the part that is wrong.
        """
        fields = text.split(":")
        form = "FAULT is rank:phase:step:action, with :always at the end for every attempt"
        if len(fields) not in (4, 5) or (len(fields) == 5 and fields[4] != "always"):
            raise ConfigError(f"FAULT={text}: {form}")
        rank, phase, step, action = fields[:4]
        action, _, argument = action.partition("=")
        if not rank.isdecimal() or not (step == "*" or step.isdecimal()):
            raise ConfigError(f"FAULT={text}: {form}; rank and step are numbers")
        for word, known in ((phase, MOMENTS), (action, ACTIONS)):
            if word not in known:
                legal = nearest(word, known, 3) or list(known)
                raise ConfigError(refusal(f"FAULT={text}: {word!r} is unknown", legal=legal))
        step_number = None if step == "*" else int(step)
        return cls(int(rank), phase, step_number, action, argument, len(fields) == 5)
