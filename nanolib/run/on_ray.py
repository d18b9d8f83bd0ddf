"""Run jobs as Ray tasks, on a local Ray instance or on the cluster in `RAY_ADDRESS`.

Each task runs its notebook as `nano run` does, with a new folder and a new database. The task
returns its files, and nanolib merges the database into yours. If a node is lost, Ray runs its task
again on another node. The results on the lost node are lost too, so no case is stored twice.

`tests/benchmarks/ray_nodes.py` tests the loss of a node in a cluster of three nodes on one machine.
After Ctrl-C, Ray ends the tasks together with this process. Neither Ctrl-C nor a cluster of several
machines was tested.
"""

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from nanolib.measurement import BadInput, RunStatus, cause, one_line
from nanolib.params import Job
from nanolib.paths import DATABASE
from nanolib.run.notebooks import Command, NotebookResult, run_jobs
from nanolib.store import Store


def run_on_ray(
    jobs: Sequence[Job], command: Command, log: Callable[[str], None]
) -> list[NotebookResult]:
    """Run jobs as Ray tasks, in parallel as far as the cluster has devices.

    Args:
        jobs: Jobs to run. A job without cases runs on this machine, after all tasks.
        command: Command of the jobs. Its output folder receives the results.
        log: Function that prints a line on the terminal.

    Returns:
        The result of each job. Jobs without cases are last.

    Raises:
        BadInput: Ray is not installed or cannot be reached, no node has the devices of a job, or a
            job has the parameter `resume`.
    """
    if any(job.values.get("resume") for job in jobs):
        raise BadInput(
            "--resume: a Ray task returns all of its results or none, so no run can be "
            "continued; leave --resume out"
        )
    measuring = [job for job in jobs if job.cases()]
    results = [NotebookResult(job.title, len(job.cases())) for job in measuring]
    ray = _connect()
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    needs = [resources(job, nodes) for job in measuring]
    task, pending = ray.remote(_measure), {}
    for job, result, need in zip(measuring, results, needs, strict=True):
        options = task.options(name=job.title, max_retries=2, **need)
        pending[options.remote(job, command.token)] = result
    while pending:
        (ready,), _ = ray.wait(list(pending), num_returns=1)
        result = pending.pop(ready)
        _bring_back(ray, ready, result, command)
        log(str(result))
    return [*results, *run_jobs([job for job in jobs if not job.cases()], command, log)]


def resources(job: Job, nodes: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the resources of a job: a GPU per rank, or as many CPUs as the smallest node has.

    If all nodes have the same size, no other job uses the devices of a job. A larger node may run
    several jobs at once, and their rows then have the flag `busy_machine`.

    Args:
        job: Job to run.
        nodes: Resources of each node: name → amount.

    Raises:
        BadInput: No node has the resources of the job.
    """
    device = getattr(job.params, "device", "cpu")
    ranks = max(getattr(job.params, "world_sizes", [1]))
    gpus = max((node.get("GPU", 0) for node in nodes), default=0)
    if device.startswith("cuda") or (device == "auto" and gpus):
        if gpus < ranks:
            raise BadInput(
                f"--on ray: {job.title} needs {ranks} GPU(s) on one node, "
                f"and the largest node has {gpus:g}; add a larger node"
            )
        return {"num_gpus": ranks, "num_cpus": 1}
    return {"num_cpus": min(node["CPU"] for node in nodes if node.get("CPU"))}


def _connect():
    """Connect to Ray at `RAY_ADDRESS` or to a running local Ray, or start a local Ray."""
    try:
        import ray  # An optional dependency.
    except (ImportError, KeyError) as error:  # The package amdsmi makes Ray raise a KeyError.
        raise BadInput(
            f"--on ray: Ray cannot be imported ({cause(error)}); in the checkout, run: "
            'pip install -e ".[ray]", and uninstall amdsmi'
        ) from None
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        ray.init(log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise BadInput(
            f"--on ray: nanolib cannot connect to Ray ({one_line(error)}); check RAY_ADDRESS"
        ) from None
    return ray


def _bring_back(ray, ready, result: NotebookResult, command: Command):
    """Merge a task's database into the command's database, and copy the task's other files."""
    try:
        found, files = ray.get(ready)
    except ray.exceptions.RayError as error:
        result.status = RunStatus.FAILED
        result.message = one_line(getattr(error, "cause", None) or error)
        return
    vars(result).update(vars(found))
    with TemporaryDirectory(prefix="nanolib-ray-") as folder:
        places = {".ipynb": command.output, ".sqlite": Path(folder)}
        for name, content in files.items():
            (places.get(Path(name).suffix, command.logs) / name).write_bytes(content)
        with Store(command.output / DATABASE) as store:
            store.merge(Path(folder) / DATABASE)


def _measure(job: Job, token: str) -> tuple[NotebookResult, dict[str, bytes]]:
    """Run one job on a node in a temporary folder, and return the job's result and files."""
    with TemporaryDirectory(prefix="nanolib-ray-") as folder:
        command = Command(Path(folder), token)
        (result,) = run_jobs([job], command, lambda line: None)
        files = [Path(folder, DATABASE), *Path(folder).glob("*.ipynb"), *command.logs.iterdir()]
        return result, {file.name: file.read_bytes() for file in files}
