"""The same jobs as Ray tasks: on this machine's own Ray, or on a cluster (`RAY_ADDRESS`, `ray up`, SLURM, Kubernetes).

Each task runs its notebook as `nano run` does, into a folder and a database of its own; these come back whole and are merged. A
task whose node is lost is run again elsewhere, and what it had is lost with the node, so that no case is there twice.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO, Any

import nanolib
from nanolib.measurement import BadInput, RunStatus
from nanolib.paths import DATABASE
from nanolib.run.sources import source_digest
from nanolib.run.suite.jobs import Job, Load, make_job
from nanolib.run.suite.runner import Ended, new_log, new_token, run_jobs
from nanolib.store import Store

RETRIES = 2  # of a task whose node or worker is lost


def run_on_ray(
    jobs: Sequence[Job], output: Path, log: Callable[[str], None] = print
) -> tuple[list[Ended], Path]:
    """Run jobs as Ray tasks, as many at once as the cluster has devices for, and bring their results into one database.

    Args:
        jobs: From `plan`; those that measure nothing run here, at the end.
        output: The output folder: executed notebooks and the database go there.
        log: Takes lines for the terminal.

    Returns:
        How each ended, and the log file.

    Raises:
        BadInput: Ray is not installed, or no node has what a job needs.
    """
    if any(job.values.get("resume") for job in jobs):
        raise BadInput(
            "--resume: a Ray task brings its results back whole or not at all, so there is nothing to continue; leave it out"
        )
    ray, token = _ray(), new_token()
    measuring = [job for job in jobs if job.cases()]
    with _connected(ray):
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        needs = [resources(job, nodes) for job in measuring]
        log_path = new_log(output, f"{token}-ray")
        cpus, gpus = (sum(node.get(kind, 0) for node in nodes) for kind in ("CPU", "GPU"))
        log(f"ray: {len(nodes)} node(s) with {cpus:g} CPUs and {gpus:g} GPUs")
        with Store(output / DATABASE) as store, log_path.open("w", encoding="utf-8") as log_file:
            ended = _measure_all(
                ray, list(zip(measuring, needs, strict=True)), token, output, store, log_file, log
            )
    if any(end.status == RunStatus.INTERRUPTED for end in ended):
        return ended, log_path
    here, _ = run_jobs([job for job in jobs if not job.cases()], output, log, token=token)
    return [*ended, *here], log_path


def _measure_all(
    ray: Any,
    jobs: Sequence[tuple[Job, Mapping[str, float]]],
    token: str,
    output: Path,
    store: Store,
    log_file: IO[str],
    log: Callable[[str], None],
) -> list[Ended]:
    """All jobs as tasks with what each needs; their results as they come."""
    task = ray.remote(_measure)
    pending = {
        task.options(name=job.title, max_retries=RETRIES, **need).remote(
            job.name, job.load, dict(job.values), job.part, token, source_digest()
        ): (job, Ended(job.title, cases=len(job.cases())))
        for job, need in jobs
    }
    ended = [end for _, end in pending.values()]
    try:
        while pending:
            (ready,), _ = ray.wait(list(pending), num_returns=1)
            job, end = pending[ready]
            _bring_back(ray, ready, job, end, output, store, log_file)
            del pending[ready]
            for line in end.interference:
                log(f"{end.name}: not a quiet machine: {line}")
            log(f"{end.name}: {end.status} in {end.seconds:.0f} s {end.message}".rstrip())
    except KeyboardInterrupt:
        for reference, (_, end) in pending.items():
            ray.cancel(reference, force=True)
            end.status, end.message = (
                RunStatus.INTERRUPTED,
                "stopped by Ctrl-C before its results came back",
            )
    return ended


def resources(job: Job, nodes: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """What of a node a job takes: a GPU for each rank, or else all CPUs of the smallest node, so that nothing runs beside it.

    Args:
        job: Which.
        nodes: What each node has.

    Raises:
        BadInput: No node has it.
    """
    device, ranks = (
        getattr(job.params, "device", "cpu"),
        max(getattr(job.params, "world_sizes", [1])),
    )
    most = max((node.get("GPU", 0) for node in nodes), default=0)
    if device.startswith("cuda") or (device == "auto" and most):
        if most < ranks:
            raise BadInput(
                f"--on ray: {job.title} needs {ranks} GPU(s) on one node, and the most that one has is {most:g}"
            )
        return {"num_gpus": ranks, "num_cpus": 1}
    cpus = [node["CPU"] for node in nodes if node.get("CPU")]
    if not cpus:
        raise BadInput(f"--on ray: {job.title} needs a node with CPUs, and the cluster has none")
    return {"num_cpus": min(cpus)}


def _ray() -> Any:
    try:
        import ray  # optional
    except ImportError:
        raise BadInput(
            '--on ray: Ray is not installed; in the checkout, run: pip install -e ".[ray]"'
        ) from None
    except KeyError:
        raise BadInput(
            "--on ray: the package amdsmi keeps Ray from being imported; run: pip uninstall amdsmi"
        ) from None
    return ray


@contextmanager
def _connected(ray: Any) -> Iterator[None]:
    """The caller's connection, or one to `RAY_ADDRESS`, a Ray that runs here, or a new one for as long as the block."""
    if ray.is_initialized():
        yield
        return
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        ray.init(log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise BadInput(
            f"--on ray: no connection: {str(error).splitlines()[0]}; check RAY_ADDRESS"
        ) from None
    try:
        yield
    finally:
        ray.shutdown()


def _bring_back(
    ray: Any, ready: Any, job: Job, end: Ended, output: Path, store: Store, log_file: IO[str]
) -> None:
    """What one task answered, into the database and the folder."""
    try:
        found, files, log = ray.get(ready)
    except ray.exceptions.RayTaskError as error:
        end.status, end.message = RunStatus.FAILED, str(error.cause or error).splitlines()[0]
        return
    except ray.exceptions.RayError as error:
        reason = str(error).strip().splitlines()[0]
        end.status, end.message = (
            RunStatus.FAILED,
            f"its node or worker was lost {RETRIES + 1} times: {reason}",
        )
        return
    vars(end).update(vars(found))
    log_file.write(log)
    with TemporaryDirectory(prefix="nanolib-ray-") as folder:
        for name, content in files.items():
            place = Path(folder) if name == DATABASE else output
            (place / name).write_bytes(content)
        store.merge(Path(folder) / DATABASE)


def _measure(
    name: str, load: Load, values: dict[str, Any], part: str, token: str, sources: str
) -> tuple[Ended, dict[str, bytes], str]:
    """On a node: run one job in a folder of its own; how it ended, its database and notebook, and its log."""
    if source_digest() != sources:
        raise BadInput(
            f"ray: a node has another nanolib ({nanolib.__version__}, other sources); install the same there"
        )
    with TemporaryDirectory(prefix="nanolib-ray-") as folder:
        (end,), log = run_jobs(
            [make_job(name, load, values, part)], Path(folder), lambda line: None, token=token
        )
        files = {
            file.name: file.read_bytes()
            for file in Path(folder).iterdir()
            if file.suffix in (".ipynb", ".sqlite")
        }
        return end, files, log.read_text(encoding="utf-8", errors="replace")
