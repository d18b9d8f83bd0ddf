"""Check parameters with pydantic, read params files, and make the jobs of a command line.

Each bad field is reported in one line.
"""

import re
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

import pydantic
import yaml

from nanolib.measurement import BadInput, did_you_mean, quote
from nanolib.paths import SCENARIOS, notebook_of, params_files

DEFAULT_SUITE = "quick"
Values = Mapping[str, Any]  # Name of a field → value.


class StrictModel(pydantic.BaseModel):
    """A pydantic model that refuses unknown names and NaN.

    Bad values raise `BadInput` with one line per bad value. nanolib checks the whole object at each
    assignment, and a refused assignment changes nothing.

    Attributes:
        NAME: Prefix of field names in errors. The database stores an experiment's parameters under
            this name.
        MAIN: Fields that a notebook's parameters cell declares one by one. All other fields are in
            the mapping `settings` of the parameters cell. An empty tuple means that the cell
            declares all of the fields.
    """

    NAME: ClassVar[str] = ""
    MAIN: ClassVar[tuple[str, ...]] = ()

    model_config = pydantic.ConfigDict(extra="forbid", allow_inf_nan=False, protected_namespaces=())

    def __init__(self, /, **values):
        try:
            super().__init__(**values)
        except pydantic.ValidationError as error:
            prefix, known = f"{self.NAME}." if self.NAME else "", list(type(self).model_fields)
            lines = (prefix + _complaint(problem, known) for problem in error.errors()[:20])
            raise BadInput(*lines) from None

    @pydantic.model_validator(mode="before")
    @classmethod
    def flat(cls, values: Values) -> dict[str, Any]:
        """Return the values, with those in `settings` moved to the top level.

        Args:
            values: Values of fields, and optionally of `settings`. A field has priority over a
                setting of the same name.

        Raises:
            BadInput: `settings` is not a mapping.
        """
        rest = dict(values)
        if not cls.MAIN or "settings" not in rest:
            return rest
        settings = rest.pop("settings")
        if isinstance(settings, str):  # The option -p of papermill passes text.
            settings = _load(f"settings: {quote(settings)}", settings)
        return {**_check_mapping("settings", settings), **rest}

    @classmethod
    def nest_settings(cls, values: Values) -> dict[str, Any]:
        """Return the values for a parameters cell. Fields outside `MAIN` are in `settings`."""
        if not cls.MAIN:
            return dict(values)
        settings = {name: value for name, value in values.items() if name not in cls.MAIN}
        return {name: values[name] for name in cls.MAIN if name in values} | {"settings": settings}

    @pydantic.field_validator("*", mode="before")
    @classmethod
    def _read(cls, value, info: pydantic.ValidationInfo):
        """Parse values such as `1e-3` and `[3, 4]`, which papermill and YAML 1.1 pass as text."""
        kinds = _kinds(cls.model_fields[info.field_name].annotation)
        if isinstance(value, str) and str not in kinds:
            value = _load(f"{info.field_name}: {quote(value)}", value)
        items = value if isinstance(value, list) else [value]
        if kinds & {int, float} and bool not in kinds and any(isinstance(x, bool) for x in items):
            raise ValueError(f"must be a number, got {quote(value)}")
        if list in kinds and value is not None and not isinstance(value, list | tuple | Mapping):
            value = [value]
        return value

    @classmethod
    def collect(cls, namespace: Values) -> Self:
        """Return the parameters that a notebook has declared.

        Args:
            namespace: The notebook's `globals()`.

        Raises:
            BadInput: A field is not valid, or papermill has set a name that is not a field.
        """
        names = [*cls.model_fields, *(["settings"] if cls.MAIN else [])]
        # papermill accepts unknown parameters. Its cell is among the inputs that IPython stores.
        for cell in namespace.get("In", []):
            if cell.startswith("# Parameters\n"):
                names += re.findall(r"^(?!PAPERMILL_)(\w+) = ", cell, re.MULTILINE)
        return cls(**{name: namespace[name] for name in names if name in namespace})

    def __setattr__(self, name: str, value):
        """Check the whole object with the new value, then assign the value."""
        if name not in type(self).__private_attributes__:
            value = getattr(self.replace(**{name: value}), name)
        super().__setattr__(name, value)

    def replace(self, **changes) -> Self:
        """Return a checked copy with other values for some fields."""
        return type(self)(**self.model_dump() | self.flat(changes))


def _complaint(error: Values, known: list[str]) -> str:
    """Return pydantic's message, with the field and the value if the message lacks them."""
    where = "".join(
        f"[{part}]" if isinstance(part, int) else f".{quote(part)[1:-1]}" for part in error["loc"]
    ).lstrip(".")
    if error["type"] == "extra_forbidden":
        hint = did_you_mean(error["loc"][-1], known)
        return f"{where}: unknown name; {hint and f'{hint} '}use one of {', '.join(known)}"
    if error["type"] == "missing":
        return f"{where}: is missing; give a value"
    if error["type"] == "value_error":
        text = str(error["ctx"]["error"])
        return text if not where or text.startswith(f"{where}:") else f"{where}: {text}"
    return f"{where}: {error['msg']}, got {quote(error['input'])}"


def _kinds(annotation):
    """Return the types of a field and of the items in its list. A literal type counts as text."""
    origin = typing.get_origin(annotation)
    if origin is typing.Literal:
        return {str}
    if origin is dict:
        return {dict}
    if origin is list:  # Text for a list is YAML, so nanolib must parse the text.
        return {list, *(_kinds(typing.get_args(annotation)[0]) - {str})}
    if origin in (types.UnionType, typing.Union, typing.Annotated):
        return set().union(*map(_kinds, typing.get_args(annotation)))
    return {annotation} if isinstance(annotation, type) or annotation is Any else set()


def read_value(name: str, text: str):
    """Return the value of a command line's `-p NAME=TEXT`, read as YAML.

    Args:
        name: Name of the parameter, for the error message.
        text: Text of the value. For example, `16` is a number.

    Raises:
        BadInput: The text is not valid YAML.
    """
    return _load(f"-p {name}: {quote(text)}", text)


def read_yaml(path) -> Values:
    """Return the mapping in a YAML file.

    Raises:
        BadInput: The file cannot be read, is not valid YAML, or does not contain a mapping.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise BadInput(
            f"{path}: cannot be read ({getattr(error, 'strerror', error)}); "
            "give the path of a YAML file"
        ) from None
    values = _load(str(path), text)
    return {} if values is None else _check_mapping(path, values)


def _check_mapping(what, values) -> Values:
    """Return a mapping from names to values.

    Raises:
        BadInput: The values are not such a mapping.
    """
    if isinstance(values, Mapping) and all(isinstance(name, str) for name in values):
        return values
    raise BadInput(
        f"{what}: contains {quote(values)}, not `name: value` pairs; give a value to each name"
    )


def _load(what: str, text: str):
    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise BadInput(f"{what} is not valid YAML ({' '.join(str(error).split())[:200]})") from None


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


def plan_jobs(
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
        experiment = experiments[notebook_of(file)]()
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
