"""The full parameters on a simulated GPU: each case's calls are made twice on tensors without data, and watched.

Run as a module in a process that has the hooks; see `simulated`. It prints, as JSON, per case and scope what the second call did.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from types import SimpleNamespace
from typing import Any

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from nanolib.experiments import ALL
from nanolib.meters import memory
from nanolib.meters.memory import fake_tensors
from nanolib.models.attention import block_sparse, dense
from nanolib.run import workload
from nanolib.run.case import Plan
from tests.run.test_walk import WALK, params_of

DEVICE = "cuda:0"
_HOST = {"aten::_local_scalar_dense", "aten::equal", "aten::nonzero"}  # the host waits for a value


class Watched(TorchDispatchMode):
    """Counts operations, and those by which the host and the device wait for each other."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.operations, self.copies, self.read = 0, 0, []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **kwargs or {})
        name = func.name()
        self.operations += name != "prim::device"  # a question to a tensor without data, and no operation
        if name in _HOST:
            self.read.append(name)

        if name in ("aten::_to_copy", "aten::copy_"):
            tensors = [x for x in tree_leaves((args, out)) if isinstance(x, torch.Tensor)]
            self.copies += len({x.device.type for x in tensors}) > 1
        return out


class _Generator(torch.Generator):
    """A CPU build refuses one for CUDA."""

    def __new__(cls, device: Any = "cpu") -> Any:
        return super().__new__(cls)


def simulate() -> None:
    """One GPU as large and as new as an H100, as far as torch tells it."""
    told = SimpleNamespace(
        name="simulated", major=9, minor=0, total_memory=80 * 2**30, uuid="GPU-0", multi_processor_count=132
    )
    for name, answer in {
        "is_available": True,
        "device_count": 8,
        "get_device_properties": told,
        "get_device_capability": (9, 0),
        "mem_get_info": (80 * 2**30, 80 * 2**30),
        "memory_reserved": 0,
        "memory_allocated": 0,
        "synchronize": None,
        "current_device": 0,
        "is_bf16_supported": True,
    }.items():
        setattr(torch.cuda, name, lambda *_, answer=answer, **__: answer)
    torch.Generator = _Generator
    memory.workspace_bytes = lambda *_: (
        0
    )  # rounded up to 128 positions it would hide what tensors take on lengths this short
    dense.scaled_dot_product_attention = block_sparse.scaled_dot_product_attention = _kernel


def _kernel(q: Any, k: Any, v: Any, attn_mask: Any = None, is_causal: bool = False, scale: Any = None, **_: Any) -> Any:
    """The operation that a CUDA build would choose: here torch knows no kernel but `math`."""
    aten, allowed = torch.ops.aten, torch.backends.cuda
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) if q.shape[1] != k.shape[1] else x for x in (k, v))
    needs = torch.is_grad_enabled() and q.requires_grad
    if allowed.flash_sdp_enabled() and attn_mask is None and q.dtype.itemsize == 2:
        return aten._scaled_dot_product_flash_attention(q, k, v, 0.0, is_causal, scale=scale)[0]
    if allowed.cudnn_sdp_enabled() and attn_mask is None and q.dtype.itemsize == 2:
        return aten._scaled_dot_product_cudnn_attention(q, k, v, None, needs, 0.0, is_causal, scale=scale)[0]
    if allowed.mem_efficient_sdp_enabled() and q.dtype != torch.float64:
        bias = None if attn_mask is None else torch.zeros_like(attn_mask, dtype=q.dtype).expand(*q.shape[:2], -1, -1)
        return aten._scaled_dot_product_efficient_attention(q, k, v, bias, needs, 0.0, is_causal, scale=scale)[0]
    if not allowed.math_sdp_enabled():
        raise RuntimeError("No available kernel. Aborting execution.")
    return scaled_dot_product_attention(q, k, v, attn_mask=attn_mask, is_causal=is_causal, scale=scale)


def walk() -> None:
    """Plan all cases of a notebook on both devices, and print what was watched."""
    told: list[dict[str, Any]] = []
    counted = workload._counted

    def watched(work: workload.Workload, stacks: Any = ()) -> Any:
        work.call()
        with Watched() as seen:
            found = counted(dataclasses.replace(work, first=lambda: None), stacks)
        told.append({"scope": work.scope, "peak": found.peak, **vars_of(seen)})
        return found

    workload._counted = watched
    for changes in WALK[sys.argv[1]]:
        experiment = ALL[sys.argv[1]]()
        for case in experiment.cases(params_of(sys.argv[1], changes, DEVICE)):
            told.clear()
            try:
                with fake_tensors():
                    reason = case.unsupported()
                plan = Plan() if reason else _planned(case)
            except (DataDependentOutputException, DynamicOutputShapeException) as error:
                plan, reason = Plan(), f"it reads values on the host: {error}"
            here = [dict(one) for one in told]
            on_cpu = {} if reason else _planned(dataclasses.replace(case, device="cpu")).peaks
            for one in here:
                one["cpu"] = on_cpu.get(one["scope"])
            say(
                kind=type(case).__name__,
                case=str(case),
                reason=reason or plan.reason,
                planned=bool(plan.peaks),
                calls=here,
            )


def _planned(case: Any) -> Plan:
    return (case.rank_plan if hasattr(case, "rank_plan") else case.plan)()


def vars_of(seen: Watched) -> dict[str, Any]:
    """What it has counted."""
    return {name: getattr(seen, name) for name in ("copies", "read", "operations")}


def say(**told: Any) -> None:
    """One line of JSON."""
    print(json.dumps(told), flush=True)


if __name__ == "__main__":
    simulate()
    walk()
    os._exit(0)  # the hooks would not survive that torch is taken down
