import numpy as np
import pytest

from nanolib.stats.intervals import TooFewSamples
from nanolib.stats.scaling import link_cost


def test_a_links_costs_are_the_least_squares_of_relative_errors():
    rng = np.random.default_rng(2)
    messages, sent = np.array([1, 1, 2, 3, 1, 4]), np.array([1e2, 1e4, 1e5, 1e6, 1e7, 1e8])
    seconds = (2e-5 * messages + 1e-9 * sent) * np.exp(rng.normal(0, 0.1, 6))
    found = link_cost(messages, sent, seconds)
    design = np.stack([messages / seconds, sent / seconds], axis=1)
    alpha, beta = np.linalg.lstsq(design, np.ones(6), rcond=None)[0]
    assert (found.alpha, found.beta) == pytest.approx((alpha, beta))
    assert found.seconds(3, 7e6) == pytest.approx(3 * alpha + 7e6 * beta)
    assert found.residuals == pytest.approx(list(1 - (alpha * messages + beta * sent) / seconds))


@pytest.mark.parametrize(
    ("messages", "sent", "seconds"), [([1], [8], [1.0]), ([1, 2, 4], [8, 16, 32], [1.0, 2.0, 3.9])]
)
def test_one_size_of_message_cannot_tell_the_two_costs_apart(messages, sent, seconds):
    with pytest.raises(TooFewSamples, match="one size of message"):
        link_cost(messages, sent, seconds)
