"""Numbers in tables keep their zeros, and never turn into exponents."""

import pytest

from twell._numbers import digits, time_left


@pytest.mark.parametrize(
    ("value", "written"),
    [
        (0.0, "0.00"),
        (0.0001234, "0.000123"),
        (0.7996, "0.800"),
        (5.1, "5.10"),
        (9.996, "10.0"),
        (24, "24.0"),
        (99.96, "100"),
        (201.4, "201"),
        (999.6, "1,000"),
        (12_345.6, "12,346"),
        (-5.1, "-5.10"),
    ],
)
def test_three_digits(value, written):
    assert digits(value) == written


def test_as_many_digits_as_asked_for():
    assert [digits(136.0, 4), digits(1421.2, 4), digits(0.09663, 4)] == ["136.0", "1,421", "0.09663"]


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(0, "a few seconds left"), (14, "about 10 s left"), (86, "about 90 s left"), (90, "about 2 min left")],
)
def test_time_left_is_no_more_exact_than_an_estimate(seconds, said):
    assert time_left(seconds) == said
