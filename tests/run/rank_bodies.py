"""Functions for ranks that answer, raise, die or hang."""

import os
import random
import signal
import time

import torch
import torch.distributed as dist


def answer(request):
    total = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(total)
    drawn = [torch.rand(()).item(), random.random()]
    found = {"rank": dist.get_rank(), "sum": total.item(), "threads": torch.get_num_threads()}
    return found | {"asked": request, "drawn": drawn}


def misbehave(request):
    dist.barrier()
    if dist.get_rank() == request["rank"]:
        if request["how"] == "raise":
            raise ValueError("two\nlines")
        if request["how"] == "raise alone":
            raise RuntimeError("two\nlines")
        if request["how"] == "die":
            print("Watchdog caught collective operation timeout", flush=True)  # as NCCL prints
            os.kill(os.getpid(), signal.SIGKILL)
        spin(request)
    if request["how"] == "raise alone":  # the others are busy, and meet no error
        spin(request)
    dist.barrier()


def spin(request):
    while True:
        time.sleep(0.1)
