"""Record what a run depends on: the code, the machine, and the interference of other processes."""

import functools
import hashlib
import json
import os
from dataclasses import replace
from pathlib import Path

import nanolib
from nanolib.measurement import METRICS, Flag, Provenance, RunStatus
from nanolib.meters.interference import CpuLoad, find_interference, interference_flags
from nanolib.meters.machine import this_machine, versions
from nanolib.models.user import code_digest
from nanolib.paths import LAUNCH_VARIABLE, revision_of
from nanolib.run.params import Params
from nanolib.run.process import say
from nanolib.run.timeout import Outcome
from nanolib.store import Run, Store
from nanolib.store.connection import alive, process_name


@functools.cache  # Later edits of the files do not change the code of this process.
def source_digest() -> str:
    """Return a hash of nanolib's source files. Every edit of the code changes the hash."""
    return code_digest("nanolib:measure")


def git_revision() -> str:
    """Return the git revision of nanolib's checkout, or an empty string without a checkout."""
    root = Path(nanolib.__file__).parent.parent
    # A wheel may be installed inside another repository, whose revision is not nanolib's.
    return revision_of(root) if (root / ".git").exists() else ""


def new_run(params: Params, device: str, cases: int) -> Run:
    """Make the record of a run that begins now, and print the interference on the machine.

    Args:
        params: Parameters of the run.
        device: Device of the run.
        cases: Number of cases.
    """
    machine, interference = this_machine(), find_interference(device)
    for line in interference:
        say(f"not a quiet machine: {line}")
    made_by = versions() | {"nanolib": nanolib.__version__, "sources": source_digest()}
    if own_code := code_digest(params.defining()):
        made_by["own code"] = own_code
    identity = [params.NAME, params.defining(), made_by, machine.machine_id, device]
    return Run(
        experiment=params.NAME,
        machine=machine.to_dict(),
        params=params.model_dump(mode="json"),
        suite=params.suite,
        label=params.label,
        device=device,
        versions=made_by,
        git_revision=git_revision(),
        fingerprint=hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16],
        cases=cases,
        process=process_name(),
        launch=os.environ.get(LAUNCH_VARIABLE, ""),
        interference=interference,
    )


def take_over(store: Store, run: Run) -> str:
    """Find the last run with the same parameters, version and machine, and mark it as running.

    The function skips runs with another label, and runs of other living processes.

    Args:
        store: Database of the runs.
        run: Record of the new run, from `new_run`.

    Returns:
        `run_id` of the run to continue, or an empty string.
    """
    alike = store.runs("fingerprint = ? AND label = ?", (run.fingerprint, run.label))
    for before in alike[::-1].itertuples():
        is_ours = before.process == run.process
        if before.status == RunStatus.RUNNING and not is_ours and alive(before.process):
            continue
        store.update_run(
            before.run_id,
            status=RunStatus.RUNNING,
            message="",
            process=run.process,
            launch=run.launch or before.launch,
            interference=run.interference,
        )
        return before.run_id
    return ""


def flag_interference(outcome: Outcome, load: CpuLoad) -> None:
    """Add flags to a case and its timed rows, from the load of the CPUs during the case.

    A timing that recorded its own load keeps its own flags. Other rows of the same scope get the
    flags of the timing.

    Args:
        outcome: Outcome of the case. The function changes the rows, details and flags.
        load: Load of the CPUs during the case.
    """
    flags = interference_flags(load.details())
    own = {
        row.scope: tuple(flag for flag in row.flags if flag in (Flag.BUSY_MACHINE, Flag.THROTTLED))
        for row in outcome.rows
        if row.details.get("others_share") is not None
        or row.details.get("clean_rounds") is not None
    }
    for index, row in enumerate(outcome.rows):
        is_timed = METRICS[row.metric].is_timed and row.estimate is not None
        if is_timed and row.provenance != Provenance.REPLAYED:
            both = (*row.flags, *own.get(row.scope, flags))
            outcome.rows[index] = replace(row, flags=tuple(dict.fromkeys(both)))
    outcome.details, outcome.flags = outcome.details | load.details(), flags
