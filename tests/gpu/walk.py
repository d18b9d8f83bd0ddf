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

from nanolib.config import NanoConfig
from nanolib.experiments import ALL
from nanolib.experiments.attention.attention_case import AttentionCase
from nanolib.experiments.distributed.prefill import _pretended_ranks
from nanolib.experiments.model.steps import Inferring, Training
from nanolib.meters import memory
from nanolib.meters.memory import fake_tensors
from nanolib.models import create_model, fp8
from nanolib.models.attention import block_sparse, dense
from nanolib.models.attention.choice import CHOOSERS
from nanolib.models.attention.layout import Layout
from nanolib.models.attention.patterns import PATTERNS
from nanolib.models.attention.tree import ALGORITHMS, tree_attention_decode
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
        self.operations, self.copies, self.read, self.sent = 0, 0, [], {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **kwargs or {})
        name = func.name()
        self.operations += name != "prim::device"  # a question to a tensor without data, and no operation
        if name in _HOST:
            self.read.append(name)
        if name.startswith("c10d::"):
            bytes_ = sum(x.nbytes for x in tree_leaves(args) if isinstance(x, torch.Tensor))
            self.sent[name] = self.sent.get(name, 0) + bytes_
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

    def watching(count: Any, peak_of: Any) -> Any:
        def watched(work: workload.Workload, *rest: Any) -> Any:
            work.call()
            with Watched() as seen:
                work.call()  # apart from the count, whose hooks make operations of their own
            found = count(dataclasses.replace(work, first=lambda: None), *rest)
            told.append({"scope": work.scope, "peak": peak_of(found), **vars_of(seen)})
            return found

        return watched

    workload._peak = watching(workload._peak, lambda peak: peak)
    workload.followed = watching(workload.followed, lambda counter: counter.peak)
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


def walk_fp8() -> None:
    """A forward pass and a training step of each recipe, not emulated."""
    for recipe in fp8.RECIPES:
        with fake_tensors():
            config = NanoConfig(
                vocab_size=64, d_model=64, num_layers=1, num_heads=2, context_length=64, dtype="bfloat16"
            )
            model = create_model(config, DEVICE)
            fp8.convert(model, recipe, excluded_modules=("head",), emulate=False)
            ids = torch.zeros(2, 33, dtype=torch.int64, device=DEVICE)
            forward, step = Inferring(model, ids[:, :-1], "eager").forward, Training(model, ids, "eager", 1e-3)
            for scope, call in {"forward": forward, "training_step": step}.items():
                call()
                with Watched() as seen:
                    call()
                say(case=recipe, scope=scope, **vars_of(seen))


def walk_decode() -> None:
    """A token on one of two simulated ranks, by each algorithm."""
    for algorithm in ALGORITHMS:
        with _pretended_ranks(2), fake_tensors(), torch.no_grad():
            q, k = torch.empty(1, 4, 1, 16, device=DEVICE), torch.empty(1, 2, 64, 16, device=DEVICE)
            for _ in range(2):
                with Watched() as seen:
                    out = tree_attention_decode(q, k, k, algorithm=algorithm, layout=Layout.plain(128, 2))
            say(case=algorithm, device=str(out.device), shape=list(out.shape), **vars_of(seen))


def walk_sparse() -> None:
    """A call, and one with gradients, over a long sequence by each pattern, drawn per head where it draws; and the case's plan."""
    for pattern in [*PATTERNS, *CHOOSERS]:
        options = {"pattern": pattern, "random_tokens": 128, "per_head": pattern in ("random", "bigbird")}
        shape = {"seq_len": 8192, "batch_size": 1, "num_heads": 8, "num_kv_heads": 2, "head_dim": 64}
        asked = {"name": pattern, "attention_type": "sparse", "options": options, "causal": True, "backward": True}
        case = AttentionCase(device=DEVICE, dtype="bfloat16", **asked, **shape)
        peaks = {at.device: at.plan().peaks for at in (case, dataclasses.replace(case, device="cpu"))}
        with fake_tensors():
            like = {"dtype": torch.bfloat16, "device": DEVICE}
            inputs = [torch.empty(1, heads, 8192, 64, **like) for heads in (8, 2, 2)]
            for work in case.workloads(*inputs):
                work.call()
                with Watched() as seen:
                    out = work.call()
                outs = [out] if isinstance(out, torch.Tensor) else list(out)
                devices, shapes = {str(x.device) for x in outs}, [list(x.shape) for x in outs]
                planned = {device: peak.get(work.scope) for device, peak in peaks.items()}
                say(case=pattern, scope=work.scope, devices=[*devices], shapes=shapes, peaks=planned, **vars_of(seen))


def vars_of(seen: Watched) -> dict[str, Any]:
    """What it has counted."""
    return {name: getattr(seen, name) for name in ("copies", "read", "operations", "sent")}


def say(**told: Any) -> None:
    """One line of JSON."""
    print(json.dumps(told), flush=True)


if __name__ == "__main__":
    simulate()
    {"fp8 recipes": walk_fp8, "decode": walk_decode, "sparse": walk_sparse}.get(sys.argv[1], walk)()
    os._exit(0)  # the hooks would not survive that torch is taken down
