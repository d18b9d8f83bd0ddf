from nanolib.measurement import Measurement
from nanolib.meters.latency import measure_phases
from nanolib.meters.sampler import Timing
from nanolib.run import sweep
from nanolib.run.memory_plan import track_memory
from nanolib.store import Store


def rows_of(experiment, params, folder):
    """The rows of a run of an experiment, whose database is in a folder."""
    with Store(folder / "results.sqlite") as store:
        run = sweep.measure(experiment, params, store=store)
        run.finish()
        return run.measurements(samples=True)


def timed_alone(measuring):
    """The rows of a case, each timing taken as soon as it is asked for."""
    answer = None
    while True:
        try:
            made = measuring.send(answer)
        except StopIteration:
            return
        answer = measure_phases(made) if isinstance(made, Timing) else None
        if isinstance(made, Measurement):
            yield made


def breakdown(work):
    """What is alive at the peak of one call, by kind and module."""
    work.first()
    return max(track_memory(work).breakdowns().values(), key=lambda section: section.peak)
