"""Labels of layouts: written, read again, refused."""

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.errors import ConfigError
from meshwright.layout import Layout
from test_layout import LAYOUTS


def test_label():
    two = dict.fromkeys(("dp_replicate", "dp_shard", "zero", "tp", "cp", "pp"), 2)
    layout = Layout(**two, sp=True, microbatch=4, recompute="full")
    assert layout.label == "dp2 shard2 zero2 tp2 sp cp2-ring pp2 1f1b mb4 recompute-full"
    assert Layout().label == "mb1"
    assert Layout.parse("") == Layout()
    assert Layout(tp=2, etp=2) == Layout(tp=2)
    assert Layout(etp=1) == Layout.parse("mb1 etp1") == Layout()
    assert Layout.parse("tp2  cp2 dp3") == Layout(dp_replicate=3, cp=2, tp=2)


@given(LAYOUTS)
def test_parse_is_the_inverse_of_label(layout):
    assert Layout.parse(layout.label) == layout
    assert Layout.parse(" ".join(reversed(layout.label.split()))) == layout


REFUSED_LABELS = {
    "dp2 zero4": "unknown word zero4 in the layout 'dp2 zero4'; nearest legal: zero3 or zero2",
    "pp2 1f1": "unknown word 1f1 in the layout 'pp2 1f1'; nearest legal: 1f1b",
    "tp0": "unknown word tp0 in the layout 'tp0'; nearest legal: tp2",
    "tp2 tp4": "the layout 'tp2 tp4' gives layout.tp twice",
    "gpipe 1f1b": "the layout 'gpipe 1f1b' gives layout.schedule twice",
    "cp2-rings": "unknown word cp2-rings in the layout 'cp2-rings'; nearest legal: cp2-ring",
}


@pytest.mark.parametrize("label", REFUSED_LABELS)
def test_refused_labels(label):
    with pytest.raises(ConfigError) as caught:
        Layout.parse(label)
    assert str(caught.value).startswith(REFUSED_LABELS[label])


@given(st.text("dpshardtpcv0123456789-_ bfzero", max_size=20))
def test_any_label_gives_a_layout_or_a_refusal(label):
    with contextlib.suppress(ConfigError):
        assert Layout.parse(label).world >= 1
