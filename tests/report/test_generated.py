"""On databases drawn at random no claim contradicts its rows; 1,000 of them stand in the benchmarks."""

import itertools

from hypothesis import HealthCheck, Phase, Verbosity, given, settings

from tests.report.generated import contradictions, databases

_numbers = itertools.count()


@settings(
    max_examples=40,
    deadline=None,
    phases=(Phase.generate,),
    verbosity=Verbosity.quiet,
    suppress_health_check=list(HealthCheck),
)
@given(drawn=databases())
def test_no_claim_contradicts_its_rows(tmp_path_factory, drawn):
    wrong = contradictions(*drawn, tmp_path_factory.mktemp("drawn") / f"{next(_numbers)}.sqlite")
    assert not wrong, "\n".join(wrong)
