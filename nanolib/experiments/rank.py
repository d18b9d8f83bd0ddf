"""One rank of a case, as torchrun starts it: `-m nanolib.experiments.rank FOLDER`; the request and the answers are files there."""

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

from nanolib.experiments.launch import die_with_parent

# What the backends say when another rank has not come, or is gone.
_WAITING = ("timed out", "timeout", "connection closed", "connection reset", "connection refused", "broken pipe")


def main(folder: Path) -> None:
    """Answer the request; exits with 1 where that fails."""
    die_with_parent()
    rank, device = int(os.environ["RANK"]), torch.device("cpu")
    (folder / f"{rank}.pid").write_text(str(os.getpid()))
    faulthandler.register(signal.SIGTERM, (folder / f"{rank}.stack").open("w"), all_threads=False, chain=True)
    asked = json.loads((folder / "request.json").read_text())
    torch.set_num_threads(asked["threads"])
    try:
        if asked["device"].startswith("cuda"):
            device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
            torch.cuda.set_device(device)
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo", timeout=timedelta(seconds=asked["hang_s"]), rank=rank
        )
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


def _function(name: str) -> Any:
    module, _, function = name.partition(":")
    return getattr(importlib.import_module(module), function)


def _write(path: Path, value: Any) -> None:
    """Whole or not at all: the reader may come at any moment."""
    half = path.with_suffix(".half")
    half.write_text(json.dumps(value))
    half.replace(path)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
