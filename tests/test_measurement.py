import pytest

from nanolib.measurement import (
    METRICS,
    BadInput,
    Direction,
    Flag,
    Measurement,
    exact,
)
from nanolib.numbers import format_number


def test_every_metric_has_a_unit_a_direction_and_a_title():
    for name, metric in METRICS.items():
        assert (
            metric.name == name and metric.unit and metric.title and metric.direction in Direction
        )


def test_an_undeclared_metric_is_refused():
    with pytest.raises(BadInput, match="'speed' is not declared"):
        Measurement("speed", 1.0)


def test_a_row_prints_its_unit_interval_method_and_labels():
    how = {"method": "perf_counter", "scope": "forward", "flags": (Flag.GOT_SLOWER,)}
    text = str(Measurement("latency", 1.5, 1.25, 2.0, 0.95, 20, **how))
    start = "latency forward: 1.50 ms [1.25 … 2.00] (n=20, perf_counter); it got slower"
    assert text.startswith(start)
    assert str(exact("flops", 42)) == "flops: 42 FLOP (n=1, formula)"


def test_an_exact_row_has_itself_as_interval():
    row = exact("flops", 42, scope="forward")
    assert (row.low, row.estimate, row.high, row.confidence) == (42, 42, 42, 1.0)


@pytest.mark.parametrize(
    ("value", "low", "high", "text"),
    [
        (1234567, None, None, "1,234,567"),
        (0.5, None, None, "0.5000"),
        (10.123456, 10.1, 10.2, "10.12"),
        (10.123456, 10.12345, 10.12346, "10.1235"),
        (3.2e-7, None, None, "3.200e-07"),
        (0, None, None, "0"),
        (float("nan"), None, None, "nan"),
    ],
)
def test_numbers_show_as_many_digits_as_their_interval_supports(value, low, high, text):
    assert format_number(value, low, high) == text
