"""What a suite consists of: a notebook and its checked parameters per job."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from nanolib.measurement import BadInput, did_you_mean, shown
from nanolib.params import StrictModel, read_yaml
from nanolib.paths import checkout
from nanolib.run.sweep import part_of

DEFAULT_SUITE, SCENARIOS = "quick", "scenarios"

Load = Callable[[], Any]
Experiments = Mapping[str, Load]


@dataclass(frozen=True)
class Job:
    """One notebook to run.

    Attributes:
        name: Of the notebook and of its experiment.
        load: Gives the experiment's module.
        notebook: Its path.
        values: The parameters to inject, as given.
        params: The same, checked and complete.
        part: `2/4` for the second of four runs that share its cases; empty for all of them.
    """

    name: str
    load: Load
    notebook: Path
    values: Mapping[str, Any]
    params: StrictModel
    part: str = ""

    @property
    def title(self) -> str:
        """Name, or scenario, and part, as its executed notebook is called."""
        suite = str(self.values.get("suite", ""))
        name = suite if suite in scenarios() else self.name
        return name + (f"-{self.part.replace('/', '-of-')}" if self.part else "")

    @property
    def given(self) -> dict[str, Any]:
        """The parameters to inject as they were read: `[1, 2]` of a command line is a list."""
        read = self.params.model_dump(mode="json")
        return {name: read[name] for name in self.values}

    def cases(self) -> list[Any]:
        """Its cases; the summary has none."""
        experiment = self.load()
        return (
            part_of(experiment.cases(self.params), self.part)
            if hasattr(experiment, "cases")
            else []
        )


def suites() -> list[str]:
    """The names of the params sets."""
    return sorted(
        folder.name
        for folder in (checkout() / "params").iterdir()
        if folder.is_dir() and folder.name != SCENARIOS
    )


def scenarios() -> list[str]:
    """Ready questions: names of params files that begin with their notebook's, as `distributed-million-tokens` does."""
    return sorted(file.stem for file in (checkout() / "params" / SCENARIOS).glob("*.yml"))


def notebooks() -> list[str]:
    """The names of the notebooks, the summary last, since it reads what the others write."""
    names = sorted(file.stem for file in (checkout() / "notebooks").glob("*.ipynb"))
    return sorted(names, key=lambda name: name == "summary")


def plan(
    experiments: Experiments,
    targets: Sequence[str],
    overrides: Mapping[str, Any],
    scheduling: Mapping[str, Any],
) -> list[Job]:
    """The jobs that a command line asks for, all parameters checked before anything runs.

    Args:
        experiments: Notebook → what loads its experiment.
        targets: A suite and then notebooks, or notebooks alone (of the suite `quick`); a suite alone means all of its notebooks.
            Or scenarios.
        overrides: Parameters that replace those of the params files.
        scheduling: `label` and `resume`.

    Raises:
        BadInput: An unknown suite, notebook or parameter, or a value that does not fit.
    """
    if twice := [name for name, times in Counter(targets).items() if times > 1]:
        raise BadInput(f"run: {shown(twice[0])} is named twice; name it once")
    if targets and set(targets) <= set(scenarios()):
        files = [
            (name.split("-")[0], name, checkout() / "params" / SCENARIOS / f"{name}.yml")
            for name in targets
        ]
        return _jobs(experiments, files, overrides, scheduling)
    suite, names = (
        (targets[0], list(targets[1:]))
        if targets and targets[0] in suites()
        else (DEFAULT_SUITE, list(targets))
    )
    folder = checkout() / "params" / suite
    available = [name for name in notebooks() if (folder / f"{name}.yml").is_file()]
    for name in names:
        if name not in available:
            hint = did_you_mean(name, [*suites(), *available, *scenarios()])
            raise BadInput(
                f"run: {shown(name)} is neither a suite ({', '.join(suites())}) nor a notebook of {suite} ({', '.join(available)}) "
                f"nor a scenario ({', '.join(scenarios())}){hint and f'; {hint}'}"
            )
    chosen = [name for name in available if name in names] or available
    if overrides and len(chosen) > 1 and not names:
        raise BadInput(f"-p: parameters belong to one notebook; name one of {', '.join(available)}")
    files = [(name, suite, folder / f"{name}.yml") for name in chosen]
    return _jobs(experiments, files, overrides, scheduling)


def make_job(name: str, load: Load, values: Mapping[str, Any], part: str = "") -> Job:
    """A notebook with its parameters.

    Raises:
        BadInput: They do not fit.
    """
    params = load().Params(**values)
    return Job(name, load, checkout() / "notebooks" / f"{name}.ipynb", values, params, part)


def in_parts(jobs: Sequence[Job], parts: int) -> list[Job]:
    """Each job as so many, which share its cases; none without a case of its own."""
    if parts == 1:
        return list(jobs)
    shared = [
        replace(job, part=f"{number}/{parts}") for job in jobs for number in range(1, parts + 1)
    ]
    shared = [job for job in shared if job.cases()]
    names = {job.name for job in shared}
    return [*shared, *(job for job in jobs if job.name not in names)]


def look_for_models(jobs: Sequence[Job]) -> None:
    """Import the models that are code of the user's once, each in a process of its own; this is the beginning of a run.

    Raises:
        BadInput: One is not there.
    """
    named = {getattr(job.params, "model", "") or job.name: job.params for job in jobs}
    for params in named.values():
        params.look([])


def _jobs(
    experiments: Experiments,
    files: Sequence[tuple[str, str, Path]],
    overrides: Mapping[str, Any],
    scheduling: Mapping[str, Any],
) -> list[Job]:
    """A job for each notebook, suite and params file."""
    complaints: list[str] = []
    jobs = []
    for name, suite, file in files:
        given = {key: value for key, value in scheduling.items() if value}
        values = read_yaml(file) | {"suite": suite} | dict(overrides) | given
        try:
            jobs.append(make_job(name, experiments[name], values))
        except BadInput as error:
            complaints += error.lines
    if complaints:
        raise BadInput(*complaints)
    return jobs


def read_job(
    a: Path, b: Path, names: Sequence[str], overrides: Mapping[str, Any]
) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """Two params files of one notebook.

    Args:
        a: The file for A.
        b: The file for B.
        names: The notebook, if the files' names do not tell it.
        overrides: Parameters that replace those of both files.

    Returns:
        The notebook's name, and the parameters of A and of B.

    Raises:
        BadInput: Files that cannot be read, or no telling which notebook they are for.
    """
    known = notebooks()
    named = [name for name in names or (a.stem, b.stem) if name in known]
    if len(set(named)) != 1:
        raise BadInput(
            f"params: whose are {a} and {b}? name the notebook after them, one of {', '.join(known)}"
        )
    values = [read_yaml(file) | dict(overrides) for file in (a, b)]
    return named[0], values[0], values[1]
