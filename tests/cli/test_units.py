"""Bytes and ratios as they are printed."""

import pytest

from meshwright.report.steps import _about
from meshwright.units import GIB, MIB, format_bytes, format_ratio


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1.5 * MIB, "1.50 MiB"),
        (1023 * GIB, "1023.00 GiB"),
        (1024 * GIB, "1.00 TiB"),
        (4034.56 * GIB, "3.94 TiB"),
        (-2048 * GIB, "-2.00 TiB"),
    ],
)
def test_bytes_have_the_largest_unit_that_fits(count, text):
    assert format_bytes(count) == text


@pytest.mark.parametrize(
    ("ratio", "text"),
    [
        (1.0, "1"),
        (2.513, "2.51"),
        (12.34, "12.3"),
        (99.96, "100"),
        (1104, "1,100"),
        (2e6, "2,000,000"),
    ],
)
def test_a_ratio_is_no_power_of_ten(ratio, text):
    assert format_ratio(ratio) == text


def test_a_far_limit_is_told_in_words():
    """It was `1.1e+03 times the highest peak`."""
    assert _about(1100 * GIB, GIB).endswith(
        "1.07 TiB, is 1,100 times the highest peak, and not drawn."
    )
