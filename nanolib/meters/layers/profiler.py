"""Where a model's time goes: blocks in every call; modules, activations and operations in each k-th.

`forward` of the timed modules is replaced while a profiler is entered. Hooks would do the same, but
cost four times as much, since any hook leaves `Module.__call__`'s fast path. The output of the model
is the same to the last bit.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, Self

import torch
from torch import nn
from torch.profiler import record_function

from nanolib.measurement import BadInput
from nanolib.meters.layers.operations import (
    ATTENTION_STATISTICS,
    RANGE,
    AttentionWatch,
    attention_statistics,
    operations_of,
    role_of,
)
from nanolib.meters.layers.profiling import ProfilingConfig
from nanolib.meters.layers.recording import (
    STATISTICS,
    Call,
    ModuleTime,
    Stopwatch,
    pass_of,
    summarize_outputs,
)
from nanolib.meters.layers.trace import torch_profiler
from nanolib.meters.sink import Sink

_SAMPLE = 2048  # elements of an output
_ENTRIES = ("forward", "prefill", "decode")  # a call of the model is a call of one of these
_READ_S = 0.4  # a kill loses the rows of less than a second
_MOST_PASSES = 8  # torch's profiler takes ten times as long to read a pass as to record it
_NOTHING = contextlib.nullcontext()


_Wrapping = tuple[nn.Module, str, Callable[..., Any]]


class LayerProfiler:
    """Times a model's modules while it is entered.

    Args:
        model: Any module; its repeated blocks are the members of its `ModuleList`s.
        config: What to record; `ProfilingConfig.minimal()` by default.
        sink: Where rows go (`layers`, `statistics`, `ops`); `results` has them too.
        fields: Of `ProfilingConfig.custom`, instead of `config`. `preallocate_size` is another name
            of `preallocate_metrics`.

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
        sink: Sink | None = None,
        **fields: Any,
    ) -> None:
        if fields and config is not None:
            raise BadInput(f"{next(iter(fields))}: give it in the config, or without one")
        if "preallocate_size" in fields:
            fields["preallocate_metrics"] = fields.pop("preallocate_size")
        if config is None:
            config = ProfilingConfig.custom(**fields) if fields else ProfilingConfig.minimal()
        self.model, self.config, self._sink = model, config.replace(), sink
        self._timed = list(_timed_modules(model, self.config))
        self._roles = [role_of(name, module) for name, _, module in self._timed]
        self._device = next((p.device for p in model.parameters()), torch.device("cpu"))
        self._watch = Stopwatch(self._device)
        self._blocks = [name for name, kind, _ in self._timed if kind == "block"]
        self._outer: list[_Wrapping] = []  # the model, its blocks, what is next to them
        self._inner: list[_Wrapping] = []  # what is in the blocks, in close calls only
        self._call: Call | None = None
        self._open: list[int] = []  # indices of the modules that are running
        self._unread: list[Call] = []
        self._read_s = time.monotonic()
        self._read: list[Call] = []
        self._number = 0

    def __enter__(self) -> Self:
        for at, (_, _, module) in enumerate(self._timed):
            for name in _ENTRIES if at == 0 else ("forward",):
                if name in vars(module):
                    kind = type(module).__name__
                    raise BadInput(
                        f"model: {kind}.{name} is wrapped; leave the other profiler first"
                    )
        for name in _ENTRIES:
            if hasattr(self.model, name):
                entry = self._watched_entry(getattr(self.model, name))
                self._outer.append((self.model, name, entry))
        for at, (name, _, module) in enumerate(self._timed[1:], start=1):
            is_inner = any(name.startswith(f"{block}.") for block in self._blocks)
            wrapped = self._inner if is_inner else self._outer
            wrapped.append((module, "forward", self._watched(at, module.forward)))
        _wrap(self._outer)
        return self

    def __exit__(self, *exception: object) -> None:
        _unwrap(self._outer)
        self._outer, self._inner = [], []
        self.flush()
        self._read_passes()

    def _watched(self, at: int, forward: Callable[..., Any]) -> Callable[..., Any]:
        mark, opened = self._watch.mark, self._open

        def watched(*args: Any, **kwargs: Any) -> Any:
            call = self._call
            if call is None or (len(opened) > 1 and not call.close):
                return forward(*args, **kwargs)  # not in a call of the model, or inside a block
            opened.append(at)
            begin = mark()
            try:
                with _NOTHING if call.profile is None else record_function(f"{RANGE}{at}"):
                    out = forward(*args, **kwargs)
            finally:
                end = mark()
                opened.pop()
            call.marks.append((at, opened[-1], begin, end))
            if call.close and call.profile is None:
                self._look(call, at, [*args, *kwargs.values()], out)
            return out

        return watched

    def _watched_entry(self, entry: Callable[..., Any]) -> Callable[..., Any]:
        mark = self._watch.mark

        @functools.wraps(entry)
        def watched(*args: Any, **kwargs: Any) -> Any:
            if self._call is not None:  # one entry calls another
                return entry(*args, **kwargs)
            call = self._call = self._new_call()
            inner = self._inner if call.close else []
            around = call.profile or _NOTHING
            if call.close and self.config.deep_profiling and call.profile is None:
                around = AttentionWatch(self._look_at_attention)
            _wrap(inner)
            self._open.append(0)
            begin = mark()
            try:
                with around:
                    out = entry(*args, **kwargs)
            finally:
                end = mark()
                self._open.pop()
                self._call = None
                _unwrap(inner)
            call.marks.append((0, -1, begin, end))
            self._unread.append(call)
            waiting = sum(call.close for call in self._unread)
            is_full = waiting >= self.config.preallocate_metrics
            is_due = time.monotonic() - self._read_s > _READ_S
            if is_full or is_due or not self.config.batch_db_commits:
                self.flush()
            return out

        return watched

    def _new_call(self) -> Call:
        """In deep mode, close calls take turns: one looks at numbers, torch's profiler records the next."""
        turn, rest = divmod(self._number, self.config.every_kth_token)
        call = Call(self._number, close=self.config.looks and rest == 0)
        self._number += 1
        is_due = call.close and turn % 2 == 1 and turn < 2 * _MOST_PASSES
        if is_due and self.config.deep_profiling:
            call.profile = torch_profiler(self._device)
        return call

    def _look(self, call: Call, at: int, given: list[Any], out: Any) -> None:
        """Note numbers of an output; nothing waits for the device."""
        if not isinstance(out, torch.Tensor) or not out.is_floating_point() or not out.numel():
            return
        with self._watch.paused(), torch.no_grad():
            if self.config.capture_activations:
                flat = out.detach().reshape(-1)
                sample = flat[:: -(-len(flat) // _SAMPLE)].to(torch.float32, copy=True)
                call.outputs[at] = (sample, *torch.aminmax(flat))
            x = next((x for x in given if isinstance(x, torch.Tensor)), None)
            if not self.config.deep_profiling or x is None:
                return
            layer = self._open[1] if len(self._open) > 1 else at
            if self._roles[at] == "norm":
                ratio = out.float().var(dim=-1).mean() / x.float().var(dim=-1).mean()
                call.looked.append((layer, "norm_variance_ratio", ratio))
            if self._roles[at] == "down":
                killed = (x.abs() < self.config.near_zero).float().mean()
                call.looked.append((layer, "mlp_kill_ratio", killed))

    def _look_at_attention(self, inputs: dict[str, Any]) -> None:
        with self._watch.paused(), torch.no_grad():
            values = attention_statistics(inputs, self.config.near_zero)
            layer = self._open[1] if len(self._open) > 1 else 0
            for name, value in zip(ATTENTION_STATISTICS, values, strict=True):
                self._call.looked.append((layer, name, value))

    def flush(self) -> None:
        """Read marks and statistics, and hand their rows to the sink; waits for the device once."""
        calls, self._unread, self._read_s = self._unread, [], time.monotonic()
        self._watch.settle()
        for call in calls:
            for at, outer, begin, end in call.marks:
                call.times.append((at, outer, self._watch.nanoseconds(begin, end)))
            call.marks.clear()
            call.looked = [(layer, name, float(value)) for layer, name, value in call.looked]
            if call.outputs:
                table = summarize_outputs([*call.outputs.values()], self.config.near_zero).tolist()
                call.statistics = dict(zip(call.outputs, table, strict=True))
                call.outputs.clear()
            if self._sink is not None:
                self._hand_over(call, self._sink)
        self._watch.forget()
        self._read += calls
        if self._sink is not None and not self.config.batch_db_commits:
            self._sink.flush()

    def _hand_over(self, call: Call, sink: Sink) -> None:
        number = call.number
        sink.put("layers", [(number, self._name(at), ns) for at, _, ns in call.times])
        rows = [(number, self._name(at), sink.name(name), x) for at, name, x in call.looked]
        for at, values in call.statistics.items():
            for name, value in zip(STATISTICS, values, strict=True):
                if value == value:  # NaN: the spread of one element
                    rows.append((number, self._name(at), sink.name(name), value))
        sink.put("statistics", rows)

    def _name(self, at: int) -> int:
        return self._sink.name(self._timed[at][0] or "model")

    def _read_passes(self) -> None:
        """Read what torch's profiler recorded, which takes longer than the calls did."""
        for call in self._read:
            if call.profile is None or call.operations is not None:
                continue
            events, on_gpu = call.profile.events(), self._device.type == "cuda"
            call.operations = operations_of(events, self._roles, on_gpu)
            if self._sink is not None:
                sums: Counter[tuple[int, str]] = Counter()
                for layer, operation, ns in call.operations:
                    sums[layer, operation] += ns
                rows = [
                    (call.number, self._name(layer), self._sink.name(operation), ns)
                    for (layer, operation), ns in sums.items()
                ]
                self._sink.put("ops", rows)

    def results(self) -> list[ModuleTime]:
        """Give what was recorded of every module, in the model's order."""
        self.flush()
        self._read_passes()
        found = [ModuleTime(name, kind) for name, kind, _ in self._timed]
        for call in self._read:
            for at, outer, ns in call.times:
                if found[at].inside is None and outer >= 0:
                    found[at].inside = found[outer].name
                if call.operations is None:
                    found[at].calls_ms.append(ns / 1e6)
                elif outer == 0:
                    found[at].passes.append(pass_of(call, at, ns / 1e6))
            for at, name, value in call.looked:
                found[at].deep.setdefault(name, []).append(value)
        for at, module in enumerate(found):
            rows = [call.statistics[at] for call in self._read if at in call.statistics]
            module.statistics = torch.tensor(rows).reshape(-1, len(STATISTICS))
        return found


def _wrap(wrappings: list[_Wrapping]) -> None:
    for module, name, watched in wrappings:
        vars(module)[name] = watched  # past `Module.__setattr__`, which is slow


def _unwrap(wrappings: list[_Wrapping]) -> None:
    for module, name, _ in wrappings:
        vars(module).pop(name, None)  # the class's own is back


def _timed_modules(
    model: nn.Module, config: ProfilingConfig
) -> Iterator[tuple[str, str, nn.Module]]:
    """Give the model, its blocks, the leaves next to them, and what is in each n-th block."""
    yield "", "model", model
    blocks = {
        f"{name}.{key}".lstrip("."): part
        for name, parts in model.named_modules()
        if isinstance(parts, nn.ModuleList)
        for key, part in parts.named_children()
    }
    looked_into = [*blocks][:: config.every_nth_layer] if config.modules else []
    for name, module in model.named_modules():
        if not name or isinstance(module, nn.ModuleList):
            continue
        if name in blocks:
            yield name, "block", module
        elif any(name.startswith(f"{block}.") for block in blocks):
            if any(name.startswith(f"{block}.") for block in looked_into):
                yield name, type(module).__name__, module
        elif not any(module.children()):
            yield name, type(module).__name__, module


def create_profiler(
    model: nn.Module, config: ProfilingConfig | None = None, sink: Sink | None = None
) -> LayerProfiler:
    """Make a profiler of a model; see `LayerProfiler`.

    Example:
        >>> profiler = create_profiler(nn.Linear(8, 8), ProfilingConfig(modules=True))
    """
    return LayerProfiler(model, config, sink=sink)
