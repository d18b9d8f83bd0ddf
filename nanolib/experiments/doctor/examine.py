"""What this machine can measure, and its ceilings: `nano doctor`."""

from __future__ import annotations

import platform
from pathlib import Path

import psutil
import torch

from nanolib.config import ATTENTION_KINDS
from nanolib.experiments.doctor import cases as doctor
from nanolib.measurement import FLAG_TEXT, Flag, Unsupported, format_with_interval
from nanolib.meters.energy.power import find_sources
from nanolib.meters.limits import fitting_threads, memory_limits
from nanolib.meters.machine import Machine, free_disk_gib, resolve_device, this_machine
from nanolib.meters.memory import resident_peak
from nanolib.models import attention
from nanolib.models.attention import flash_attn
from nanolib.paths import make_folder, output_folder
from nanolib.run import sweep
from nanolib.run.timeout import one_line


def examine(budget_s: float, sustained_s: float = 0.0) -> dict[str, dict[str, str]]:
    """Facts, capabilities and ceilings of this machine; the ceilings are stored as a run.

    Args:
        budget_s: Seconds for each ceiling.
        sustained_s: Seconds for what each product sustains; 0 for not.

    Returns:
        Heading → name → text.

    Raises:
        BadInput: A budget that is not positive, or no place for the results.
    """
    params = doctor.Params(budget_s=budget_s, sustained_s=sustained_s)
    make_folder(
        output_folder()
    )  # that it cannot be made is told now, and not when all has been measured
    with fitting_threads():  # as runs have them
        machine, device = this_machine(), resolve_device("auto")
    return {
        "machine": _facts(machine),
        "what can be measured here": _capabilities(machine, device),
        f"ceilings of {device}, measured now": _ceilings(params),
    }


def _facts(machine: Machine) -> dict[str, str]:
    facts = {
        "id": machine.machine_id,
        "system": machine.system,
        "cpu": f"{machine.cpu}, {machine.cores} cores",
        "memory": f"{machine.ram_gib} GiB" + _memory_limit(),
        "frequency governor": machine.governor or "not told by this system",
        "python, torch": f"{platform.python_version()}, {machine.torch} with {machine.threads} threads",
        "output": f"{output_folder()}, {free_disk_gib(_existing(output_folder())):.0f} GiB free",
    }
    for index, gpu in enumerate(machine.gpus):
        facts[f"gpu {index}"] = (
            f"{gpu['name']}, {gpu['memory_gib']} GiB, compute capability {gpu['compute_capability']}, driver {machine.driver}"
        )
    return facts if machine.gpus else facts | {"gpu": "none that torch can use"}


def _memory_limit() -> str:
    least = min((limit for limit, _ in memory_limits()), default=psutil.virtual_memory().total)
    allowed = least < psutil.virtual_memory().total
    return (
        f", of which its control groups allow this process {least / 2**30:.3g}" if allowed else ""
    )


def _existing(folder: Path) -> Path:
    while not folder.exists():
        folder = folder.parent
    return folder


def _capabilities(machine: Machine, device: str) -> dict[str, str]:
    told = {f"computes {dtype}": by for dtype, by in machine.dtypes.items()}
    for kind in ATTENTION_KINDS:
        if kind == "own":  # a function of yours
            continue
        told[f"attention {kind}"] = _attention_support(kind, device)
    with resident_peak() as peak:
        pass
    sensors = find_sources()
    for source in sensors.sources:
        told[f"power of {source.of}"] = f"{source.name}, changes every {source.period_s:g} s"
    for kind, reason in sensors.missing.items():
        told[f"power by {kind}"] = f"no: {reason}"
    told["resident peak"] = peak.resident_message or "yes, clear_refs and VmHWM"
    version = flash_attn.found_version()
    told["flash-attn"] = f"version {version}" if version else f"no: {flash_attn.missing()}"
    return told


def _attention_support(kind: str, device: str) -> str:
    x = torch.zeros(1, 1, 16, 16, device=device, dtype=torch.bfloat16)
    try:
        attention.attend(kind, x, x, x, causal=True)
    except Unsupported as error:
        return f"unsupported: {error}"
    except Exception as error:  # a compiler that does not work: telling so is what this is for
        return f"fails: {one_line(error)}"
    return "runs"


def _ceilings(params: doctor.Params) -> dict[str, str]:
    run = sweep.measure(doctor, params, progress=False)
    rows = run.measurements()
    run.finish()
    told = {}
    for _, row in rows[rows["metric"].isin(["ceiling_flops", "ceiling_bytes"])].iterrows():
        unit = "GFLOP/s" if row["metric"] == "ceiling_flops" else "GB/s, read and written"
        ends = (row[name] / 1e9 for name in ("estimate", "low", "high"))
        text = f"{format_with_interval(*ends)} {unit}"
        notes = [
            FLAG_TEXT[Flag(flag)]
            for flag in row["flags"]
            if flag in (Flag.BUSY_MACHINE, Flag.NO_STEADY_STATE)
        ]
        told[row["scope"]] = "; ".join([text, row["message"], *notes])
    for _, row in rows[(rows["metric"] == "case_time") & (rows["status"] != "ok")].iterrows():
        told[row["factors"]["ceiling"]] = f"{row['status']}: {row['message']}"
    return told
