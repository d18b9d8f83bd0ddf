"""No verdict on layers claims more than its figures, and a question ends in one mark."""

import pytest

from nanolib.report.claim import Claim
from tests.report.cases import layer_case
from tests.report.rows import ended
from tests.shown import CHARTS


@pytest.mark.parametrize(
    ("between", "said"),
    [
        (60, "most of the time goes to gaps between operations 60%, gate 20%, up 15%: much lies between operations. "
             "Next: larger batches or compiling would help, more than faster kernels."),
        (40, "most of the time goes to gaps between operations 40%, gate 30%, up 22%: much lies between operations. "
             "Next: larger batches or compiling would help."),
        (20, "most of the time goes to gate 40%, up 30%, gaps between operations 20%."),
    ],
)  # fmt: skip
def test_advice_on_what_lies_between_operations_goes_no_further_than_its_share(say, between, said):
    rest = 100 - between
    operations = {"between": between, "gate": rest / 2, "up": rest * 3 / 8, "down": rest / 8}
    assert f"decode, n = 64: {said}" in say("energy", [layer_case("blocks.0", operations)])


@pytest.mark.parametrize(("others", "named"), [(5, 3), (6, 4), (7, 4)])
def test_most_of_the_time_is_more_than_half_of_it(say, others, named):
    operations = {"gate": 2.5} | dict.fromkeys(("up", "down", "qk", "av", "norm", "head", "rope")[:others], 2.0)
    (line,) = (
        line for line in say("energy", [layer_case("blocks.0", operations)]) if "most of the time goes to" in line
    )
    assert line.count("%") == named


@pytest.mark.parametrize("phase", ["decode", "training_step"])
def test_layers_of_a_training_step_are_those_of_its_forward_pass(say, phase):
    factors, (row,) = layer_case("blocks.0", {"gate": 3.0, "up": 1.0})
    text = "\n".join(say("energy", [(factors | {"phase": phase}, [row])]))
    assert ("most of its forward pass goes to gate 75%" in text) == (phase == "training_step")
    assert ("most of the time goes to gate 75%" in text) == (phase == "decode")


def test_a_model_without_numbered_blocks_has_no_depth(measured):
    factors, (row,) = layer_case("body", {"up": 1.0})
    row.details.update(activations={"mean": 0.1, "std": 1.0})
    chart = CHARTS["activation_profile"](measured("energy", [(factors, [ended(), row])])).to_dict()
    assert "the model's layers are no numbered blocks" in str(chart)


def test_a_question_ends_in_one_mark():
    assert str(Claim("It grows.", advice="how far?")) == "It grows. Next: how far?"
