"""Processes that use the machine next to a measurement, and that stop and go on."""

import contextlib
import os
import signal
import subprocess
import sys
import threading

COMES_AND_GOES_S = 3.0


@contextlib.contextmanager
def busy_neighbors(count):
    """Keep `count` cores busy by processes that count as others': they are not our children."""
    start = f"{sys.executable} -c 'while True: pass' >/dev/null 2>&1 & echo $!"
    pids = [int(subprocess.getoutput(start)) for _ in range(count)]
    over = threading.Event()

    def come_and_go():
        stopped = False
        while not over.wait(COMES_AND_GOES_S):
            stopped = not stopped
            for pid in pids:
                os.kill(pid, signal.SIGSTOP if stopped else signal.SIGCONT)

    thread = threading.Thread(target=come_and_go, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
