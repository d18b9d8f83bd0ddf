"""Profile the blocks of a model in each call, and its modules and operations in each k-th call.

Within the `with` statement, a profiler replaces `forward` of the timed modules. Hooks would take
four times as long, because `Module.__call__` is faster without hooks. The output of the model
does not change.
"""

import contextlib
import functools
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, Self

import torch
from torch import nn
from torch.profiler import record_function

from nanolib.measurement import BadInput
from nanolib.meters.layers.operations import (
    RANGE,
    AttentionWatch,
    Forward,
    attention_statistics,
    choose_modules,
    find_blocks,
    operations_of,
    replace_methods,
    role_of,
    torch_profiler,
    wrap_forwards,
)
from nanolib.meters.layers.recording import (
    Call,
    DeepPass,
    ModuleTime,
    ProfilingConfig,
    Stopwatch,
    sample_of,
    summarize,
)
from nanolib.meters.trace import Trace

# A call of one of these methods counts as a call of the model.
_ENTRIES = ("forward", "prefill", "decode")
# Calls that wait to be read keep memory, and on a GPU also an event for each moment.
_READ_S = 0.4
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
        fields: Fields of `ProfilingConfig.custom`, instead of `config`. `preallocate_size` is an
            alias of `preallocate_metrics`.

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
        **fields: Any,
    ) -> None:
        if fields and config is not None:
            raise BadInput(f"{next(iter(fields))}: set this field in the config, or give no config")
        if "preallocate_size" in fields:
            fields["preallocate_metrics"] = fields.pop("preallocate_size")
        if hasattr(model, "_orig_mod") or getattr(model, "_compiled_call_impl", None):
            raise BadInput("model: a compiled model cannot be profiled; give the eager model")
        if config is None:
            config = ProfilingConfig.custom(**fields) if fields else ProfilingConfig.minimal()
        self.model, self.config, self.trace = model, config.replace(), trace or Trace()
        blocks = find_blocks(model)
        every_nth = self.config.every_nth_layer if self.config.modules else 0
        self._outer, self._inner = choose_modules(model, blocks, every_nth)
        modules = {"": model} | self._outer | self._inner
        self._roles = {name: role_of(name, module) for name, module in modules.items()}
        kinds = dict.fromkeys(blocks, "block") | {"": "model"}
        self._found = {
            name: ModuleTime(name, kinds.get(name, type(module).__name__))
            for name, module in modules.items()
        }
        self._device = next((p.device for p in model.parameters()), torch.device("cpu"))
        self._watch = Stopwatch(self._device)
        self._restore = contextlib.ExitStack()
        self._call = Call(-1)
        self._open = []  # names of the running modules, outer ones first
        self._unread = []  # calls whose times and statistics stay on the device
        self._profiled = []  # calls whose operations torch's profiler has recorded
        self._waiting = 0  # number of unread detailed calls
        self._read_s = time.monotonic()
        self._number = 0

    def __enter__(self) -> Self:
        self._detailed = wrap_forwards(self._outer | self._inner, self._time_in_detail)
        entries = [
            (self.model, name, self._wrap_entry(getattr(self.model, name)))
            for name in _ENTRIES
            if hasattr(self.model, name)
        ]
        timed = wrap_forwards(self._outer, self._time)
        self._restore.enter_context(replace_methods([*timed, *entries]))
        return self

    def __exit__(self, *exception: object) -> None:
        self._restore.close()
        self.results()

    def _wrap_entry(self, entry: Forward) -> Forward:
        running, now, config = self._open, self._watch.now, self.config
        every = config.every_kth_token if config.has_details else 0

        @functools.wraps(entry)
        def watched(*args: Any, **kwargs: Any) -> Any:
            if running:  # A method of the model may call another method.
                return entry(*args, **kwargs)
            call = self._call = Call(self._number)
            is_detailed = every and self._number % every == 0
            self._number += 1
            running.append("")
            try:
                with self._look_closely(call) if is_detailed else _NOTHING:
                    begin = now()
                    out = entry(*args, **kwargs)
                    call.marks.append(("", None, begin, now(), 0, len(call.pauses)))
            finally:
                running.clear()
            self._unread.append(call)
            self._waiting += bool(is_detailed)
            is_full = self._waiting >= config.preallocate_metrics
            is_due = time.monotonic() - self._read_s > _READ_S
            if is_full or is_due or not config.batch_db_commits:
                self.flush()
            return out

        return watched

    @contextlib.contextmanager
    def _look_closely(self, call: Call) -> Iterator[None]:
        """Record a call in detail.

        In deep mode, torch's profiler records every other detailed call, up to a limit.
        """
        around = _NOTHING
        if self.config.deep_profiling:
            turn = call.number // self.config.every_kth_token
            if turn % 2 and turn < 2 * _MOST_PASSES:
                around = call.profile = torch_profiler(self._device)
            else:
                around = AttentionWatch(self._add_attention_statistics)
        with around, replace_methods(self._detailed):
            yield

    def _time(self, name: str, forward: Forward) -> Forward:
        """Wrap the `forward` of a module for all calls. Plain calls have no other overhead."""
        running, now = self._open, self._watch.now

        def timed(*args: Any, **kwargs: Any) -> Any:
            if len(running) != 1:  # No call of the model is running, or a block calls this module.
                return forward(*args, **kwargs)
            running.append(name)
            begin = now()
            out = forward(*args, **kwargs)
            self._call.marks.append((name, "", begin, now(), 0, 0))
            running.pop()
            return out

        return timed

    def _time_in_detail(self, name: str, forward: Forward) -> Forward:
        """Wrap a module's `forward` for detailed calls. Times exclude computing statistics."""
        running, now = self._open, self._watch.now

        def timed(*args: Any, **kwargs: Any) -> Any:
            call, caller = self._call, running[-1]
            with _NOTHING if call.profile is None else record_function(RANGE + name):
                running.append(name)
                first, begin = len(call.pauses), now()
                out = forward(*args, **kwargs)
                end = now()
                call.marks.append((name, caller, begin, end, first, len(call.pauses)))
                running.pop()
            if call.profile is None:
                self._add_statistics(name, args, kwargs, out)
                call.pauses.append((end, now()))
            return out

        return timed

    def _add_statistics(self, name: str, args: Any, kwargs: Any, out: Any) -> None:
        """Compute statistics of an output, without waiting for the device."""
        if not isinstance(out, torch.Tensor) or not out.is_floating_point() or not out.numel():
            return
        if self.config.capture_activations:
            self._call.outputs[name] = sample_of(out)
        role = self._roles[name]
        if not self.config.deep_profiling or role not in ("norm", "down"):
            return
        x = next((x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor)), None)
        if x is None:
            return
        with torch.no_grad():
            if role == "norm":
                ratio = out.float().var(dim=-1).mean() / x.float().var(dim=-1).mean()
                self._note(name, "norm_variance_ratio", ratio)
            else:
                is_killed = x.abs() < self.config.near_zero
                self._note(name, "mlp_kill_ratio", is_killed.float().mean())

    def _add_attention_statistics(self, inputs: dict[str, Any]) -> None:
        begin = self._watch.now()
        with torch.no_grad():
            for statistic, value in attention_statistics(inputs, self.config.near_zero).items():
                self._note("", statistic, value)
        self._call.pauses.append((begin, self._watch.now()))

    def _note(self, name: str, statistic: str, value: torch.Tensor) -> None:
        """Add a value to the outermost running module inside the model, or else to `name`."""
        layer = self._open[1] if len(self._open) > 1 else name
        self._call.values.append((layer, statistic, value))

    def flush(self) -> None:
        """Wait once for the device, read times and statistics, and collect their rows."""
        calls, self._unread, self._waiting = self._unread, [], 0
        self._read_s = time.monotonic()
        self._watch.synchronize()
        rows = self.trace.rows
        rows["layers"] += [row for call in calls for row in self._read_times(call)]
        rows["statistics"] += self._read_statistics(calls)
        self._profiled += [call for call in calls if call.profile is not None]

    def _read_times(self, call: Call) -> Iterator[tuple[int, str, int]]:
        """Add the times of a call's modules to the results, and make their rows."""
        for name, caller, begin, end, first, last in call.marks:
            found, ns = self._found[name], self._watch.nanoseconds(begin, end)
            for pause in call.pauses[first:last]:
                ns -= self._watch.nanoseconds(*pause)
            if found.inside is None:
                found.inside = caller
            if call.profile is None:
                found.calls_ms.append(ns / 1e6)
            yield call.number, name or _MODEL, ns

    def _read_statistics(self, calls: Sequence[Call]) -> Iterator[tuple[int, str, str, float]]:
        """Add the statistics of all calls to the results, and make their rows."""
        values = [(call.number, *value) for call in calls for value in call.values]
        outputs = {(call.number, name): out for call in calls for name, out in call.outputs.items()}
        values += [(*key, *value) for key, *value in summarize(outputs, self.config.near_zero)]
        for number, name, statistic, value in values:
            self._found[name].values[statistic].append(float(value))
            yield number, name or _MODEL, statistic, float(value)

    def results(self) -> list[ModuleTime]:
        """Return the recorded data of each module, outer modules first."""
        self.flush()
        for call in self._profiled:
            spent = Counter()
            events = call.profile.events()
            for layer, operation, ns in operations_of(events, self._roles, self._watch.is_cuda):
                spent[layer, operation] += ns
            self.trace.rows["ops"] += [
                (call.number, layer or _MODEL, operation, ns)
                for (layer, operation), ns in spent.items()
            ]
            passes = {
                name: DeepPass(self._watch.nanoseconds(begin, end) / 1e6, {})
                for name, caller, begin, end, *_ in call.marks
                if caller == ""
            }
            for (layer, operation), ns in spent.items():
                passes[layer].operations[operation] = ns / 1e6
            for layer, found in passes.items():
                self._found[layer].passes.append(found)
        self._profiled = []
        return [*self._found.values()]


create_profiler = LayerProfiler
