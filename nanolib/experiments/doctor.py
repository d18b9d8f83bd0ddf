"""Report the capabilities and the peak rates of this machine, for `nano doctor`."""

import platform
import shutil
import sys

import psutil
import pydantic
import torch

from nanolib.config import ATTENTION_KINDS
from nanolib.measurement import Flag, Unsupported, one_line
from nanolib.meters.machine import (
    Machine,
    limit_threads,
    memory_limits,
    resolve_device,
    this_machine,
)
from nanolib.meters.memory import resident_peak
from nanolib.meters.power import find_sources
from nanolib.models import attention
from nanolib.models.attention.dense import flash_attn_version
from nanolib.numbers import format_with_interval
from nanolib.paths import make_folder, output_folder
from nanolib.run import case as shared
from nanolib.run import sweep
from nanolib.run.case import Case
from nanolib.run.peaks import PRODUCTS, ceiling_cases, no_product


class Params(shared.Params):
    """Parameters of `nano doctor`.

    Attributes:
        dtypes: Dtypes of the matrix products. nanolib adds tf32 and FP8 if the device supports
            these dtypes.
    """

    NAME = "doctor"

    dtypes: shared.Dtypes = pydantic.Field(["float32", "bfloat16", "float16"])


def cases(params: Params) -> list[Case]:
    """List the cases of peak rates."""
    device = resolve_device(params.device)
    kinds = [*params.dtypes, *(kind for kind in PRODUCTS if not no_product(kind, device))]
    return ceiling_cases(device, kinds, params.budget_s)


def examine(budget_s: float) -> dict[str, dict[str, str]]:
    """Return facts, capabilities and peak rates of this machine, and store the rates as a run.

    Args:
        budget_s: Time limit of each peak rate, s.

    Returns:
        Text of each fact, by heading and name.

    Raises:
        BadInput: An argument is not valid, or the output folder cannot be created.
    """
    params = Params(budget_s=budget_s)
    # nanolib creates the folder first, so that an error appears before any measurement.
    make_folder(output_folder())
    with limit_threads():  # Each run limits its threads in the same way.
        machine, device = this_machine(), resolve_device("auto")
    return {
        "machine": _facts(machine),
        "what this machine can measure": _capabilities(machine, device),
        f"peak rates of {device}, measured now": _ceilings(params),
    }


def _facts(machine: Machine) -> dict[str, str]:
    ram, folder = psutil.virtual_memory().total, output_folder()
    allowed = min([ram, *(limit for limit, _ in memory_limits())])
    limit = f" (control groups allow {allowed / 2**30:.3g} GiB)"
    facts = {
        "id": machine.machine_id,
        "system": machine.system,
        "cpu": f"{machine.cpu}, {machine.cores} cores",
        "memory": f"{machine.ram_gib} GiB" + (limit if allowed < ram else ""),
        "frequency governor": machine.governor or "not reported by this system",
        "python, torch": f"{platform.python_version()}, {machine.torch}, {machine.threads} threads",
        "output": f"{folder}, {shutil.disk_usage(folder).free / 2**30:.0f} GiB free",
    }
    for index, gpu in enumerate(machine.gpus):
        facts[f"gpu {index}"] = (
            f"{gpu['name']}, {gpu['memory_gib']} GiB, "
            f"compute capability {gpu['compute_capability']}, driver {machine.driver}"
        )
    return facts if machine.gpus else facts | {"gpu": "none that PyTorch can use"}


def _capabilities(machine: Machine, device: str) -> dict[str, str]:
    found = {f"computes {dtype}": by for dtype, by in machine.dtypes.items()}
    for kind in ATTENTION_KINDS:
        if kind != "own":  # This attention needs the user's function.
            found[f"attention {kind}"] = _attention_support(kind, device)
    sensors = find_sources()
    for source in sensors.sources:
        found[f"power of {source.of}"] = f"{source.name}, updated every {source.period_s:g} s"
    found |= {f"power by {kind}": f"no: {reason}" for kind, reason in sensors.missing.items()}
    with resident_peak() as peak:
        pass
    found["resident peak"] = peak.resident_message or "yes, clear_refs and VmHWM"
    return found


def _attention_support(kind: str, device: str) -> str:
    x = torch.zeros(1, 1, 16, 16, device=device, dtype=torch.bfloat16)
    try:
        attention.attend(kind, x, x, x, causal=True)
    except Unsupported as error:
        return f"unsupported: {error}"
    except Exception as error:  # A compiler can raise any exception.
        return f"fails: {one_line(error)}"
    return f"runs (version {flash_attn_version()})" if kind == "flash_attn" else "runs"


def _ceilings(params: Params) -> dict[str, str]:
    run = sweep.measure(sys.modules[__name__], params)
    rows = run.measurements()
    run.finish()
    found = {}
    for row in rows.itertuples():
        if row.metric == "case_duration":
            if row.status != "ok":
                found[row.factors["ceiling"]] = f"{row.status}: {row.message}"
            continue
        unit = "GFLOP/s" if row.metric == "ceiling_flops" else "GB/s, read and written"
        rate = format_with_interval(row.estimate / 1e9, row.low / 1e9, row.high / 1e9)
        parts = [f"{rate} {unit}", row.message, *(Flag(flag).text for flag in row.flags)]
        found[row.scope] = "; ".join(filter(None, parts))
    return found
