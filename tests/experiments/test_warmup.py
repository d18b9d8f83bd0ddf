"""What a curve of single steps says of warm-up, on curves whose answer is known."""

import numpy as np
import pytest

from nanolib.experiments.warmup.cases import _count_warmup

N, DRAWS = 40, 40
STEP = np.arange(N)
FIRST = np.where(STEP == 0, 20.0, 1.0)
PLATEAU = np.where(STEP == 0, 5.0, np.where(STEP < 8, 1.32, 1.0))
CLEAR = {
    "immediate": (np.ones(N), 0, 0),
    "one cold step": (FIRST, 1, 1),
    "slow decay": (1 + np.exp(-STEP / 3), 8, 13),
    "a plateau of 132 % for eight steps": (PLATEAU, 8, 10),
}


def _rows(shape, noise, draws=DRAWS):
    rng = np.random.default_rng(0)
    curves = (10 * shape * (1 + noise * rng.normal(size=N)) for _ in range(draws))
    return [_count_warmup([*curve], "forward") for curve in curves]


def _answers(shape, noise):
    return [row.estimate for row in _rows(shape, noise)]


@pytest.mark.parametrize(("shape", "least", "most"), CLEAR.values(), ids=CLEAR)
def test_a_quiet_curve_says_how_many_steps_are_enough(shape, least, most):
    answers = _answers(shape, 0.01)
    assert np.mean([answer is not None and least <= answer <= most for answer in answers]) >= 0.95


@pytest.mark.parametrize("noise", [0.05, 0.1, 0.2])
def test_a_slow_plateau_is_never_passed_over_however_noisy_the_curve(noise):
    """The cold first step does not hide the seven slow ones behind it: they are counted, or there is no clear answer."""
    wrong = [answer for answer in _answers(PLATEAU, noise) if answer is not None and answer < 6]
    assert len(wrong) <= 0.05 * DRAWS


@pytest.mark.parametrize("noise", [0.01, 0.2])
def test_noise_alone_is_never_called_warm_up(noise):
    answers = _answers(np.ones(N), noise)
    assert np.mean([answer in (0, None) for answer in answers]) >= 0.95
    assert noise > 0.03 or np.mean([answer == 0 for answer in answers]) >= 0.95


@pytest.mark.parametrize("noise", [0.01, 0.03, 0.1])
def test_a_curve_that_keeps_falling_gives_no_answer(noise):
    assert np.mean([answer is None for answer in _answers(2 - STEP / N, noise)]) >= 0.95


@pytest.mark.parametrize(
    ("shape", "noise", "why"),
    [
        (2 - STEP / N, 0.0, "does not settle"),
        (np.where((STEP >= 13) & (STEP < 17), 1.5, 1.0), 0.0, "rises again at step 14"),
        (
            np.where((STEP < 4) | (STEP // 4 == 8), 1.15, 1.0),
            0.04,
            "from step 1 on, the steps still",
        ),
    ],
)
def test_why_there_is_no_answer_is_told(shape, noise, why):
    (row,) = _rows(shape, noise, draws=1)
    assert row.estimate is None and why in row.message and row.details["steady_median"] is None
