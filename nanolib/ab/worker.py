"""One version of the code in a process of its own, which times blocks of calls on request.

It runs as a file and imports only the nanolib that the version itself brings, so that each side of a comparison uses its own code.
Requests and answers are JSON over a socket; what the code prints goes to a log.

`worker.py PARENT SOCKET FOLDER...` serves a version whose code is in the folders. `worker.py PARENT SOCKET --forks` forks
versions: fresh ones without the time that imports take (see `forks.py`).
"""

from __future__ import annotations

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

Call = Callable[[], object]
TimeBlock = Callable[[int], list[list[float]]]  # how many calls → ms of each call and phase

_OURS = Path(__file__).parents[1]
_connection: Connection  # to `nano ab`


class Refused(Exception):
    """A request that this version cannot serve; the message says why."""


def _answer(**values: Any) -> None:
    _connection.send_bytes(json.dumps(values).encode())


def _requests() -> Iterator[dict[str, Any]]:
    while True:
        try:
            request = _connection.recv_bytes()
        except EOFError:  # nobody asks any more
            return
        yield json.loads(request)


def _serve_blocks(scopes: list[str], time_block: TimeBlock, last: bool) -> list[list[list[float]]]:
    """Time blocks until another request comes.

    Args:
        scopes: The names of the phases.
        time_block: Times this number of calls.
        last: Whether nothing else will be timed after this.

    Returns:
        All blocks that were kept, ms, shape [blocks][calls][phases].
    """
    kept: list[list[list[float]]] = []
    _answer(timing=scopes, last=last)
    for request in _requests():
        if request["do"] != "block":
            break
        block = time_block(request["calls"])
        gc.collect()
        if request["keep"]:
            kept.append(block)
        _answer(ms=block)
    return kept


def _serve_function(request: dict[str, Any], root: Path) -> None:
    call = function = _imported(request["function"], root)
    if request["setup"]:
        call = functools.partial(function, _imported(request["setup"], root)())
    checks = _loaded(_OURS / "meters" / "time" / "call_check.py")
    check = checks.CallCheck(call, request["function"], Refused)
    _time_calls(check)
    rows = []
    if request["rows"]:
        rows = importlib.import_module("nanolib.meters.memory").measure_memory(call, device="cpu")
    message = checks.CACHED if check.is_cached else ""
    _answer(ended="ok", message=message, rows=[row.to_dict() for row in rows])


def _time_calls(check: Any) -> None:
    """Time blocks of a `CallCheck` until another request comes, without garbage collection in them."""
    checked = [check, check]

    def time_block(calls: int) -> list[list[float]]:
        rows = []
        for _ in range(calls):
            now = checked.pop() if checked else check.call
            start = time.perf_counter_ns()
            now()
            _synchronize()
            rows.append([(time.perf_counter_ns() - start) / 1e6])
        return rows

    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        _serve_blocks([""], time_block, last=True)
    finally:
        gc.enable()
        gc.unfreeze()


def _imported(name: str, root: Path) -> Any:
    """Return the callable `package.module:function` of this version."""
    module_name, _, attribute = name.partition(":")
    try:
        found: Any = importlib.import_module(module_name)
    except Exception as error:
        raise Refused(f"{name} cannot be imported ({_one_line(error)})") from None
    _check_ours(found, root)
    for part in attribute.split("."):
        found = getattr(found, part, None)
    if not callable(found):
        raise Refused(f"{name}: {module_name} has no callable {attribute!r}")
    return found


def _check_ours(module: ModuleType, root: Path) -> None:
    if not _is_ours(module, root):
        raise Refused(
            f"{module.__name__} was imported from {_file(module)}, outside this version; it is not part of the repository"
        )


def _is_ours(module: ModuleType, root: Path) -> bool:
    """Whether it is in the version's folder, and not in an environment inside that folder."""
    file = Path(_file(module) or "/").resolve()
    return file.is_relative_to(root) and not file.is_relative_to(Path(sys.prefix).resolve())


def _file(module: Any) -> str | None:
    """Return where it comes from, without waking modules that load lazily."""
    return module.__dict__.get("__file__") if isinstance(module, ModuleType) else None


def _synchronize() -> None:
    """Wait for the accelerator, if the function uses one."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.synchronize()


def _experiment(request: dict[str, Any], root: Path) -> tuple[Any, dict[str, Any]]:
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


def _serve_case(request: dict[str, Any], root: Path) -> None:
    """Measure a case as `nano run` does, with its timings interleaved with the other version's."""
    params, cases = _experiment(request, root)

    def collect(clock: Any, phases: dict[str, Call], rel_ci: float, budget_s: float) -> Any:
        calls, start = list(phases.values()), time.perf_counter()
        blocks = _serve_blocks(list(phases), lambda n: clock.time_block(calls, n, 1), last=False)
        shape = {
            "calls_per_block": len(blocks[0]),
            "inner": 1,
            "first_calls": [],
            "stop": "interleaved",
            "precision": rel_ci,
            "budget_s": budget_s,
            "elapsed_s": time.perf_counter() - start,
        }
        return importlib.import_module("numpy").asarray(blocks), shape

    measure_group = importlib.import_module("nanolib.run.group").measure_group
    case = cases[request["case_id"]]
    collected = params.replace(case_timeout_s=request["timeout_s"]).collected_by(collect)
    outcome = measure_group([case], collected, {})[case.case_id]
    rows = [row.to_dict() for row in outcome.rows]
    _answer(ended=outcome.status, message=outcome.message, rows=rows)


def _list_cases(request: dict[str, Any], root: Path) -> None:
    _, cases = _experiment(request, root)
    chosen = [case for case in cases.values() if case.supports_ab]
    _answer(cases=[{"case_id": case.case_id, "factors": case.factors} for case in chosen])


def _tell_imports(request: dict[str, Any], root: Path) -> None:
    """Answer which modules are not the version's own, in the order of their import, and which variables the code has set."""
    modules = list(sys.modules.items())
    elsewhere = [
        name
        for name, module in modules
        if _file(module) and name != "__main__" and not _is_ours(module, root)
    ]
    _answer(modules=elsewhere, variables=set_since(_VARIABLES))


_VARIABLES = dict(os.environ)
_SERVES = {
    "cases": _list_cases,
    "case": _serve_case,
    "function": _serve_function,
    "tell": _tell_imports,
}


def set_since(before: dict[str, str]) -> list[str]:
    """Return the environment variables that differ from `before`."""
    return sorted(name for name, _ in before.items() ^ dict(os.environ).items())


def _short(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]


def _one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {_short(error)}"


@functools.cache
def _loaded(file: Path) -> ModuleType:
    """Load a file of this nanolib, without its package, which is the version's."""
    spec = importlib.util.spec_from_file_location(f"_{file.stem}", file)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def exit_with(parent: int) -> None:
    """End this process when its parent ends."""
    _loaded(_OURS / "run" / "process.py").exit_with_parent(parent)


def _free_threads() -> None:
    """Let threads that Python starts run on all cores; otherwise they run on the core to which OpenMP binds their parent."""
    cores, start = os.sched_getaffinity(0), threading.Thread.start

    def start_free(thread: threading.Thread) -> None:
        bound = os.sched_getaffinity(0)
        os.sched_setaffinity(0, cores)  # which the new thread inherits
        try:
            start(thread)
        finally:
            os.sched_setaffinity(0, bound)

    threading.Thread.start = start_free


def serve(connection: Connection, folders: list[str]) -> None:
    """Serve requests to one version until nobody asks any more.

    Args:
        connection: To `nano ab`.
        folders: Where its code is imported from, the root of the version first.
    """
    global _connection
    _connection = connection
    sys.path[:0] = [folder for folder in reversed(folders) if Path(folder).is_dir()]
    root = Path(folders[0]).resolve()
    for request in _requests():
        try:
            if act := _SERVES.get(request["do"]):  # a `next` that comes too late has no answer
                act(request, root)
        except Refused as refusal:
            _answer(refused=str(refusal))
        except Exception as error:
            _answer(ended="error", message=_one_line(error), rows=[])


def main() -> None:
    """Read the command line and serve."""
    _, parent, file, *folders = sys.argv
    exit_with(int(parent))
    if hasattr(os, "sched_setaffinity"):
        _free_threads()
    os.set_inheritable(int(file), False)
    connection = Connection(int(file))
    if folders == ["--forks"]:
        _loaded(_OURS / "ab" / "forks.py").serve(connection, sys.modules[__name__])
    else:
        serve(connection, folders)


if __name__ == "__main__":
    main()
