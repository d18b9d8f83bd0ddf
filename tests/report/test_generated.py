"""On databases drawn at random no claim contradicts its rows."""

import itertools
import os

import pytest
from hypothesis import HealthCheck, Phase, Verbosity, given, settings

from nanolib.report.claim import Figure
from tests.report.generated import contradictions, databases

_numbers = itertools.count()


@settings(
    max_examples=int(os.environ.get("NANOLIB_SIMULATIONS", "40")),
    deadline=None,
    phases=(Phase.generate,),
    verbosity=Verbosity.quiet,
    suppress_health_check=list(HealthCheck),
)
@given(drawn=databases())
def test_no_claim_contradicts_its_rows(tmp_path_factory, drawn):
    wrong = contradictions(*drawn, tmp_path_factory.mktemp("drawn") / f"{next(_numbers)}.sqlite")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("second", "order"),
    [
        ((3.1, 4, 5), "below"),
        ((3, 4, 5), "not told apart"),
        ((0.1, 0.2, 0.9), "above"),
        ((float("nan"),) * 3, "not told apart"),
    ],
)
def test_an_order_is_what_two_intervals_allow(second, order):
    assert Figure(1.0, 2.0, 3.0).against(Figure(*second)) == order
