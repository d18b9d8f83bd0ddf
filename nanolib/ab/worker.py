"""Run one version of the code in its own process, and time blocks of calls on request.

This file runs as a script and imports the version's nanolib, so each version uses its own code.
Requests and answers are JSON over a socket. The output of the code goes to a log.

`worker.py PARENT SOCKET FOLDER...` serves the version whose code is in the folders.
`worker.py PARENT SOCKET --forks` runs the fork server in `forks.py`.
"""

import functools
import gc
import importlib.util
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any

Request = dict[str, Any]
_OURS = Path(__file__).parents[1]
_connection: Connection  # Connection to `nano ab`.


class Refused(Exception):
    """This version cannot serve a request, for the reason in the message."""


def _answer(**values):
    _connection.send_bytes(json.dumps(values).encode())


def requests(connection: Connection) -> Iterator[Request]:
    """Yield requests until `nano ab` closes the connection."""
    while True:
        try:
            yield json.loads(connection.recv_bytes())
        except EOFError:
            return


def _serve_blocks(scopes: list[str], time_block: Callable[[int], Any], last: bool):
    """Time one block per request, until a request for another action arrives.

    Args:
        scopes: Names of the phases.
        time_block: Function that times a number of calls and returns ms per call and phase.
        last: Whether these blocks are the last timing of the case.

    Returns:
        Times in each block whose request has `keep`, ms, shape [blocks][calls][phases].
    """
    kept = []
    _answer(timing=scopes, last=last)
    for request in requests(_connection):
        if request["do"] != "block":
            break
        block = time_block(request["calls"])
        gc.collect()
        if request["keep"]:
            kept.append(block)
        _answer(ms=block)
    return kept


def _serve_function(request: Request, root: Path):
    call = function = _import_callable(request["function"], root)
    if request["setup"]:
        call = functools.partial(function, _import_callable(request["setup"], root)())
    checks = _load_file(_OURS / "meters" / "call_check.py")
    check = checks.CallCheck(call, request["function"], Refused)
    checked = [check, check]  # nanolib checks the first two calls.

    def time_block(calls: int) -> list[list[float]]:
        rows = []
        for _ in range(calls):
            now = checked.pop() if checked else check.call
            start = time.perf_counter_ns()
            now()
            if _uses_cuda():
                sys.modules["torch"].cuda.synchronize()
            rows.append([(time.perf_counter_ns() - start) / 1e6])
        return rows

    gc.collect()
    gc.freeze()
    gc.disable()  # Garbage is collected between blocks.
    try:
        _serve_blocks([""], time_block, last=True)
    finally:
        gc.enable()
        gc.unfreeze()
    _answer(ended="ok", message=checks.CACHED if check.is_cached else "")


def _import_callable(name: str, root: Path):
    """Return the callable `package.module:function` of this version."""
    module_name, _, attribute = name.partition(":")
    try:
        found = importlib.import_module(module_name)
    except Exception as error:
        raise Refused(f"{name} cannot be imported ({_one_line(error)})") from None
    _check_ours(found, root)
    for part in attribute.split("."):
        found = getattr(found, part, None)
    if not callable(found):
        raise Refused(
            f"{name}: {module_name} has no callable {attribute!r}; write package.module:function"
        )
    return found


def _check_ours(module: ModuleType, root: Path):
    if not is_ours(module, root):
        raise Refused(
            f"{module.__name__} is outside this version (its file: {_file(module)}); "
            "name a module of the repository"
        )


def is_ours(module: ModuleType, root: Path) -> bool:
    """Return whether a module belongs to the version, and not to an environment's packages."""
    file = Path(_file(module) or "/").resolve()
    return file.is_relative_to(root) and not file.is_relative_to(Path(sys.prefix).resolve())


def _file(module) -> str | None:
    """Return the file of a module, or None, without starting the import of a lazy module."""
    return module.__dict__.get("__file__") if isinstance(module, ModuleType) else None


def _uses_cuda() -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and torch.cuda.is_initialized()


def _experiment(request: Request, root: Path):
    """Return the parameters of an experiment, and its cases by id."""
    try:
        module = importlib.import_module(f"nanolib.experiments.{request['experiment']}.cases")
    except ImportError as error:
        raise Refused(f"cannot import {request['experiment']} ({_one_line(error)})") from None
    _check_ours(module, root)
    try:
        params = module.Params(**request["params"])
        return params, {case.case_id: case for case in module.cases(params)}
    except ValueError as error:
        raise Refused(_short(error)) from None


def _serve_case(request: Request, root: Path):
    """Measure a case as `nano run` does, but interleave the blocks of both versions."""
    params, cases = _experiment(request, root)
    import numpy as np

    from nanolib.run.group import measure_group

    def collect(clock, phases: dict[str, Any], *_limits: float):
        calls = list(phases.values())
        blocks = _serve_blocks(list(phases), lambda n: clock.time_block(calls, n, 1), last=False)
        shape = {"calls_per_block": len(blocks[0]), "inner": 1, "stop": "interleaved"}
        return np.asarray(blocks), shape

    case = cases[request["case_id"]]
    outcome = measure_group([case], params.with_collector(collect), {})[case.case_id]
    rows = [vars(row) | {"samples": ()} for row in outcome.rows]
    _answer(ended=outcome.status, message=outcome.message, rows=rows)


def _list_cases(request: Request, root: Path):
    _, cases = _experiment(request, root)
    _answer(cases={name: case.factors for name, case in cases.items() if case.supports_ab})


def _list_imports(_request: Request, root: Path):
    """Send the names of imported modules outside the version, and what forbids forks.

    Modules outside the version are, for example, packages of the environment. The names of modules
    are in import order. Environment variables that the code sets, and a GPU, forbid forks.
    """
    elsewhere = [
        name
        for name, module in list(sys.modules.items())
        if _file(module) and name != "__main__" and not is_ours(module, root)
    ]
    _answer(modules=elsewhere, variables=set_since(_VARIABLES), uses_gpu=_uses_cuda())


_VARIABLES = dict(os.environ)
_SERVES = {
    "cases": _list_cases,
    "case": _serve_case,
    "function": _serve_function,
    "imports": _list_imports,
}


def set_since(before: dict[str, str]) -> list[str]:
    """Return the names of the environment variables that differ from `before`."""
    return sorted(name for name, _ in before.items() ^ dict(os.environ).items())


def _short(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]


def _one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {_short(error)}"


@functools.cache
def _load_file(file: Path) -> ModuleType:
    """Load a file from the nanolib that runs `nano ab`, not from the version's nanolib."""
    spec = importlib.util.spec_from_file_location(f"_{file.stem}", file)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def exit_with(parent: int) -> None:
    """End this process when the process with the id `parent` ends."""
    _load_file(_OURS / "run" / "process.py").exit_with_parent(parent)


def _free_threads():
    """Let the threads that Python starts use all cores.

    OpenMP binds the main thread to a single core, and a new thread inherits the cores of the thread
    that starts it.
    """
    cores, start = os.sched_getaffinity(0), threading.Thread.start

    def start_free(thread: threading.Thread):
        bound = os.sched_getaffinity(0)
        os.sched_setaffinity(0, cores)
        try:
            start(thread)
        finally:
            os.sched_setaffinity(0, bound)

    threading.Thread.start = start_free


def serve(connection: Connection, folders: list[str]) -> None:
    """Serve requests to one version until `nano ab` closes the connection.

    Args:
        connection: Connection to `nano ab`.
        folders: Folders with the version's own modules, the root of the version first.
    """
    global _connection
    _connection = connection
    sys.path[:0] = [folder for folder in reversed(folders) if Path(folder).is_dir()]
    root = Path(folders[0]).resolve()
    for request in requests(_connection):
        try:
            if act := _SERVES.get(request["do"]):  # A late request `next` needs no answer.
                act(request, root)
        except Refused as refusal:
            _answer(refused=str(refusal))
        except Exception as error:
            _answer(ended="error", message=_one_line(error))


def main() -> None:
    """Read the command line, and serve requests."""
    _, parent, file, *folders = sys.argv
    exit_with(int(parent))
    if hasattr(os, "sched_setaffinity"):
        _free_threads()
    os.set_inheritable(int(file), False)
    connection = Connection(int(file))
    if folders == ["--forks"]:
        _load_file(_OURS / "ab" / "forks.py").serve(connection, sys.modules[__name__])
    else:
        serve(connection, folders)


if __name__ == "__main__":
    main()
