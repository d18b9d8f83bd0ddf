"""What makes a run's numbers: the code, the machine, and what else the machine did during the run."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import subprocess
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import nanolib
from nanolib.measurement import METRICS, Flag, Provenance, RunStatus
from nanolib.meters.interference import CpuLoad, find_interference
from nanolib.meters.machine import this_machine, versions
from nanolib.meters.time.turns import ROUNDS
from nanolib.paths import LAUNCH_VARIABLE
from nanolib.run.lock import say
from nanolib.run.params import Params
from nanolib.run.timeout import Outcome
from nanolib.store import Run, Store
from nanolib.store.identity import alive, process_name
from nanolib.store.schema import DURING

_OTHERS = "other processes, or a hypervisor, took up to {:.0%} of the CPUs"
_NOT_TIMED_NOW = (Provenance.MODELLED, Provenance.REPLAYED)


@functools.cache
def source_digest() -> str:
    """A hash of nanolib's own sources: edited code is another version, whatever git says."""
    root = Path(nanolib.__file__).parent
    digest = hashlib.sha256()
    for file in sorted(root.rglob("*.py")):
        digest.update(str(file.relative_to(root)).encode() + file.read_bytes())
    return digest.hexdigest()[:12]


@functools.cache
def git_revision() -> str:
    """The revision of nanolib's checkout, with `+` if files differ from it; empty outside one."""
    root = Path(nanolib.__file__).parent.parent
    if not (root / ".git").exists():
        return ""
    command = ["git", "-C", str(root), "describe", "--always", "--dirty=+", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10)
    except (OSError, subprocess.SubprocessError):  # no git, or no commit yet: see `source_digest`
        return ""
    return done.stdout.strip()


def new_run(name: str, params: Params, device: str, cases: int) -> Run:
    """Describe a run that begins now, and say what makes the machine less than quiet.

    Args:
        name: Its experiment.
        params: Its parameters.
        device: Where it runs.
        cases: How many cases it has.
    """
    machine, interference = this_machine(), find_interference(device)
    for line in interference:
        say(f"not a quiet machine: {line}")
    made_by = versions() | {"nanolib": nanolib.__version__, "sources": source_digest()}
    identity = [name, params.defining(), made_by, machine.machine_id, device]
    return Run(
        experiment=name,
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
    """Continue the last run with the same parameters, version and machine.

    Returns:
        Its id; empty if there is none, or another process is at it.
    """
    for before in store.runs("fingerprint = ?", (run.fingerprint,))[::-1].itertuples():
        is_ours = before.process == run.process
        if before.status == RunStatus.RUNNING and not is_ours and alive(before.process):
            continue
        store.update_run(
            before.run_id,
            status=RunStatus.RUNNING,
            process=run.process,
            launch=run.launch or before.launch,
            label=run.label or before.label,
            interference=list(dict.fromkeys([*before.interference, *run.interference])),
        )
        return before.run_id
    return ""


def interference_lines(loads: Sequence[CpuLoad], cases: int) -> list[str]:
    """Describe the interference during the cases so far.

    Args:
        loads: Of the CPUs during each case.
        cases: How many the run has to measure.
    """
    shares: defaultdict[str, list[float]] = defaultdict(list)  # finding → what others took, by case
    for load in loads:
        if load.is_busy:
            shares[_OTHERS].append(load.taken)
        if load.limited_by:
            shares[f"{load.limited_by} held this process back"].append(0.0)
    return [
        f"{DURING}{len(taken)} of {cases} cases {text.format(max(taken))}"
        for text, taken in shares.items()
    ]


def flag_interference(outcome: Outcome, load: CpuLoad) -> None:
    """Flag a case, and its timed rows, by the load of the CPUs during it.

    Rows that watched their own time keep their own flags, and a row that is computed from a timing
    has that timing's.
    """
    own = {
        row.scope: tuple(flag for flag in row.flags if flag in (Flag.BUSY_MACHINE, Flag.THROTTLED))
        for row in outcome.rows
        if row.details.get("others_share") is not None or row.method == ROUNDS
    }
    for at, row in enumerate(outcome.rows):
        is_timed = METRICS[row.metric].is_timed and row.estimate is not None
        if is_timed and row.provenance not in _NOT_TIMED_NOW:
            flags = (*row.flags, *own.get(row.scope, load.flags))
            outcome.rows[at] = replace(row, flags=tuple(dict.fromkeys(flags)))
    outcome.details, outcome.flags = outcome.details | load.details(), load.flags
