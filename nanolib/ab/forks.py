"""Import the modules that all versions share, and fork a process for each version.

A fork starts in hundredths of a second, because it does not repeat the imports.
"""

import contextlib
import gc
import importlib
import json
import mmap
import os
import random
import sys
import traceback
from multiprocessing import reduction
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn


def serve(connection: Connection, worker: ModuleType) -> None:
    """Import modules, fork versions, and wait for forked versions to end, as `nano ab` requests.

    Args:
        connection: Connection to `nano ab`. After a request to fork, the connection carries the
            file descriptors of the version's connection and log.
        worker: The module `worker`, whose `serve` runs in each fork.
    """
    for request in worker.requests(connection):
        if "modules" in request:
            answer = _import_all(request, worker)
        elif "wait" in request:
            answer = os.waitstatus_to_exitcode(os.waitpid(request["wait"], 0)[1])
        else:
            files = [reduction.recv_handle(connection) for _ in range(2)]
            parent, answer = os.getpid(), os.fork()
            if not answer:
                connection.close()
                _become_version(request, files, parent, worker)
            os.setpgid(answer, answer)
            for file in files:
                os.close(file)
        connection.send_bytes(json.dumps(answer).encode())


def _import_all(request: dict[str, Any], worker: ModuleType) -> dict[str, list[str]]:
    """Import modules, and return the variables that the imports set and the repository's modules.

    Both versions would inherit a module of the repository. A library may import such a module only
    if the module exists, so the folders of a version are in `sys.path` during the imports.
    """
    variables, known, folders = dict(os.environ), set(sys.modules), request["folders"]
    sys.path[:0] = folders
    for name in request["modules"]:
        # The version that needs the module reports later why the import fails.
        with contextlib.suppress(Exception, SystemExit):
            importlib.import_module(name)
    sys.path[:] = [folder for folder in sys.path if folder not in folders]
    gc.collect()
    gc.freeze()  # A fork's garbage collector would otherwise write to all shared memory.
    roots = [Path(folder).resolve() for folder in folders]
    own = [
        name
        for name, module in sys.modules.items()
        if name not in known and any(worker.is_ours(module, root) for root in roots)
    ]
    return {"variables": worker.set_since(variables), "own": own}


def _become_version(
    request: dict[str, Any], files: list[int], parent: int, worker: ModuleType
) -> NoReturn:
    """Serve requests to one version until `nano ab` closes the connection, then exit."""
    code, (socket, log) = 1, files
    try:
        worker.exit_with(parent)
        os.setpgid(0, 0)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.environ.update(request["environment"])
        os.chdir(request["folder"])
        shift = _random_memory()  # noqa: F841  the memory must stay allocated
        worker.serve(Connection(socket), request["imports"])
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)  # If this function returned, this process would continue the server's loop.


def _random_memory():
    """Allocate memory of random size.

    Later objects then have different addresses in each fork, as they have in new interpreters.
    """
    pages = mmap.mmap(-1, mmap.PAGESIZE * random.randint(1, 1024))
    return [pages, *(bytearray(random.randint(1, 4096)) for _ in range(random.randint(1, 64)))]
