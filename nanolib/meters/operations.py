"""Choose modules to time, time operations with torch's profiler, and sample attention weights.

Each timed module opens a range of torch's profiler. An operation that a module calls directly gets
the name of the module, such as `q_proj`. If a container calls the operation, the name depends on
the operation. For example, an addition is `residual`. An unknown operation is `other`.
"""

import contextlib
import json
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode
from torch.profiler import ProfilerActivity, profile

from nanolib.meters.flops import kept_pairs

Forward = Callable[..., Any]
Replacement = tuple[nn.Module, str, Forward]

RANGE = "nanolib module "  # Start of the name of a range. The name ends with the module's name.
_QUERIES = 64  # Largest number of queries in a sample of attention weights.
_SAMPLE = 2048  # Largest number of elements in the sample of an output.
NEAR_ZERO = 1e-2  # Smaller activations and attention weights count as near zero.

# Families of models use these names in the attention and in the MLP.
_AMBIGUOUS = ("c_proj", "dense")
_DOWN = r"(^|\.)(down|down_proj|mlp\.c_proj|mlp\.fc2|(?<!attention\.)output\.dense)$"
_BY_OPERATION = {
    "scaled_dot_product_attention": "attention_fused",
    "silu": "activation",
    "gelu": "activation",
    "add": "residual",
    "copy_": "cache",
}


def choose_modules(model: nn.Module) -> tuple[dict[str, nn.Module], dict[str, nn.Module]]:
    """Choose the modules to time in each call, and the modules to time in detailed calls.

    Returns:
        Two maps, name → module. The first map has the model's repeated blocks, which are the
        members of the model's `ModuleList`s, and the leaf modules outside blocks. The second map
        has the modules inside blocks.
    """
    inside, outer, inner = (), {}, {}  # `inside` has the starts of the names of the second map.
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList):
            inside += tuple(f"{name}.{key}.".lstrip(".") for key, _ in module.named_children())
        elif name.startswith(inside):
            inner[name] = module
        elif f"{name}." in inside or (name and not any(module.children())):
            outer[name] = module
    return outer, inner


@contextlib.contextmanager
def replace_methods(functions: Sequence[Replacement]) -> Iterator[None]:
    """Replace methods of modules within the `with` statement.

    `Module.__setattr__` is slow, so nanolib does not use it.

    Args:
        functions: Module, name of its method, and the function that replaces the method.
    """
    before = [vars(module).get(name) for module, name, _ in functions]
    for module, name, function in functions:
        vars(module)[name] = function
    try:
        yield
    finally:
        for (module, name, _), own in zip(functions, before, strict=True):
            if own is None:
                del vars(module)[name]  # The module then uses the method of its class.
            else:
                vars(module)[name] = own


def operation_name(path: str, module: nn.Module) -> str:
    """Return the name for the operations of a module, or an empty string for a container.

    The name is the last part of the path, such as `q_proj`. If this part is ambiguous, the name is
    the path inside the block, such as `mlp.c_proj`.
    """
    kind = type(module).__name__.lower()
    if "norm" in kind:
        return "norm"
    if "rotary" in kind:
        return "rope"
    if any(module.children()):
        return ""
    name = path.rpartition(".")[2]
    return re.split(r"\.\d+\.", path)[-1] if name in _AMBIGUOUS else name


def is_down_projection(path: str) -> bool:
    """Return whether a module is the last linear layer of an MLP, according to its path."""
    return re.search(_DOWN, path) is not None


def operations_of(
    events: Iterable[Any], names: Mapping[str, str], on_gpu: bool
) -> Counter[tuple[str, str]]:
    """Add up the time of the operations of a profiled call.

    Args:
        events: Events of `torch.profiler.profile`.
        names: Path of each module → name of its operations, from `operation_name`.
        on_gpu: Whether to use the time of kernels on the GPU instead of CPU time.

    Returns:
        Name of the outermost timed module and name of the operation → time in ns.
    """
    spent = Counter()
    for event in events:
        caller = event.cpu_parent
        if caller is None or not caller.name.startswith(RANGE) or event.name.startswith(RANGE):
            continue  # The time of an outer operation includes its inner operations.
        operation = names[caller.name.removeprefix(RANGE)]
        while caller is not None:
            if caller.name.startswith(RANGE):
                outermost = caller.name.removeprefix(RANGE)
            caller = caller.cpu_parent
        name = event.name.removeprefix("aten::")
        if name == "scaled_dot_product_attention" or not operation:
            operation = _BY_OPERATION.get(name, "other")
        microseconds = event.device_time_total if on_gpu else event.cpu_time_total
        spent[outermost, operation] += round(1e3 * microseconds)
    return spent


class AttentionWatch(TorchFunctionMode):
    """Call `look` with the named arguments of each call of `scaled_dot_product_attention`."""

    def __init__(self, look: Callable[[dict[str, Any]], None]):
        super().__init__()
        self._look = look

    def __torch_function__(self, func, types, args=(), kwargs=None):
        """Call the function, then `look`."""
        out = func(*args, **kwargs or {})
        if func is scaled_dot_product_attention:
            self._look(dict(zip(_ARGUMENTS, args, strict=False)) | (kwargs or {}))
        return out


_ARGUMENTS = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")


def sampled_weights(inputs: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the attention weights of at most 64 evenly spaced queries.

    Fused kernels do not return these weights.

    Args:
        inputs: Arguments of `scaled_dot_product_attention` by name.

    Returns:
        Weights in float32, shape [..., queries, kv_len], and a mask of the kept pairs.
    """
    q, k = (inputs[name].detach().float() for name in ("query", "key"))
    q_len, kv_len = q.shape[-2], k.shape[-2]
    sample = torch.arange(0, q_len, -(-q_len // _QUERIES), device=q.device)
    mask = inputs.get("attn_mask")
    if inputs.get("is_causal"):
        mask = torch.arange(kv_len, device=q.device) <= sample[:, None]
    elif mask is None:
        mask = torch.ones(1, kv_len, dtype=torch.bool, device=q.device)
    else:
        mask = mask.expand(*mask.shape[:-2], q_len, kv_len)[..., sample, :]
    kept = kept_pairs(mask)
    mask = torch.where(kept, 0.0 if mask.dtype == torch.bool else mask.float(), -torch.inf)
    options = {name: inputs[name] for name in ("scale", "enable_gqa") if name in inputs}
    # This operation computes attention without a fused kernel, and also returns the weights.
    math = torch.ops.aten._scaled_dot_product_attention_math
    weights = math(q[..., sample, :], k, k, mask, **options)[1]
    return weights, kept.expand_as(weights)


def attention_statistics(inputs: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Compute mean entropy in nats, mean largest weight, and the share of weights near zero.

    Masked pairs do not count.

    Args:
        inputs: Arguments of `scaled_dot_product_attention` by name.
    """
    weights, is_kept = sampled_weights(inputs)
    return {
        "attention_entropy": torch.special.entr(weights).sum(dim=-1).mean(),
        "attention_max_weight": weights.amax(dim=-1).mean(),
        "attention_sparsity": (is_kept & (weights < NEAR_ZERO)).sum() / is_kept.sum(),
    }


def output_statistics(out: torch.Tensor) -> dict[str, torch.Tensor]:
    """Compute statistics of an output, without waiting for the device.

    All statistics except the largest magnitude use evenly spaced elements, at most 2,048.

    Args:
        out: Output with at least one element, any shape.

    Returns:
        Mean magnitude, standard deviation, largest magnitude and share near zero, in float32.
    """
    x = out.detach().reshape(-1)
    sample = x[:: -(-len(x) // _SAMPLE)].float()
    size = sample.abs()
    return {
        "mean_abs": size.mean(),
        "sd": sample.std(correction=min(1, len(sample) - 1)),
        "max_abs": torch.linalg.vector_norm(x, torch.inf).float(),
        "near_zero": (size < NEAR_ZERO).mean(dtype=torch.float32),
    }


def torch_profiler(device: str | torch.device, **options: bool) -> profile:
    """Make torch's profiler for a device, with a tracer that prints nothing."""
    # With a lower log level, the tracer prints a line at each start and each end.
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    activities = [ProfilerActivity.CPU]
    if torch.device(device).type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    return profile(activities=activities, **options)


def write_trace(call: Callable[[], object], path: Path, device: str | torch.device = "cpu") -> None:
    """Write a Chrome trace of a few calls, for chrome://tracing or Perfetto.

    Args:
        call: Function to run. The trace leaves out the first call, because that call is cold.
        path: Path of the `.json` file to write, in an existing folder.
        device: Device on which the function computes.
    """
    call()
    with torch_profiler(device, record_shapes=True, profile_memory=True) as found:
        for _ in range(3):
            call()
    found.export_chrome_trace(str(path))
    trace = json.loads(path.read_text(encoding="utf-8"))
    for name in ("host_name", "traceName"):  # A trace must not name the machine or a folder.
        trace.pop(name, None)
    path.write_text(json.dumps(trace), encoding="utf-8")
