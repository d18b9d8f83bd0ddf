import pytest

from nanolib.measurement import Flag, Measurement, exact
from nanolib.numbers import format_number


def test_a_row_prints_its_unit_interval_method_and_labels():
    row = Measurement(
        "latency",
        1.5,
        1.25,
        2.0,
        0.95,
        20,
        method="perf_counter",
        scope="forward",
        flags=(Flag.GOT_SLOWER,),
    )
    start = "latency forward: 1.50 ms [1.25 … 2.00] (n=20, perf_counter); later calls were slower"
    assert str(row).startswith(start)
    row = exact("flops", 42)
    assert str(row) == "flops: 42 FLOP (n=1, formula)"
    assert (row.low, row.estimate, row.high, row.confidence) == (42, 42, 42, 1.0)


@pytest.mark.parametrize(
    ("numbers", "text"),
    [
        ([1234567], "1,234,567"),
        ([10.123456, 10.1, 10.2], "10.12"),
        ([10.123456, 10.12345, 10.12346], "10.1235"),
        ([3.2e-7], "3.200e-07"),
        ([0], "0"),
        ([float("nan")], "nan"),
    ],
)
def test_numbers_show_as_many_digits_as_their_interval_supports(numbers, text):
    assert format_number(*numbers) == text
