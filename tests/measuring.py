from nanolib.meters.time.latency import measure_alone
from nanolib.meters.time.sampler import Timing
from nanolib.run.memory_plan import followed


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


def breakdown(work, model):
    """What is alive at the peak of one call, by kind and module."""
    work.first()
    return max(followed(work, model).breakdowns().values(), key=lambda held: held.peak)
