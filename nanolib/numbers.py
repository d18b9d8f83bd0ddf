"""Format numbers with as many digits as their interval supports."""

import math

MIB = 2**20  # bytes


def format_number(value: float, low: float | None = None, high: float | None = None) -> str:
    """Format a number with 3 to 6 significant digits, as many as its interval supports.

    An exact whole number below 10¹⁵ keeps all digits. Any other exact number has 4 digits.

    Args:
        value: Number to format.
        low: Lower end of the interval, or None for an exact number.
        high: Upper end of the interval, or None for an exact number.
    """
    if not math.isfinite(value):
        return str(value)
    if float(value).is_integer() and (low is None or low == high):
        return f"{int(value):,}" if abs(value) < 1e15 else f"{value:.4g}"
    digits = 4
    if low is not None and high is not None and high > low and value:
        digits = min(6, max(3, 1 + math.ceil(math.log10(abs(value) / (high - low)))))
    if 1e-3 <= abs(value) < 1e6:
        decimals = max(0, digits - 1 - math.floor(math.log10(abs(value))))
        return f"{value:,.{decimals}f}"
    return f"{value:.{digits - 1}e}" if value else "0"


def format_with_interval(value: float, low: float | None, high: float | None) -> str:
    """Format a number with its interval, such as `12.3 [12.1 … 12.5]`.

    A number has no brackets if it is exact, or if an end of the interval is None or NaN.
    """
    if low is None or high is None or not low < high:  # A comparison with NaN is false.
        return format_number(value)
    ends = " … ".join(format_number(end, low, high) for end in (low, high))
    return f"{format_number(value, low, high)} [{ends}]"
