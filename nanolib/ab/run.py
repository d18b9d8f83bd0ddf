"""Compare two versions of the code from start to end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from nanolib.ab.pairs import Settings
from nanolib.ab.result import AbResult, lines_of
from nanolib.ab.schedule import Log, compare_versions
from nanolib.ab.spec import Spec
from nanolib.ab.worktree import checked_out
from nanolib.compare.findings import Comparison
from nanolib.measurement import BadInput
from nanolib.run.lock import device_lock


def run_ab(
    spec: Spec,
    settings: Settings,
    log: Log = lambda _: None,
    agree: Callable[[float], None] = lambda _: None,
) -> AbResult:
    """Compare two versions. Their worktrees and processes are removed when this returns or raises.

    Args:
        spec: What to compare.
        settings: How to compare it.
        log: Receives one line at a time about the progress.
        agree: Receives the longest time that this may take, s, before anything is timed. It raises to stop.

    Raises:
        BadInput: Revisions that do not exist, cannot be imported or have nothing in common, or a working tree that was
            edited during the run.
    """
    with checked_out(spec.names, spec.start) as found:
        versions = spec.with_interpreters(found)
        before = [version.written() for version in versions]
        tasks, lines = spec.tasks(versions, settings.timeout_s)
        share_s = min(settings.budget_s, settings.total_s / len(tasks))
        settings = replace(settings, budget_s=share_s)
        a, b = spec.titles_of(versions)
        seconds = len(tasks) * share_s
        number = f"{len(tasks)} case{'s' if len(tasks) > 1 else ''}"
        log(f"A is {a}, B is {b}; {number}, at most {duration(seconds)}")
        agree(seconds)
        with device_lock(tasks[0].device, f"ab {spec.names[0]} {spec.names[1]}", log):
            results = compare_versions(versions, tasks, settings, log)
        if before != [version.written() for version in versions]:
            raise BadInput(
                "revision: files of the working tree were edited during the measurement; run it again"
            )
    for result in results:
        lines += lines_of(result, spec.metric, settings)
    comparison = Comparison.of(lines, True, settings.threshold, differ=spec.differences)
    return AbResult(comparison, (versions[0], versions[1]), tuple(results))


def duration(seconds: float) -> str:
    """Return seconds as people say them.

    Example:
        >>> duration(50), duration(600)
        ('50 s', '10 min')
    """
    return f"{seconds / 60:.0f} min" if seconds >= 90 else f"{seconds:.0f} s"
