"""`Conditions`: command-line options besides the config, for all questions of a page."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final

from meshwright.cost.calibration import Calibration
from meshwright.planner.plan import Plan, plan
from meshwright.planner.prices import KnownPrices
from meshwright.planner.rank import MARGIN
from meshwright.runtime.pricing.measured import as_measured_here
from meshwright.spec.loading import Config

TOP: Final = 6


@dataclass(frozen=True)
class Conditions:
    """The options that apply to all questions of a page.

    `environ` has the variables that determine where calibrations are stored. Predictions use
    `calibration` if it is given, else the stored one of the question's cluster. `margin` is the
    fraction of memory to leave free, `top` the number of ranked layouts. `flags` are these options
    as command-line arguments. `files` has the config keys that name files or folders, as set on the
    command line: a question may not name others. `prices` caches prices between questions.
    """

    environ: Mapping[str, str] = field(default_factory=dict)
    calibration: Calibration | None = None
    margin: float = MARGIN
    top: int = TOP
    flags: tuple[str, ...] = ()
    files: Mapping[str, str] = field(default_factory=dict)
    prices: KnownPrices = field(default_factory=KnownPrices, compare=False)

    def plan(self, config: Config) -> Plan:
        """Return the plan of a config under these conditions, priced by the right calibration."""
        if self.calibration is None:
            config = as_measured_here(config, self.environ)
        return plan(config, self.top, self.calibration, self.margin, prices=self.prices)

    def as_json(self) -> dict[str, Any]:
        """Return the conditions, without cached prices, as JSON values."""
        fields = asdict(replace(self, prices=KnownPrices()))
        return {name: value for name, value in fields.items() if name != "prices"}

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Conditions:
        """Return the conditions that `as_json` wrote."""
        known = document["calibration"]
        return cls(
            document["environ"],
            None if known is None else Calibration(**known),
            document["margin"],
            document["top"],
            tuple(document["flags"]),
            document["files"],
        )
