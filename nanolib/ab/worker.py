"""One version of the code in a process of its own, which times blocks of calls when it is asked to.

It runs as a file and imports nothing of nanolib's but what the version itself brings, so that either side of a comparison
sees its own code alone. Requests come in as lines of JSON and answers go out so; whatever the code prints goes to standard error.
Given a socket, it is no version but the process of which versions are forked: fresh ones without the time that imports take.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib.util
import json
import mmap
import os
import random
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

Call = Callable[[], object]
TimeBlock = Callable[[int], list[list[float]]]  # how many calls → ms of each call and phase

_CALL_CHECK = Path(__file__).parents[1] / "meters" / "time" / "call_check.py"
_NAP_S, _PATIENCE_S = (
    0.005,
    0.05,
)  # the time of a thread on another core is brought up to date every 4 ms

_requests = sys.stdin
_answers = sys.stdout


class Refused(Exception):
    """A request that this version cannot serve; the message says why."""


def _answer(**values: Any) -> None:
    _answers.write(json.dumps(values) + "\n")
    _answers.flush()


def _requested() -> Iterator[dict[str, Any]]:
    for line in _requests:
        yield json.loads(line)


def _serve_blocks(scopes: list[str], time_block: TimeBlock, last: bool) -> list[list[list[float]]]:
    """Time blocks until told to go on.

    Args:
        scopes: What the phases are called.
        time_block: Times so many calls.
        last: Whether nothing else will be timed after this.

    Returns:
        All blocks that were kept, ms, shape [blocks][calls][phases].
    """
    kept: list[list[list[float]]] = []
    _answer(timing=scopes, last=last)
    for request in _requested():
        if request["do"] != "block":
            break
        block = time_block(request["calls"])
        gc.collect()
        if request["keep"]:
            kept.append(block)
        if request["naps"]:
            _fall_asleep()
        _answer(ms=block)
    return kept


def _fall_asleep() -> None:
    """Wait for this process's other threads: OpenMP's look for more work for ten milliseconds, in the other version's time."""
    deadline = time.monotonic() + _PATIENCE_S
    while time.monotonic() < deadline:
        busy, start = time.process_time(), time.monotonic()
        time.sleep(_NAP_S)
        if time.process_time() - busy < (time.monotonic() - start) / 10:
            return


# a function of the user's own


def _serve_function(request: dict[str, Any], root: Path) -> None:
    function = _imported(request["function"], root)
    if request["setup"]:
        made = _imported(request["setup"], root)()
        call: Call = lambda: function(made)  # noqa: E731
    else:
        call = function

    note = _serve_call(_loaded(_CALL_CHECK).CallCheck(call, request["function"], Refused))
    rows = []
    if request["rows"]:
        rows = importlib.import_module("nanolib.meters.memory").measure_memory(call, device="cpu")
    _answer(ended="ok", message=note, rows=[row.to_dict() for row in rows])


def _serve_call(check: Any) -> str:
    """Time blocks of a `CallCheck` until told to go on, the collector out of the way; returns what a reader should know of them."""
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
    return _loaded(_CALL_CHECK).CACHED if check.is_cached else ""


def _imported(name: str, root: Path) -> Any:
    """The callable `package.module:function`, of this version and of no other."""
    module_name, _, attribute = name.partition(":")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        raise Refused(f"{name} cannot be imported ({_one_line(error)})") from None
    _must_be_ours(module, root)
    found = module
    for part in attribute.split("."):
        found = getattr(found, part, None)
    if not callable(found):
        raise Refused(f"{name}: {module_name} has no callable {attribute!r}")
    return found


def _must_be_ours(module: Any, root: Path) -> None:
    if not _is_ours(module, root):
        raise Refused(
            f"{module.__name__} was imported from {_file(module)}, outside this version; it is not part of the repository"
        )


def _is_ours(module: Any, root: Path) -> bool:
    """Whether it lies in the version's folder, and not in an environment that lies there too."""
    file = Path(_file(module) or "/").resolve()
    return file.is_relative_to(root) and not file.is_relative_to(Path(sys.prefix).resolve())


def _file(module: Any) -> str | None:
    """Where it comes from; modules that load lazily are not woken."""
    return module.__dict__.get("__file__") if isinstance(module, ModuleType) else None


def _synchronize() -> None:
    """Wait for the accelerator that the function uses, if it uses one."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.synchronize()


# cases of an experiment


def _experiment(request: dict[str, Any], root: Path) -> tuple[Any, dict[str, Any]]:
    """The parameters of an experiment, and its cases by id."""
    try:
        module = importlib.import_module(f"nanolib.experiments.{request['experiment']}.cases")
    except ImportError as error:
        raise Refused(f"has no experiment {request['experiment']!r} ({_one_line(error)})") from None
    _must_be_ours(module, root)
    try:
        params = module.Params(**request["params"])
        return params, {case.case_id: case for case in module.cases(params)}
    except ValueError as error:
        raise Refused(" ".join(str(error).split())[:300]) from None


def _serve_case(request: dict[str, Any], root: Path) -> None:
    """Measure a case on the one path; its timings are interleaved with the other version's."""
    params, cases = _experiment(request, root)

    def collect(clock: Any, phases: dict[str, Call], rel_ci: float, budget_s: float) -> Any:
        calls, start = list(phases.values()), time.perf_counter()
        blocks = _serve_blocks(list(phases), lambda n: clock.time_block(calls, n, 1), last=False)
        shape = {
            "calls_per_block": len(blocks[0]),
            "inner": 1,
            "first_calls": [],
            "stop": "interleaved",
        }
        shape |= {
            "precision": rel_ci,
            "budget_s": budget_s,
            "elapsed_s": time.perf_counter() - start,
        }
        return importlib.import_module("numpy").asarray(blocks), shape

    measure_group = importlib.import_module("nanolib.run.group").measure_group
    case = cases[request["case_id"]]
    collected = params.replace(case_timeout_s=request["timeout_s"]).collected_by(collect)
    outcome = measure_group([case], collected, {})[case.case_id]
    _answer(
        ended=outcome.status, message=outcome.message, rows=[row.to_dict() for row in outcome.rows]
    )


def _list_cases(request: dict[str, Any], root: Path) -> None:
    _, cases = _experiment(request, root)
    chosen = {case_id: case for case_id, case in cases.items() if case.interleaves}
    _answer(
        cases=[{"case_id": case_id, "factors": case.factors} for case_id, case in chosen.items()]
    )


def _one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def _die_with_parent(parent: int) -> None:
    """As all that this version of nanolib starts; its file is loaded without the package, which is the version's."""
    _loaded(Path(__file__).parents[1] / "run" / "process.py").exit_with_parent(parent)


@functools.cache
def _loaded(file: Path) -> ModuleType:
    """A file of ours, loaded once, without the package that it lies in."""
    spec = importlib.util.spec_from_file_location(f"_{file.stem}", file)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _free_threads() -> None:
    """Let threads that Python starts run on all cores, not on the one to which OpenMP binds the thread that starts them."""
    cores, start = os.sched_getaffinity(0), threading.Thread.start

    def start_free(thread: threading.Thread) -> None:
        bound = os.sched_getaffinity(0)
        os.sched_setaffinity(0, cores)  # which the new thread inherits
        try:
            start(thread)
        finally:
            os.sched_setaffinity(0, bound)

    threading.Thread.start = start_free


class _Barrier:
    """A finder that lets nobody import what versions have of their own: a library that does must wait for the version's."""

    def __init__(self, own: list[str]) -> None:
        self.own = frozenset(own)

    def find_spec(self, name: str, *_: object) -> None:
        """As finders do.

        Raises:
            Refused: And no `ImportError`, which the library might take for leave to do without it.
        """
        if name in self.own:
            raise Refused(f"{name} is the version's own")


def _serve_forks(channel: socket.socket) -> None:
    """Import, fork and wait for children, as asked; with the request to fork come its input, output and log."""
    channel.set_inheritable(False)
    text, files = b"", []
    while True:
        chunk, more, _, _ = socket.recv_fds(channel, 1 << 16, 3)
        if not chunk:
            return
        text, files = text + chunk, files + more
        if not text.endswith(b"\n"):
            continue
        request = json.loads(text)
        if "modules" in request:
            told = _import_all(request["modules"], request["own"])
        elif "wait" in request:
            told = os.waitstatus_to_exitcode(os.waitpid(request["wait"], 0)[1])
        else:
            parent, told = os.getpid(), os.fork()
            if not told:
                _die_with_parent(parent)
                channel.close()
                _become(request, files)
            os.setpgid(told, told)
            for file in files:
                os.close(file)
        text, files = b"", []
        channel.sendall(json.dumps(told).encode() + b"\n")


def _import_all(modules: list[str], own: list[str]) -> list[str]:
    """Import modules, and return the variables of the environment that this set."""
    before = dict(os.environ)
    barrier = _Barrier(own)
    sys.meta_path.insert(0, barrier)
    for name in modules:
        with contextlib.suppress(
            Exception, SystemExit
        ):  # the child that needs it will say why it cannot be imported
            importlib.import_module(name)
    sys.meta_path.remove(barrier)
    gc.collect()
    gc.freeze()  # or each child's collector would look at all of it, and copy it in doing so
    return _set_since(before)


def _set_since(before: dict[str, str]) -> list[str]:
    """Variables of the environment that differ from `before`."""
    after = dict(os.environ)
    return sorted(name for name, _ in before.items() ^ after.items())


def _become(request: dict[str, Any], files: list[int]) -> NoReturn:
    """Serve as one version, to the end of this process."""
    global _requests, _answers
    code = 1
    try:
        os.setpgid(0, 0)
        os.dup2(files[2], 1)
        os.dup2(files[2], 2)
        for file in files:
            os.set_inheritable(file, False)
        _requests, _answers = (
            os.fdopen(files[0], encoding="utf-8"),
            os.fdopen(files[1], "w", encoding="utf-8"),
        )
        os.environ.update(request["environment"])
        os.chdir(request["folder"])
        lies = _shifted()  # noqa: F841  as long as it serves
        _serve(request["imports"])
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)  # never back into what the parent was doing


def _shifted() -> list[Any]:
    """Memory of random size, so that what is made after it lies elsewhere in each child, as in processes started anew."""
    pages = mmap.mmap(-1, mmap.PAGESIZE * random.randint(1, 1024))
    return [pages, *(bytearray(random.randint(1, 4096)) for _ in range(random.randint(1, 64)))]


def _imported_elsewhere(root: Path) -> list[str]:
    """Modules that are not the version's own, in the order in which they were imported."""
    modules = list(sys.modules.items())
    return [
        name
        for name, module in modules
        if _file(module) and name != "__main__" and not _is_ours(module, root)
    ]


def _serve(folders: list[str]) -> None:
    sys.path[:0] = [folder for folder in reversed(folders) if Path(folder).is_dir()]
    root = Path(folders[0]).resolve()
    before = dict(os.environ)
    for request in _requested():
        if request["do"] == "tell":
            _answer(modules=_imported_elsewhere(root), variables=_set_since(before))
        else:
            _dispatch(request, root)


_SERVES = {"cases": _list_cases, "case": _serve_case, "function": _serve_function}


def _dispatch(request: dict[str, Any], root: Path) -> None:
    """Do what is asked, and answer."""
    try:
        if serve := _SERVES.get(request["do"]):  # a `next` that came too late is nobody's
            serve(request, root)
    except Refused as refusal:
        _answer(refused=str(refusal))
    except Exception as error:
        _answer(ended="error", message=_one_line(error), rows=[])


def main() -> None:
    """Serve requests until the input ends: `worker.py PARENT FOLDER ...` as one version, `... PARENT --forks FD` forking them."""
    global _answers
    _, parent, *arguments = sys.argv
    _die_with_parent(int(parent))
    if hasattr(os, "sched_setaffinity"):
        _free_threads()
    if arguments[0] == "--forks":
        _serve_forks(socket.socket(fileno=int(arguments[1])))
    else:
        _answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
        os.dup2(2, 1)
        _serve(arguments)


if __name__ == "__main__":
    main()
