"""The sections of a step's profiles: the same for runs, plans and simulations."""

from __future__ import annotations

from meshwright.cost.catalogue import Cluster
from meshwright.layout import Layout
from meshwright.program.profile import StepProfile
from meshwright.report.causes import causes_chart, traffic_chart
from meshwright.report.memories import memory_chart
from meshwright.report.page import Page, prose
from meshwright.report.timelines import timeline_chart


def step_sections(
    page: Page,
    planned: StepProfile | None,
    happened: StepProfile | None,
    layout: Layout | None,
    cluster: Cluster | None,
) -> None:
    """Add a step's profiles: timeline, memory, causes, messages; skips empty ones."""
    drawn = timeline_chart(page, [planned, happened])
    if drawn:
        step = happened.step if happened else None
        which = f"Step {step} was recorded." if step is not None else ""
        page.section("steps", "Timeline of a step", prose(which), drawn)
    page.section("memories", "Memory", memory_chart(page, happened, planned))
    page.section("time", "Step time", causes_chart(page, planned, happened))
    page.section(
        "traffic", "Communication", traffic_chart(page, planned, happened, layout, cluster)
    )
