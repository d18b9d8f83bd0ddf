"""Tables and examples of statisticians."""

import itertools
from types import SimpleNamespace

import numpy as np
import pytest

from nanolib.meters import power
from nanolib.meters.integration import count, integrate
from nanolib.stats.intervals import fences, hodges_lehmann, median_interval

# Source: critical values of Wilcoxon's signed-rank statistic, two-sided at 5 % (Wilcoxon 1945;
# Conover 1999, table A12).
CRITICAL = {6: 0, 7: 2, 8: 3, 9: 5, 10: 8, 11: 10, 12: 13, 13: 17, 14: 21, 15: 25, 20: 52, 25: 89}


@pytest.mark.parametrize("n", CRITICAL)
def test_the_signed_ranks_interval_ends_at_the_tables_critical_value(n):
    x = np.cumsum(np.arange(1.0, n + 1) ** 1.5)
    walsh = sorted((a + b) / 2 for a, b in itertools.combinations_with_replacement(x, 2))
    interval = hodges_lehmann(x)
    assert interval.low == pytest.approx(walsh[CRITICAL[n]])
    assert interval.high == pytest.approx(walsh[-1 - CRITICAL[n]])


# Source: Hettmansperger & Sheather (1986): between order statistics whose binomial levels enclose
# 95 %; for n = 6 these are the extremes (96.9 %) and their neighbors (78.1 %), for n = 10 the
# second and third of each side (97.9 %, 89.1 %).
@pytest.mark.parametrize(("n", "outer"), [(6, 1), (9, 2), (10, 2), (15, 4), (20, 6), (25, 8)])
def test_the_medians_interval_lies_between_the_order_statistics_that_enclose_it(n, outer):
    low, estimate, high = median_interval(np.arange(1.0, n + 1))
    assert outer <= low < outer + 1 and n - outer < high <= n + 1 - outer
    assert estimate == (n + 1) / 2


# Source: Tukey (1977): 1.5 and 3 interquartile ranges beyond the quartiles; quartiles as in Hyndman
# & Fan (1996), type 7.
def test_fences_of_the_numbers_from_1_to_9():
    assert [fences(range(1, 10), reach) for reach in (1.5, 3.0)] == [(-3.0, 13.0), (-9.0, 19.0)]


# Source: Linux, Documentation/power/powercap: a counter restarts at 0 beyond max_energy_range_uj.
@pytest.mark.parametrize("wrap_uj", [262_143_328_850, 65_532_610_987])  # of server and desktop CPUs
def test_a_counter_that_wraps_has_counted_on(wrap_uj, tmp_path, monkeypatch):
    now = itertools.count()
    monkeypatch.setattr(power, "time", SimpleNamespace(monotonic=lambda: next(now)))
    (tmp_path / "max_energy_range_uj").write_text(str(wrap_uj))
    zone, joules = power._Zone(tmp_path), []
    for uj in (wrap_uj - 10**8, wrap_uj - 5 * 10**7, 0, 5 * 10**7, 10**8):
        (tmp_path / "energy_uj").write_text(str(uj))
        joules.append(zone.joules())
    found = count([0, 1, 2, 3, 4], joules, 1.0, 3.0)
    assert found.estimate == pytest.approx(100.0) and found.low <= 100.0 <= found.high


# Source: work of a constant power, and of one that rises evenly: P · t and P · t / 2; 1 kWh =
# 3.6 MJ (SI brochure).
@pytest.mark.parametrize(("first", "last", "joules"), [(1000, 1000, 3.6e6), (0, 1000, 1.8e6)])
def test_an_hour_of_power_is_its_energy(first, last, joules):
    t = np.linspace(0, 3600, 361)
    assert integrate(t, np.linspace(first, last, 361), 0, 3600).estimate == pytest.approx(joules)
