"""What a curve of single steps says of warm-up, on curves whose answer is known."""

import numpy as np
import pytest

from nanolib.experiments.warmup.cases import _count_warmup

N = 40
STEP = np.arange(N)
FLAT, FALLING = np.ones(N), 2 - STEP / N
FIRST = np.where(STEP == 0, 20.0, 1.0)
PLATEAU = np.where(STEP == 0, 5.0, np.where(STEP < 8, 1.32, 1.0))


def _rows(shape, noise, draws=40):
    rng = np.random.default_rng(0)
    curves = (10 * shape * (1 + noise * rng.normal(size=N)) for _ in range(draws))
    return [_count_warmup([*curve], "forward") for curve in curves]


@pytest.mark.parametrize(
    ("shape", "noises", "right"),
    [
        pytest.param(FLAT, [0.01], {0}, id="immediate"),
        pytest.param(FLAT, [0.2], {0, None}, id="noise alone"),
        pytest.param(FIRST, [0.01], {1}, id="one cold step"),
        pytest.param(1 + np.exp(-STEP / 3), [0.01], {*range(8, 14)}, id="slow decay"),
        pytest.param(PLATEAU, [0.01], {8, 9, 10}, id="a plateau of 132 % for eight steps"),
        # the cold first step does not hide the seven slow ones behind it
        pytest.param(PLATEAU, [0.05, 0.1, 0.2], {None, *range(6, N)}, id="a noisy plateau"),
        pytest.param(FALLING, [0.01, 0.03, 0.1], {None}, id="it keeps falling"),
    ],
)
def test_a_curve_says_how_many_steps_are_enough_or_gives_no_answer(shape, noises, right):
    for noise in noises:
        answers = [row.estimate for row in _rows(shape, noise)]
        assert np.mean([answer in right for answer in answers]) >= 0.95, noise


@pytest.mark.parametrize(
    ("shape", "noise", "why"),
    [
        (FALLING, 0.0, "does not settle"),
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
