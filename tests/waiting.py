"""How tests wait for what happens in another thread."""

import time


def until(condition, seconds=180):
    """Wait for a condition, and fail where it does not come to hold."""
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.05)
    assert condition()
