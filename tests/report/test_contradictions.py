"""Whatever numbers the rows of the quick suite have, no finding contradicts them."""

import math
import re

import numpy as np
import pytest

from nanolib.measurement import METRICS, Flag
from nanolib.report.finding import Order
from nanolib.store import Store
from tests.features import results
from tests.shown import CLAIMS, SECTIONS

# What a sentence says of two estimates, the first compared with each of the others.
_BELOW, _ABOVE, _ALIKE = Order.BELOW, Order.ABOVE, Order.NO_DIFFERENCE
_SAYS = (
    (r" is the fastest", {_ABOVE}),
    (r"(?i)^no clear difference between (?!sparse|\d+ ranks)", {_ALIKE}),
    (r"as fast as one rank", {_BELOW, _ABOVE}),
    (r"costs loss|communication that computing does not hide(?!, not)", {_ABOVE}),
    (r"lowers the loss|^FP8 is slower", {_BELOW}),
    (r"^(?!profiling costs).*not distinguishable from zero", {_BELOW, _ALIKE}),
    # the first of its modes
    (r"^profiling costs: \w+, not distinguishable from zero", {_ALIKE}),
    (r"^profiling costs: \w+ [-\d]", {_ABOVE, _BELOW}),
)
_ORDERING = re.compile(r"fastest|faster|slower")


def _wrong(finding, rows):
    """What the rows contradict in a finding."""
    known = {
        (row.metric, *map(_number, (row.low, row.estimate, row.high))) for row in rows.itertuples()
    }
    for figure in (*(one for pair in finding.compared for one in pair[::2]), *finding.figures):
        ends = map(_number, (figure.low, figure.estimate, figure.high))
        if figure.metric and (figure.metric, *ends) not in known:
            yield f"no row holds {figure}"
    for first, order, second in finding.compared:
        is_apart = first.high < second.low, first.low > second.high
        lies = {(True, False): _BELOW, (False, True): _ABOVE}.get(is_apart, _ALIKE)
        if lies != order:
            yield f"{first} is {lies} {second}, and not {order}"
    # a sentence on the loss before and after a fine-tune has an estimate for each
    clauses = finding.text.split(", and after a fine-tune it ")
    if 1 < len(clauses) != len(finding.compared):
        yield f"{len(finding.compared)} estimates for {len(clauses)} clauses"
    for at, clause in enumerate(clauses):
        lies = {order for _, order, _ in finding.compared[at : at + 1]}
        for pattern, allowed in _SAYS:
            if re.search(pattern, clause) and not lies <= allowed:
                yield f"its estimates are {sorted(lies)}"
    if _ORDERING.search(finding.text) and not finding.compared:
        yield "it orders without estimates"
    orders = [order for _, order, _ in finding.compared]
    number = r"[\d,]+\d"
    listed = re.search(
        rf"^Sparse attention is faster than .* at ({number}(?:(?:, | and ){number})*) tokens",
        finding.text,
    )
    if listed and orders.count(_ABOVE) < len(re.split(r", | and ", listed[1])):
        yield f"it is faster at {orders.count(_ABOVE)} of these lengths"
    if finding.text.startswith("Dense attention is faster") and _BELOW not in orders:
        yield "no dense kernel is faster"


def _number(value):
    return None if value is None or math.isnan(value) else float(value)


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    with Store(results(tmp_path_factory.mktemp("stored")), create=False) as store:
        return store.shown(store.resolve("all"))[0]


def _shuffled(rows, seed):
    """The rows with other times and ratios: few values, so that ends touch, and now and then without an end or settled state."""
    rng = np.random.default_rng(seed)
    rows = rows.copy()
    timed = np.flatnonzero([METRICS[metric].is_timed for metric in rows["metric"]])
    ends = np.sort(rng.integers(1, 24, (len(timed), 3)) / 12, axis=1)
    ends[rng.random(len(timed)) < 0.1] *= [math.nan, 1, math.nan]
    for name, values in zip(("low", "estimate", "high"), ends.T, strict=True):
        rows.iloc[timed, rows.columns.get_loc(name)] = values
    unsteady = rng.random(len(rows)) < 0.1
    flags = zip(rows["flags"], unsteady, strict=True)
    return rows.assign(flags=[[*own, Flag.NO_STEADY_STATE] if one else own for own, one in flags])


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section.experiment)
def test_no_finding_contradicts_its_rows(section, stored):
    for seed in range(12):
        rows = _shuffled(stored, seed)
        findings = CLAIMS[section.experiment](rows)
        wrong = [f"{one}: {what}" for one in findings for what in _wrong(one, rows)]
        assert not wrong, "\n".join(wrong)
