"""What a report says, counted anew from the files that it was made of."""

import json
import re

from meshwright.report.causes import CAUSE_NAMES
from meshwright.report.figure import seconds
from meshwright.report.record import read_run
from meshwright.report.run_page import run_page
from meshwright.units import format_bytes
from run_folders import write_run


def rows_of(page):
    """Return the cells of every table's rows."""
    rows = re.findall(r"<tr>(.*?)</tr>", page.html(), re.DOTALL)
    cells = (re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row, re.DOTALL) for row in rows)
    return [[re.sub(r"<[^>]+>", "", cell) for cell in row] for row in cells]


def test_causes_and_messages_are_those_of_the_record(config):
    """What the page says of both is counted anew from ledger.json."""
    words = ["layout.pp=2", "layout.microbatch=1", "train.batch=8", "model.n_layers=4"]
    folder = write_run(config(*words, "layout.tp=2", "model.n_kv_heads=2"))
    page = run_page(read_run(folder))
    rows, profiles = rows_of(page), {}
    for profile in json.loads((folder / "ledger.json").read_text())["ledgers"]:
        profiles.setdefault(profile["source"], profile["ranks"])
    assert set(profiles) == {"predicted", "measured"}
    means = {}
    for source, ranks in profiles.items():
        for cause in ranks[0]["causes"]:
            total = sum(rank["causes"].get(cause, 0.0) for rank in ranks)
            means[source, cause] = total / len(ranks)
    assert len({round(value, 9) for value in means.values()}) > 5  # one is not taken for another
    for cause in profiles["measured"][0]["causes"]:
        (row,) = [row for row in rows if row[:1] == [CAUSE_NAMES[cause]] and len(row) == 3]
        for cell, source in zip(row[1:], ("predicted", "measured"), strict=True):
            whole = sum(value for (of, _), value in means.items() if of == source)
            value = means[source, cause]
            assert cell == f"{seconds(value)} ({value / whole:.0%})", (cause, source)

    def sent(rank):
        return sum(size * times for _, _, size, times, _ in rank["traffic"])

    most = max(profiles["measured"], key=sent)
    assert len(most["traffic"]) == 3
    for kind, axis, size, times, waited in most["traffic"]:
        (row,) = [row for row in rows if row[:2] == [axis, kind]]
        assert row[3:5] == [format_bytes(size * times), f"{times:,}"]
        assert row[5] == ("–" if waited is None else seconds(waited))
    assert f"Messages of rank {most['rank']} in one step" in page.html()
