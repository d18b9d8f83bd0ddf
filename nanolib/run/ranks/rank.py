"""One rank of a case: its answer, or what went wrong, is a file in the folder of its launch."""

from __future__ import annotations

import faulthandler
import importlib
import json
import os
import signal
import sys
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

# What the backends say when another rank has not come, or is gone.
_WAITING = ("timed out", "timeout", "connection closed", "connection reset", "connection refused", "broken pipe")


def main(folder: Path, asked: dict[str, Any]) -> None:
    """Answer the request and end; with 1 where that fails.

    Args:
        folder: Of the launch.
        asked: What `launcher.start` was given.
    """
    rank, device = int(os.environ["RANK"]), torch.device("cpu")
    faulthandler.register(signal.SIGTERM, (folder / f"{rank}.stack").open("w"), all_threads=False, chain=True)
    torch.set_num_threads(asked["threads"])
    torch.seed()  # ranks that were forked would draw the same
    try:
        if asked["device"].startswith("cuda"):
            device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
            torch.cuda.set_device(device)
        backend, timeout = "nccl" if device.type == "cuda" else "gloo", timedelta(seconds=asked["hang_s"])
        world_size = int(os.environ["WORLD_SIZE"])
        store = _store(folder, asked, world_size)
        store.set_timeout(timeout)
        own = {"device_id": device} if device.type == "cuda" else {}  # or NCCL guesses it at the first collective
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout, **own)
        answer = _function(asked["body"])(asked["request"])
        _write(folder / f"{rank}.json", answer)
        dist.barrier()
    except Exception as error:
        message = f"{type(error).__name__}: {' '.join(str(error).split())}"
        waiting = isinstance(error, dist.DistError | RuntimeError) and any(w in message.lower() for w in _WAITING)
        told = {"rank": rank, "message": message, "traceback": traceback.format_exc(), "waiting": waiting}
        _write(folder / f"{rank}.error", told)
        sys.stdout.flush()
        os._exit(1)  # ending the process group in order would wait for ranks that may be gone
    sys.stdout.flush()
    os._exit(0)  # gloo's threads abort now and then while they are torn down


def _store(folder: Path, asked: dict[str, Any], world_size: int) -> dist.Store:
    """Where the ranks meet: at a file of their folder, or over nodes at the store where they were asked for."""
    if "port" not in asked:
        return dist.FileStore(str(folder / "store"), world_size)
    return dist.PrefixStore(f"{asked['launch']}/ranks", dist.TCPStore(asked["host"], asked["port"], is_master=False))


def _function(name: str) -> Any:
    module, _, function = name.partition(":")
    return getattr(importlib.import_module(module), function)


def _write(path: Path, value: Any) -> None:
    """Whole or not at all: the reader may come at any moment."""
    half = path.with_suffix(".half")
    half.write_text(json.dumps(value))
    half.replace(path)
