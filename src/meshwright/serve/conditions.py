"""`Conditions`: what a command line says beside the words of a config, for all that a page asks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final

from meshwright.launch.pricing.measured import as_measured_here
from meshwright.predict.calibration import Calibration
from meshwright.search.plan import Plan, plan
from meshwright.search.prices import KnownPrices
from meshwright.search.rank import MARGIN
from meshwright.spec.loading import Config

TOP: Final = 10


@dataclass(frozen=True)
class Conditions:
    """What holds for all questions to a page.

    `environ` has the variables that say where calibrations are kept; each question is priced by
    what is kept of its cluster, as the command's is, or by `calibration` where the command line
    states one. `margin` is the share of memory to leave free, `top` how many layouts are ranked.
    `flags` are the words that say all this on a command line. `prices` are those of the questions
    that this process was asked before.
    """

    environ: Mapping[str, str] = field(default_factory=dict)
    calibration: Calibration | None = None
    margin: float = MARGIN
    top: int = TOP
    flags: tuple[str, ...] = ()
    prices: KnownPrices = field(default_factory=KnownPrices, compare=False)

    def plan(self, config: Config) -> Plan:
        """Return the plan of a config under these conditions."""
        if self.calibration is None:
            config = as_measured_here(config, self.environ)
        return plan(config, self.top, self.calibration, self.margin, prices=self.prices)

    def as_json(self) -> dict[str, Any]:
        """Return it as JSON."""
        found = asdict(replace(self, prices=KnownPrices()))
        return {name: value for name, value in found.items() if name != "prices"}

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> Conditions:
        """Return what `as_json` has written."""
        known = found["calibration"]
        return cls(
            found["environ"],
            None if known is None else Calibration(**known),
            found["margin"],
            found["top"],
            tuple(found["flags"]),
        )
