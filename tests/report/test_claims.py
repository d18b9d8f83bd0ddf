"""No verdict on layers claims more than its figures, and a question ends in one mark."""

import pytest

from tests.report.cases import layer_case


@pytest.mark.parametrize(
    ("between", "said"),
    [
        (60, "most of the time goes to gaps between operations 60%, gate 20%, up 15%: much lies between operations. "
             "Next: larger batches or compiling would help, more than faster kernels."),

        (20, "most of the time goes to gate 40%, up 30%, gaps between operations 20%."),
    ],
)  # fmt: skip
def test_advice_on_what_lies_between_operations_goes_no_further_than_its_share(say, between, said):
    rest = 100 - between
    operations = {"between": between, "gate": rest / 2, "up": rest * 3 / 8, "down": rest / 8}
    assert f"decode, n = 64: {said}" in say("energy", [layer_case("blocks.0", operations)])
