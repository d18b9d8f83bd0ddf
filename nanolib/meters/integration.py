"""Compute the energy of a time window from readings, with bounds, and replay recorded readings."""

import math
import time
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from nanolib.measurement import BadInput, Provenance, one_line, quote
from nanolib.meters.power import Reading
from nanolib.paths import expand_home
from nanolib.stats.intervals import Interval

# A gap is longer than 2.5 times the median time between samples.
_GAP = 2.5
MOST_W = 10_000.0  # No device draws more than 10 kW.


def integrate(t_s: ArrayLike, power_w: ArrayLike, start_s: float, end_s: float) -> Interval:
    """Compute the energy between two moments from samples of power.

    nanolib interpolates linearly between samples. Two samples at the same moment are a step of the
    power. A failed reading is a gap, and an unusually long time between two samples is a gap too.
    In a gap, the bounds use the smallest and the largest of all samples.

    Args:
        t_s: Moments of the samples in order, s, shape [n].
        power_w: Power at each moment, W, shape [n], or NaN for a failed reading.
        start_s: Start of the window, s.
        end_s: End of the window, s.

    Returns:
        Energy, J. The bounds include the change of power between the samples around each end of the
        window.

    Example:
        >>> integrate([0.0, 1.0, 2.0], [10.0, 10.0, 10.0], 0.0, 2.0).estimate
        20.0

    Raises:
        BadInput: There are fewer than two samples, moments are out of order, or the window is empty
            or reaches beyond the samples.
    """
    t, p, read = _valid_readings(t_s, power_w, start_s, end_s)
    # A failed reading makes a gap between the readings around it.
    failed = np.logical_or.reduceat(~read, np.flatnonzero(read))[:-1]
    length, left, right = np.diff(t), p[:-1], p[1:]
    first, last = np.clip(start_s, t[:-1], t[1:]), np.clip(end_s, t[:-1], t[1:])
    share = np.where(length > 0, length, 1.0)
    at_first = left + (right - left) * (first - t[:-1]) / share
    at_last = left + (right - left) * (last - t[:-1]) / share
    energy = (at_first + at_last) / 2 * (last - first)
    usual = np.median(length[length > 0])
    gaps = failed | (length > _GAP * usual)
    edges = (t[:-1] < start_s) & (start_s < t[1:]) | (t[:-1] < end_s) & (end_s < t[1:])
    unsure = float((np.abs(right - left) * length)[edges & ~gaps].sum())
    known, gap_s = energy[~gaps].sum(), (last - first)[gaps].sum()
    low, high = known + gap_s * p.min() - unsure, known + gap_s * p.max() + unsure
    # The power is never outside the range of all samples.
    window_s = end_s - start_s
    low, high = max(low, p.min() * window_s), min(high, p.max() * window_s)
    return Interval(float(low), float(energy.sum()), float(high))


def count(
    t_s: ArrayLike,
    joules: ArrayLike,
    start_s: float,
    end_s: float,
    lag_s: float = 0.0,
) -> Interval:
    """Compute the energy between two moments from a counter.

    The lower bound is the energy between the first and the last reading inside the window. The
    upper bound is the energy between the readings just outside the window.

    Args:
        t_s: Moments of the readings in order, s, shape [n].
        joules: Value of the counter at each moment, J, shape [n], or NaN for a failed reading.
        start_s: Start of the window, s.
        end_s: End of the window, s.
        lag_s: Largest age of a reading, s.

    Returns:
        Energy, J. The counter's smallest step widens the bounds.

    Raises:
        BadInput: The readings are not valid for `integrate`, the last reading is less than `lag_s`
            after the window, or the counter was reset.
    """
    t, counted, _ = _valid_readings(t_s, joules, start_s, end_s, lag_s)
    before, last_inside = np.searchsorted(t, [start_s, end_s], side="right") - 1
    # A value is at most `lag_s` old, so a reading `lag_s` after an edge shows a later value.
    first_inside, after = np.searchsorted(t, [start_s + lag_s, end_s + lag_s])
    steps = np.diff(counted)
    length = np.diff(t) + lag_s
    jumps = (steps < 0) | (steps > MOST_W * length) & (length > 0)
    if jumps[before:after].any():
        jump = before + jumps[before:after].argmax()
        raise BadInput(
            f"joules: the counter jumped from {counted[jump]:g} to {counted[jump + 1]:g} J, so the "
            "energy is not known; measure the window again"
        )
    unsure = min(steps[steps > 0], default=0.0)
    low = max(0.0, counted[last_inside] - counted[first_inside] - unsure)
    energy = np.interp(end_s, t, counted) - np.interp(start_s, t, counted)
    high = counted[after] - counted[before] + unsure
    return Interval(float(low), float(energy), float(high))


def longest_standstill(t_s: np.ndarray, joules: np.ndarray) -> float:
    """Return the longest time without a change of a counter, s. Ignore NaN.

    Args:
        t_s: Moments of the readings in order, s, shape [n].
        joules: Value of the counter at each moment, J, shape [n].
    """
    read = ~np.isnan(joules)
    t, counted = t_s[read], joules[read]
    changes = np.flatnonzero(np.diff(counted)) + 1
    first, last = np.r_[0, changes], np.r_[changes, len(t)] - 1
    # A short window may contain no reading.
    return float((t[last] - t[first]).max()) if len(t) else 0.0


def _valid_readings(
    t_s: ArrayLike, values: ArrayLike, start_s: float, end_s: float, lag_s: float = 0.0
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the moments and values of readings that did not fail, and which readings these are."""
    t, x = np.asarray(t_s, dtype=float), np.asarray(values, dtype=float)
    if t.shape != x.shape:
        raise BadInput(f"t_s: has {t.size} moments for {x.size} values; give one for each value")
    read = ~np.isnan(x)
    known = x[read]
    if len(known) < 2:
        raise BadInput(f"power_w: {len(known)} sample(s) are not NaN; give at least two samples")
    if not ((known >= 0) & (known < math.inf)).all():
        raise BadInput("power_w: a sample is infinite or below 0; give finite values from 0")
    if not (np.diff(t) >= 0).all():
        raise BadInput("t_s: a moment is NaN or out of order; sort the samples by time")
    if not start_s < end_s:
        raise BadInput(
            f"end_s: {end_s} is not after start_s {start_s}; give an end after the start"
        )
    t = t[read]
    if start_s < t[0] or end_s + lag_s > t[-1]:
        raise BadInput(
            f"start_s, end_s: {start_s} to {end_s} reaches beyond the samples, {t[0]} to {t[-1]}; "
            "take samples before and after the window"
        )
    return t, known, read


class ReplaySource:
    """Replay a recorded power trace, from the moment at which you create the source.

    Args:
        t_s: Rising moments since the start of the trace, s, shape [n], n >= 2.
        watts: Power at each moment, W, shape [n].
    """

    name, of, provenance = "replay", "trace", Provenance.REPLAYED

    def __init__(self, t_s: Sequence[float], watts: Sequence[float]):
        self._t, self._watts = np.asarray(t_s, float), np.asarray(watts, float)
        self._start = time.monotonic()
        self.period_s = float(np.median(np.diff(self._t)))

    def read(self) -> Reading:
        """Return the trace's latest sample, or NaN after the end of the trace."""
        now = time.monotonic()
        elapsed_s = now - self._start
        if not self._t[0] <= elapsed_s <= self._t[-1]:
            return Reading(now)
        latest = np.searchsorted(self._t, elapsed_s, side="right") - 1
        return Reading(now, watts=float(self._watts[latest]))


def read_trace(file: str) -> tuple[list[float], list[float]]:
    """Read a recorded power trace, a CSV file with the columns `t_s` and `power_w`.

    Returns:
        Times since the first sample, s, and the power at each time, W.

    Raises:
        BadInput: The file cannot be read, lacks a column, has fewer than two samples, or has a time
            or a power that is not valid.
    """
    import pandas as pd  # Importing pandas is slow, and only this function needs pandas.

    path = expand_home(file)
    name, columns = quote(path.name), ["t_s", "power_w"]
    try:
        table = pd.read_csv(path, encoding="utf-8-sig", usecols=columns, dtype=float)
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or one_line(error)
        raise BadInput(
            f"power_trace: {name} cannot be read ({why}); give a CSV file with the columns t_s and "
            "power_w"
        ) from None
    t_s, watts = table[columns].to_numpy().T
    rises = (np.diff(t_s, prepend=-math.inf, append=math.inf) > 0).all()
    if len(table) < 2 or not rises or not ((watts >= 0) & (watts < math.inf)).all():
        raise BadInput(
            f"power_trace: {name} is not a recording; give at least 2 lines with rising times (s) "
            "and powers from 0 (W)"
        )
    return (t_s - t_s[0]).tolist(), watts.tolist()
