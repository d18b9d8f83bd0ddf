"""Profile the blocks of a model in each call, and its modules and operations in each k-th call.

Within the `with` statement, a profiler replaces `forward` of the timed modules. Hooks would take
four times as long, because `Module.__call__` is faster without hooks. The output of the model
does not change.
"""

import contextlib
import functools
import itertools
from collections.abc import Iterator, Mapping
from typing import Any, Self

import torch
from torch import nn
from torch.profiler import record_function

from nanolib.measurement import BadInput
from nanolib.meters.clock import clock_for, synchronizer
from nanolib.meters.operations import (
    NEAR_ZERO,
    RANGE,
    AttentionWatch,
    Forward,
    Replacement,
    attention_statistics,
    choose_modules,
    is_down_projection,
    operation_name,
    operations_of,
    output_statistics,
    replace_methods,
    torch_profiler,
)
from nanolib.meters.recording import Call, ModuleTime, ProfilingConfig, Trace

__all__ = ["LayerProfiler", "ProfilingConfig", "create_profiler"]

# A call of one of these methods counts as a call of the model.
_ENTRIES = ("forward", "prefill", "decode")
# To read a recorded call takes ten times as long as to record the call.
_MOST_PASSES = 8
_NOTHING = contextlib.nullcontext()
_MODEL = "model"  # Name of the model itself in the rows of a trace.


class LayerProfiler:
    """Time a model's modules within a `with` statement.

    Args:
        model: Any module. The repeated blocks are the members of the module's `ModuleList`s.
        config: Settings of the profiler, `ProfilingConfig.minimal()` by default.
        trace: Trace that receives the rows of the tables `layers`, `statistics` and `ops`, by
            default a new trace.
        fields: Fields of `ProfilingConfig` that differ from `config`, or from
            `ProfilingConfig.custom` without a config. `preallocate_size` is an alias of
            `preallocate_metrics`.

    Example:
        >>> model = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
        >>> with LayerProfiler(model, modules=True, every_kth_token=1) as profiler:
        ...     _ = model(torch.rand(1, 8))
        >>> [found.name for found in profiler.results()]
        ['', '0', '1']
    """

    def __init__(
        self,
        model: nn.Module,
        config: ProfilingConfig | None = None,
        *,
        trace: Trace | None = None,
        **fields,
    ):
        if hasattr(model, "_orig_mod") or getattr(model, "_compiled_call_impl", None):
            raise BadInput("model: a compiled model cannot be profiled; give the eager model")
        if "preallocate_size" in fields:
            fields["preallocate_metrics"] = fields.pop("preallocate_size")
        if config is None:
            config = ProfilingConfig.custom() if fields else ProfilingConfig.minimal()
        self.model, self.config, self.trace = model, config.replace(**fields), trace or Trace()
        self._outer, inner = choose_modules(model)
        self._inner = inner if self.config.modules else {}
        modules = {"": model} | self._outer | self._inner
        self._names = {path: operation_name(path, module) for path, module in modules.items()}
        self._found = {name: ModuleTime(name) for name in modules}
        self._device = next((p.device for p in model.parameters()), torch.device("cpu"))
        self._clock, self._synchronize = clock_for(self._device), synchronizer(self._device)
        self._restore = contextlib.ExitStack()
        turns = self.config.turns
        later = ["times" if turn == "operations" else turn for turn in turns]
        # Each k-th call has a turn, and all turns come in order.
        self._turns = itertools.chain(_MOST_PASSES * turns, itertools.cycle(later))
        self._numbers = itertools.count()
        self._call = Call(-1)
        self._open = []  # names of the running modules, outer ones first
        self._unread = []  # calls whose times and statistics stay on the device
        self._profiled = []  # calls whose operations torch's profiler has recorded

    def __enter__(self) -> Self:
        entries = [
            (self.model, name, self._wrap_entry(getattr(self.model, name)))
            for name in _ENTRIES
            if callable(getattr(self.model, name, None))
        ]
        self._detailed = self._timed_modules(self._inner)
        timed = [*entries, *self._timed_modules(self._outer)]
        self._restore.enter_context(replace_methods(timed))
        return self

    def __exit__(self, *exception):
        self._restore.close()
        self.results()

    def _wrap_entry(self, entry: Forward) -> Forward:
        running, now, config = self._open, self._clock.now, self.config
        # Calls that wait to be read keep memory, and on a GPU also an event for each moment.
        most = config.preallocate_metrics if config.batch_db_commits else 1

        @functools.wraps(entry)
        def watched(*args, **kwargs):
            if running:  # A method of the model may call another method.
                return entry(*args, **kwargs)
            call = self._call = Call(next(self._numbers))
            if call.number % config.every_kth_token == 0:
                call.turn = next(self._turns, "")
            running.append("")
            try:
                with self._look_closely(call) if call.turn else _NOTHING:
                    begin = now()
                    out = entry(*args, **kwargs)
                    call.marks.append(("", None, begin, now()))
            finally:
                running.clear()
            self._unread.append(call)
            if len(self._unread) >= most:
                self.flush()
            return out

        return watched

    @contextlib.contextmanager
    def _look_closely(self, call: Call) -> Iterator[None]:
        """Record a detailed call."""
        around = _NOTHING
        if call.turn == "operations":
            around = call.profile = torch_profiler(self._device)
        elif call.turn == "values" and self.config.deep_profiling:
            around = AttentionWatch(self._add_attention_statistics)
        with around, replace_methods(self._detailed):
            yield

    def _timed_modules(self, modules: Mapping[str, nn.Module]) -> list[Replacement]:
        return [
            (module, "forward", self._wrap_forward(name, module.forward))
            for name, module in modules.items()
        ]

    def _wrap_forward(self, name: str, forward: Forward) -> Forward:
        """Wrap a module's `forward`. In plain calls, only modules that the model calls count."""
        running, now = self._open, self._clock.now

        def timed(*args, **kwargs):
            call = self._call
            if not running or (len(running) > 1 and not call.turn):
                return forward(*args, **kwargs)
            caller = running[-1]
            with _NOTHING if call.profile is None else record_function(RANGE + name):
                running.append(name)
                begin = now()
                out = forward(*args, **kwargs)
                call.marks.append((name, caller, begin, now()))
                running.pop()
            if call.turn == "values" and _is_summable(out):
                self._add_statistics(name, args, kwargs, out)
            return out

        return timed

    def _add_statistics(self, name: str, args, kwargs, out: torch.Tensor):
        """Compute statistics of a module's call, without waiting for the device."""
        if self.config.capture_activations:
            self._add(name, output_statistics(out))
        x = next((x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor)), None)
        if self.config.deep_profiling and is_down_projection(name) and _is_summable(x):
            share = (x.detach().abs() < NEAR_ZERO).mean(dtype=torch.float32)
            self._add(self._layer(name), {"mlp_kill_ratio": share})

    def _add_attention_statistics(self, inputs: dict[str, Any]):
        self._add(self._layer(""), attention_statistics(inputs))

    def _add(self, name: str, statistics: Mapping[str, torch.Tensor]):
        self._call.values += [(name, *statistic) for statistic in statistics.items()]

    def _layer(self, name: str) -> str:
        """Return the name of the outermost running module inside the model, or else `name`."""
        return self._open[1] if len(self._open) > 1 else name

    def flush(self) -> None:
        """Wait once for the device, read times and statistics, and collect their rows."""
        calls, self._unread = self._unread, []
        self._synchronize()
        for call in calls:
            for name, caller, begin, end in call.marks:
                found = self._found[name]
                if found.inside is None:
                    found.inside = caller
                # Computing statistics and torch's profiler would lengthen these times.
                if call.turn in ("", "times"):
                    ms = self._clock.ms(begin, end)
                    found.calls_ms.append(ms)
                    self.trace.rows["layers"].append((call.number, name or _MODEL, round(1e6 * ms)))
        values = [(call.number, *value) for call in calls for value in call.values]
        # All values come from the device in one copy.
        numbers = torch.stack([x for *_, x in values]).tolist() if values else []
        for (number, name, statistic, _), value in zip(values, numbers, strict=True):
            self.trace.rows["statistics"].append((number, name or _MODEL, statistic, value))
        self._profiled += [call for call in calls if call.profile is not None]

    def results(self) -> list[ModuleTime]:
        """Return the recorded data of each module, outer modules first."""
        self.flush()
        on_gpu = self._device.type == "cuda"
        for call in self._profiled:
            spent = operations_of(call.profile.events(), self._names, on_gpu)
            for (layer, operation), ns in spent.items():
                self._found[layer].operations[operation] += ns / 1e6
                self.trace.rows["ops"].append((call.number, layer, operation, ns))
            for name, caller, *_ in call.marks:
                self._found[name].passes += caller == ""
        self._profiled = []
        return [*self._found.values()]


def _is_summable(x) -> bool:
    """Return whether torch computes statistics of a value. torch cannot add 8-bit numbers."""
    is_tensor = isinstance(x, torch.Tensor) and x.is_floating_point()
    return is_tensor and x.element_size() > 1 and x.numel() > 0


create_profiler = LayerProfiler
