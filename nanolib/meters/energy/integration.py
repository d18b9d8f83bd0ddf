"""Energy over a window of time, from samples of power or from a counter, with its error bounds."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from nanolib.measurement import BadInput
from nanolib.stats.intervals import Interval

_GAP = 2.5  # samples further apart than this many times the usual are a gap
MOST_W = 10_000.0  # no processor, memory or GPU draws more: a counter that jumps further was reset


def integrate(t_s: ArrayLike, power_w: ArrayLike, start_s: float, end_s: float) -> Interval:
    """Energy between two moments, from samples of power.

    Straight lines between samples; of two samples at one moment the first ends what was before and the second begins what comes,
    so a step is exact. A NaN, or samples much further apart than usual, is a gap: within it the power may be anything that was
    seen.

    Args:
        t_s: Moments in order, s, shape [n].
        power_w: Power at each, W, shape [n]; NaN where it could not be read.
        start_s: Beginning of the window.
        end_s: Its end.

    Returns:
        Joules. Each edge adds what the power changes by between the samples around it, over the time between them.

    Example:
        >>> integrate([0.0, 1.0, 2.0], [10.0, 10.0, 10.0], 0.0, 2.0).estimate
        20.0

    Raises:
        BadInput: Fewer than two samples, moments out of order, or a window that is empty or reaches beyond the samples.
    """
    t, p = _checked(t_s, power_w, start_s, end_s)
    read = ~np.isnan(p)
    # a failed read makes a gap between its neighbors that could be read
    failed = np.logical_or.reduceat(~read, np.flatnonzero(read))[:-1]
    t, p = t[read], p[read]
    _check_reach(t, start_s, end_s)
    length, left, right = np.diff(t), p[:-1], p[1:]
    first, last = np.clip(start_s, t[:-1], t[1:]), np.clip(end_s, t[:-1], t[1:])
    share = np.where(length > 0, length, 1.0)
    at_first = left + (right - left) * (first - t[:-1]) / share
    at_last = left + (right - left) * (last - t[:-1]) / share
    energy = (at_first + at_last) / 2 * (last - first)
    usual = np.median(length[length > 0])
    gaps = (failed | (length > _GAP * usual)) & (last > first)
    edges = (t[:-1] < start_s) & (start_s < t[1:]) | (t[:-1] < end_s) & (end_s < t[1:])
    unsure = float((np.abs(right - left) * length)[edges & ~gaps].sum())
    inside = (last - first)[gaps]
    low = energy[~gaps].sum() + inside.sum() * p.min() - unsure
    high = energy[~gaps].sum() + inside.sum() * p.max() + unsure
    return Interval(float(low), float(energy.sum()), float(high))


def count(
    t_s: ArrayLike,
    joules: ArrayLike,
    start_s: float,
    end_s: float,
    lag_s: float = 0.0,
) -> Interval:
    """Energy between two moments, from a counter.

    The least is what was counted between readings inside the window, the most between those just outside it.

    Args:
        t_s: Moments in order, s, shape [n].
        joules: The counter at each, J, shape [n]; NaN where it could not be read.
        start_s: Beginning of the window.
        end_s: Its end.
        lag_s: How long its state may be old when it is read.

    Returns:
        Joules. Both ends are wider by the counter's smallest step, and by what a counter that was reset has lost, which counts as
        if the steps around it had gone on.

    Raises:
        BadInput: As for `integrate`; the samples must reach beyond the window by the lag.
    """
    t, counted = _checked(t_s, joules, start_s, end_s)
    read = ~np.isnan(counted)
    t, counted = t[read], counted[read]
    _check_reach(t, start_s, end_s + lag_s)
    steps = counter_steps(t, counted, lag_s)
    length = np.diff(t)
    reset = np.isnan(steps)
    good = ~reset & (length > 0)
    rates = steps[good] / length[good] if good.any() else np.zeros(1)
    steps = np.where(reset, np.median(rates) * length, steps)
    total = np.concatenate([[0.0], np.cumsum(steps)])
    energy = float(np.interp(end_s, t, total) - np.interp(start_s, t, total))
    before, last_inside = np.searchsorted(t, [start_s, end_s], side="right") - 1
    first_inside, after = np.searchsorted(
        t, [start_s + lag_s, end_s + lag_s]
    )  # such a state is no older than the edge
    unsure = float((length * rates.max())[before:after][reset[before:after]].sum())
    unsure += float(min(steps[steps > 0], default=0.0))
    low = max(0.0, float(total[last_inside] - total[first_inside]) - unsure)
    return Interval(low, energy, float(total[after] - total[before]) + unsure)


def counter_steps(t_s: np.ndarray, joules: np.ndarray, lag_s: float = 0.0) -> np.ndarray:
    """What a counter counted from each reading to the next.

    Args:
        t_s: Moments in order, s, shape [n].
        joules: The counter at each, J, shape [n]; NaN where it could not be read.
        lag_s: How long its state may be old when it is read.

    Returns:
        Joules, shape [n − 1]; NaN where the counter was reset: it went backwards, or further than any power could take it.
    """
    steps = np.diff(joules)
    most = MOST_W * (np.diff(t_s) + lag_s)
    return np.where((steps >= 0) & (steps <= most), steps, np.nan)


def longest_standstill(t_s: np.ndarray, joules: np.ndarray) -> float:
    """For how long a counter said the same at the most, s; readings that failed (NaN) are left out."""
    read = ~np.isnan(joules)
    t, counted = t_s[read], joules[read]
    changes = np.flatnonzero(np.diff(counted)) + 1
    first, last = np.r_[0, changes], np.r_[changes, len(t)] - 1
    return float((t[last] - t[first]).max(initial=0.0))


def _checked(
    t_s: ArrayLike, values: ArrayLike, start_s: float, end_s: float
) -> tuple[np.ndarray, np.ndarray]:
    t, x = np.asarray(t_s, dtype=float), np.asarray(values, dtype=float)
    if t.shape != x.shape or t.ndim != 1:
        raise BadInput(
            f"t_s: shape {list(t.shape)} beside {list(x.shape)}; give one moment per sample"
        )
    read = np.flatnonzero(~np.isnan(x))
    if len(read) < 2:
        raise BadInput(f"power_w: {len(read)} samples could be read; at least two are needed")
    if (np.diff(t) < 0).any():
        raise BadInput("t_s: its moments go backwards; give them in order")
    if not start_s < end_s:
        raise BadInput(
            f"end_s: {end_s} is not after start_s {start_s}; give a window with some length"
        )
    return t[read[0] :], x[read[0] :]


def _check_reach(t: np.ndarray, start_s: float, end_s: float) -> None:
    if start_s < t[0] or end_s > t[-1]:
        raise BadInput(
            f"start_s, end_s: {start_s} to {end_s} reaches beyond the samples, {t[0]} to {t[-1]}; "
            "sample before and after the window"
        )
