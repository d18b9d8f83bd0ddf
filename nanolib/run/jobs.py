"""Make the jobs of a command line: the notebooks to run, each with checked parameters."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nanolib.measurement import BadInput, did_you_mean, shown
from nanolib.params import StrictModel, read_yaml
from nanolib.paths import checkout

DEFAULT_SUITE, SCENARIOS = "quick", "scenarios"

Load = Callable[[], Any]
Experiments = Mapping[str, Load]


@dataclass(frozen=True)
class Job:
    """One notebook to run.

    Attributes:
        name: Name of the notebook and of its experiment.
        load: Function that returns the module of the experiment.
        values: Parameters to inject into the notebook. Their types are not checked.
        params: All parameters of the notebook, with checked types.
    """

    name: str
    load: Load
    values: Mapping[str, Any]
    params: StrictModel

    @property
    def title(self) -> str:
        """The file name of the executed notebook: the name of the scenario or of the notebook."""
        suite = str(self.values.get("suite", ""))
        return suite if suite in scenarios() else self.name

    def cases(self) -> list[Any]:
        """Return the cases of the notebook. The summary has no cases, as it only reads results."""
        experiment = self.load()
        return experiment.cases(self.params) if hasattr(experiment, "cases") else []


def suites() -> list[str]:
    """List the names of the suites."""
    folders = [file.parent.name for file in (checkout() / "params").glob("*/*.yml")]
    return sorted({name for name in folders if name != SCENARIOS and not name.startswith(".")})


def scenarios() -> list[str]:
    """List the names of the scenarios. Each name begins with the name of its notebook."""
    return sorted(file.stem for file in (checkout() / "params" / SCENARIOS).glob("*.yml"))


def notebooks() -> list[str]:
    """List the notebooks that have a params file. The summary is last, since it reads all results."""
    params = {file.stem for file in (checkout() / "params").glob("*/*.yml")}
    names = (file.stem for file in (checkout() / "notebooks").glob("*.ipynb"))
    return sorted(params.intersection(names), key=lambda name: (name == "summary", name))


def plan(
    experiments: Experiments,
    targets: Sequence[str],
    overrides: Mapping[str, Any],
    scheduling: Mapping[str, Any],
) -> list[Job]:
    """Make the jobs of a command line, and check all parameters before anything runs.

    Args:
        experiments: Name of a notebook → function that loads its experiment.
        targets: Names of scenarios, or of a suite and its notebooks. The default suite is `quick`.
            By default, nanolib runs all notebooks of the suite.
        overrides: Parameters that replace the values in the params files.
        scheduling: Values of `label` and `resume`.

    Raises:
        BadInput: A suite, notebook or parameter is unknown, or a value is not valid.
    """
    jobs, complaints = [], []
    given = {name: value for name, value in scheduling.items() if value}
    for file in _params_files(targets, overrides):
        suite = file.stem if file.parent.name == SCENARIOS else file.parent.name
        name = file.stem.partition("-")[0]
        flat = experiments[name]().Params.flat
        try:
            values = flat(read_yaml(file)) | {"suite": suite} | flat(overrides) | given
            jobs.append(make_job(name, experiments[name], values))
        except BadInput as error:
            complaints += error.lines
    if complaints:
        raise BadInput(*complaints)
    return jobs


def _params_files(targets: Sequence[str], overrides: Mapping[str, Any]) -> list[Path]:
    """Find the params files of a command line."""
    targets = list(dict.fromkeys(targets))
    folder = checkout() / "params"
    if targets and set(targets) <= set(scenarios()):
        return [folder / SCENARIOS / f"{name}.yml" for name in targets]
    suite, *names = targets if targets and targets[0] in suites() else (DEFAULT_SUITE, *targets)
    files = {name: folder / suite / f"{name}.yml" for name in notebooks()}
    available = [name for name, file in files.items() if file.is_file()]
    for name in names:
        if name in suites():
            raise BadInput(
                f"run: {shown(name)} is a second suite; name one suite, as the first name"
            )
        if name not in available:
            hint = did_you_mean(name, [*suites(), *available, *scenarios()])
            raise BadInput(
                f"run: {shown(name)} is neither a suite ({', '.join(suites())}) nor a notebook of "
                f"{suite} ({', '.join(available)}) nor a scenario ({', '.join(scenarios())})"
                f"{hint and f'; {hint}'}"
            )
    if overrides and not names and len(available) > 1:
        raise BadInput(f"-p: parameters belong to one notebook; name one of {', '.join(available)}")
    return [files[name] for name in available if not names or name in names]


def make_job(name: str, load: Load, values: Mapping[str, Any]) -> Job:
    """Make the job of a notebook.

    Raises:
        BadInput: A parameter is not valid.
    """
    params = load().Params
    return Job(name, load, params.flat(values), params(**values))


def import_user_code(jobs: Sequence[Job]) -> None:
    """Import the user's models and functions that jobs name, before the first notebook starts.

    Raises:
        BadInput: A model or function cannot be imported.
    """
    named = {getattr(job.params, "model", "") or job.name: job.params for job in jobs}
    for params in named.values():
        if hasattr(params, "look"):
            params.look([])


def read_job(
    experiments: Experiments,
    a: Path,
    b: Path,
    names: Sequence[str],
    overrides: Mapping[str, Any],
) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """Read the two params files that `nano ab` compares.

    Args:
        experiments: Name of a notebook → function that loads its experiment.
        a: Params file of version A.
        b: Params file of version B.
        names: Names of notebooks from the command line. By default, the name of a params file is
            the name of its notebook.
        overrides: Parameters that replace the values in both files.

    Returns:
        Name of the notebook, parameters of A, and parameters of B.

    Raises:
        BadInput: A file cannot be read, or the notebook is unknown.
    """
    known = [name for name in notebooks() if name != "summary"]
    named = {name for name in names or (a.stem, b.stem) if name in known}
    if len(named) != 1:
        raise BadInput(
            f"params: {a} and {b} do not name the same notebook; add one of {', '.join(known)}"
        )
    name = named.pop()
    flat = experiments[name]().Params.flat
    return name, *(flat(read_yaml(file)) | flat(overrides) for file in (a, b))
