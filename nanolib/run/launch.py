"""`-m nanolib.run.launch PARENT MODULE ARGUMENT...` runs `-m MODULE ARGUMENT...`, and ends when its parent does.

Of a module of ours it calls `main()`. It imports nothing of weight, since it runs before every launch. With `--private-network`
before the module, the ranks live in a network of their own, where an interface counts their bytes alone; where the system does not
allow that they live where they are.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import gc
import importlib
import os
import runpy
import signal
import socket
import struct
import sys
import threading
import time
import uuid

LAUNCH_VARIABLE = "NANOLIB_LAUNCH"  # `nano run` gives all its notebooks one token, and finds their runs by it
PART_VARIABLE = "NANOLIB_PART"  # `2/4`: this run is the second of four that share the cases
PRIVATE_NETWORK = "--private-network"
_PARENT_DEATH = 1  # PR_SET_PDEATHSIG
_WATCH_S = 0.5
_NEW_USER, _NEW_NETWORK = 0x10000000, 0x40000000
_SET_FLAGS, _UP_RUNNING = 0x8914, 0x41


def new_token() -> str:
    """A token for the runs of one command."""
    return uuid.uuid4().hex[:12]


def command(module: str, *arguments: str, private_network: bool = False) -> list[str]:
    """What starts a module in a process that ends when this one does."""
    network = [PRIVATE_NETWORK] if private_network else []
    return [sys.executable, "-m", __name__, str(os.getpid()), *network, module, *arguments]


def die_with_parent(parent: int) -> None:
    """End this process when the one that started it is gone, however that ended.

    Args:
        parent: Its number, as it knew it: it may be gone before this is called.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PARENT_DEATH, int(signal.SIGKILL))
    else:
        threading.Thread(target=_watch, args=(parent,), daemon=True).start()
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def _watch(parent: int) -> None:
    """Where the system tells nobody of a parent's end: look for it."""
    while os.getppid() == parent:
        time.sleep(_WATCH_S)
    os.kill(os.getpid(), signal.SIGKILL)


def enter_private_network() -> None:
    """Give this process, and those that it starts, a network of which only the loopback interface exists.

    Raises:
        OSError: The system does not allow it; nothing has changed then.
    """
    if sys.platform != "linux":
        raise OSError("this system has no network namespaces")
    libc = ctypes.CDLL(None, use_errno=True)
    # Root needs no namespace of users around it, and keeps its rights over files without one.
    if libc.unshare(_NEW_NETWORK if os.geteuid() == 0 else _NEW_NETWORK | _NEW_USER):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    with socket.socket() as control:
        fcntl.ioctl(control, _SET_FLAGS, struct.pack("16sh", b"lo", _UP_RUNNING))


def main() -> None:
    """See the module."""
    parent, *arguments = sys.argv[1:]
    if arguments[0] == PRIVATE_NETWORK:
        arguments = arguments[1:]
        with contextlib.suppress(OSError):  # the ranks look whether they have one, and say so where not
            enter_private_network()
    die_with_parent(int(parent))
    sys.argv[1:] = arguments[1:]
    if not arguments[0].startswith("nanolib."):
        runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
        return
    gc.disable()  # what is imported stays: to look through it again and again takes a fifth of torch's import
    module = importlib.import_module(arguments[0])
    gc.enable()
    module.main()


if __name__ == "__main__":
    main()
