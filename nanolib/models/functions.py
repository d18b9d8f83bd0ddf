"""Import a user's function by its name, `package.module:function`."""

import contextlib
import hashlib
import importlib.util
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

from nanolib.measurement import BadInput, cause, shown

# The name of a function within JSON. The group is the first part of the name of its module.
_NAME = re.compile(r'"([^\W\d]\w*)(?:\.\w+)*:[^\W\d]\w*"')


def check_function(field: str, name: str, other: str = "") -> None:
    """Check the form of a function's name without importing the function.

    Args:
        field: Parameter or option that contains the name, for the error message.
        name: Name of the function, such as `package.module:function`.
        other: Text about another valid form of the name, for the end of the error message.

    Raises:
        BadInput: The name does not have the form `package.module:function`.
    """
    module, _, function = name.partition(":")
    if not all(part.isidentifier() for part in (*module.split("."), function)):
        raise BadInput(
            f"{field}: {shown(name)} does not name a function; write package.module:function{other}"
        )


def imported(field: str, name: str) -> Callable[..., Any]:
    """Import the function that a parameter names, from the working directory or a package.

    The import runs the code of the function's module.

    Raises:
        BadInput: The name is not valid, the import fails, or the module has no such function.
    """
    check_function(field, name)
    module_name, _, function = name.partition(":")
    _find_in_working_directory()
    try:
        found = getattr(importlib.import_module(module_name), function, None)
    except (Exception, SystemExit) as error:  # A user's code may raise any exception.
        raise BadInput(
            f"{field}: {name!r} cannot be imported ({cause(error)}); correct its module, or start in the module's folder"
        ) from error
    if not callable(found) or isinstance(found, nn.Module):
        raise BadInput(
            f"{field}: {module_name} has no function {function!r}; name one of its functions"
        )
    return found


def _find_in_working_directory() -> None:
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))


def code_digest(values: Any) -> str:
    """Return a hash of the source files of the user's functions that values name.

    The hash covers all files of a function's package, or the single file of a module.

    Args:
        values: Values of JSON types. Some of them may be names such as `package.module:function`.

    Returns:
        The hash, or an empty string if the values name no function that exists.
    """
    _find_in_working_directory()
    files: set[Path] = set()
    for name in _NAME.findall(json.dumps(values)):
        with contextlib.suppress(ImportError, ValueError):  # The run reports the missing module.
            if found := importlib.util.find_spec(name):
                folders = found.submodule_search_locations or ()
                files.update(*(Path(folder).rglob("*.py") for folder in folders))
                files.update([Path(found.origin)] if found.origin else [])
    digest = hashlib.sha256()
    for file in sorted(filter(Path.is_file, files)):
        digest.update(file.read_bytes())
    return digest.hexdigest()[:12] if files else ""
