from nanolib.meters.time.latency import measure_alone
from nanolib.meters.time.turns import Timing


def timed_alone(measuring):
    """The rows of a case, each timing taken as soon as it is asked for."""
    answer = None
    while True:
        try:
            made = measuring.send(answer)
        except StopIteration:
            return
        answer = measure_alone(made) if isinstance(made, Timing) else None
        if answer is None:
            yield made
