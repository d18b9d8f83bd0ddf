import numpy as np
import pytest
import statsmodels.api as sm

from nanolib.stats.intervals import TooFewSamples
from nanolib.stats.scaling import link_cost, scaling_exponent


def test_scaling_exponent_of_a_power_law_is_its_power():
    n = np.array([128, 256, 512, 1024])
    assert tuple(scaling_exponent(n, 3e-6 * n**2.0)) == pytest.approx((2, 2, 2))


def test_scaling_interval_covers_the_power():
    rng, n, hits = np.random.default_rng(0), np.array([128, 256, 512, 1024, 2048]), 0
    for _ in range(1000):
        low, _, high = scaling_exponent(n, n**1.5 * np.exp(rng.normal(0, 0.1, 5)))
        hits += low <= 1.5 <= high
    assert 0.93 <= hits / 1000 <= 0.97


@pytest.mark.parametrize("confidence", [0.8, 0.95])
def test_the_exponents_interval_is_that_of_ordinary_least_squares(confidence):
    rng = np.random.default_rng(1)
    size = np.array([3.0, 5, 5, 9, 20, 64, 64])
    value = size**1.3 * np.exp(rng.normal(0, 0.2, len(size)))
    fitted = sm.OLS(np.log(value), sm.add_constant(np.log(size))).fit()
    low, high = fitted.conf_int(1 - confidence)[1]
    assert tuple(scaling_exponent(size, value, confidence)) == pytest.approx(
        (low, fitted.params[1], high)
    )


def test_three_sizes_give_no_exponent_and_four_do():
    with pytest.raises(
        TooFewSamples, match="3 different sizes cannot give an exponent's interval; take at least 4"
    ):
        scaling_exponent([1, 2, 2, 4], [1, 2, 2, 4])
    assert scaling_exponent([1, 2, 4, 8], [1, 2.1, 4, 8]).estimate == pytest.approx(1, abs=0.05)


def test_a_link_that_keeps_to_the_model_gives_its_two_costs_back():
    messages, sent = np.array([1, 2, 4, 1, 6]), np.array([1e3, 1e4, 1e6, 1e8, 5e7])
    alpha, beta = 3e-5, 2e-9
    found = link_cost(messages, sent, alpha * messages + beta * sent)
    assert (found.alpha, found.beta) == pytest.approx((alpha, beta), rel=1e-9)
    assert found.residuals == pytest.approx([0] * 5, abs=1e-12)
    assert found.seconds(3, 7e6) == pytest.approx(3 * alpha + 7e6 * beta)


def test_a_links_costs_are_the_least_squares_of_relative_errors():
    rng = np.random.default_rng(2)
    messages, sent = np.array([1, 1, 2, 3, 1, 4]), np.array([1e2, 1e4, 1e5, 1e6, 1e7, 1e8])
    seconds = (2e-5 * messages + 1e-9 * sent) * np.exp(rng.normal(0, 0.1, 6))
    found = link_cost(messages, sent, seconds)
    design = np.stack([messages / seconds, sent / seconds], axis=1)
    alpha, beta = np.linalg.lstsq(design, np.ones(6), rcond=None)[0]
    assert (found.alpha, found.beta) == pytest.approx((alpha, beta))
    assert found.residuals == pytest.approx(list(1 - (alpha * messages + beta * sent) / seconds))


@pytest.mark.parametrize(
    ("messages", "sent", "seconds"), [([1], [8], [1.0]), ([1, 2, 4], [8, 16, 32], [1.0, 2.0, 3.9])]
)
def test_one_size_of_message_cannot_tell_the_two_costs_apart(messages, sent, seconds):
    with pytest.raises(TooFewSamples, match="one size of message"):
        link_cost(messages, sent, seconds)
