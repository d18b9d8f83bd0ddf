"""Make a command line's jobs, each a notebook with checked parameters, and execute a notebook."""

import os
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nanolib.measurement import BadInput, did_you_mean, one_line, quote
from nanolib.params import StrictModel, Values, read_yaml
from nanolib.paths import checkout
from nanolib.run.process import Died

DEFAULT_SUITE, SCENARIOS = "quick", "scenarios"


@dataclass(frozen=True)
class Job:
    """One notebook to run.

    Attributes:
        experiment: Module of the notebook's experiment.
        values: Parameters to inject into the notebook. Their types are not checked.
        params: All parameters of the notebook, with checked types.
    """

    experiment: Any
    values: Values
    params: StrictModel

    @property
    def name(self) -> str:
        """The name of the notebook and of its experiment."""
        return self.params.NAME

    @property
    def title(self) -> str:
        """The file name of the executed notebook: the name of the scenario or of the notebook."""
        suite = self.params.suite
        return suite if suite.startswith(f"{self.name}-") else self.name

    def cases(self) -> list[Any]:
        """Return the cases of the notebook. The summary has no cases, as it only reads results."""
        return self.experiment.cases(self.params) if hasattr(self.experiment, "cases") else []


def params_files() -> dict[str, dict[str, Path]]:
    """Map each folder of `params/` to the params files of its notebooks, by name.

    The file of the summary is last, because the summary reads all results.
    """
    found = {}
    notebooks = {file.stem for file in (checkout() / "notebooks").glob("*.ipynb")}
    files = (checkout() / "params").glob("[!.]*/*.yml")
    for file in sorted(files, key=lambda file: (file.stem == "summary", file)):
        if _notebook_of(file) in notebooks:
            found.setdefault(file.parent.name, {})[file.stem] = file
    return found


def _notebook_of(file: Path) -> str:
    """Return the notebook of a params file. The name of a scenario begins with its notebook."""
    return file.stem.partition("-")[0]


def plan(
    experiments: Mapping[str, Callable[[], Any]],
    targets: Sequence[str],
    overrides: Values,
    scheduling: Values,
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
    jobs = []
    given = {name: value for name, value in scheduling.items() if value}
    for file in _params_files(targets, overrides):
        suite = file.stem if file.parent.name == SCENARIOS else file.parent.name
        experiment = experiments[_notebook_of(file)]()
        flat = experiment.Params.flat
        values = flat(read_yaml(file)) | {"suite": suite} | flat(overrides) | given
        jobs.append(Job(experiment, values, experiment.Params(**values)))
    return jobs


def _params_files(targets: Sequence[str], overrides: Values) -> list[Path]:
    """Find the params files of a command line."""
    folders = params_files()
    suite, *names = targets if targets and targets[0] in folders else (DEFAULT_SUITE, *targets)
    of_suite, scenarios = folders.get(suite, {}), folders.get(SCENARIOS, {})
    known = scenarios | of_suite
    for name in names:
        if name not in known:
            hint = did_you_mean(name, set(known | folders) - {name})
            raise BadInput(
                f"run: {quote(name)} is neither a notebook of {suite} ({', '.join(of_suite)}) nor "
                f"a scenario ({', '.join(scenarios)}); {hint and f'{hint} '}name one suite "
                f"({', '.join(folders)}) first, or none"
            )
    if overrides and not names and len(of_suite) > 1:
        raise BadInput(f"-p: parameters belong to one notebook; name one of {', '.join(of_suite)}")
    return [file for name, file in known.items() if name in (names or of_suite)]


def execute(
    send: Callable[[Any], None],
    paths: Sequence[Path],
    parameters: Values,
    variables: Mapping[str, str],
) -> None:
    """Execute a notebook with papermill, for `call_in_process`.

    Args:
        send: Function that this function does not call.
        paths: The notebook, and the file of the executed notebook.
        parameters: Parameters to inject into the notebook.
        variables: Environment variables of the kernel.

    Raises:
        Died: A cell raised an exception, or the kernel ended.
    """
    os.environ |= variables
    import papermill

    try:
        papermill.execute_notebook(*paths, parameters, progress_bar=False)
    except Exception as error:
        traceback.print_exc()
        # The text of papermill's own exception contains the traceback of the cell.
        name, text = getattr(error, "ename", type(error).__name__), getattr(error, "evalue", error)
        raise Died(f"{name}: {one_line(text)}") from None
