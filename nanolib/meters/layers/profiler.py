"""Profile a model: time its blocks in each call; modules, activations and operations in each k-th.

During a call of the model, `forward` of the timed modules is replaced. Hooks cost four times as
much, since `Module.__call__` has a fast path without hooks. The model's output does not change.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Self

import torch
from torch import nn
from torch.profiler import record_function

from nanolib.measurement import BadInput
from nanolib.meters.energy.source import Sink
from nanolib.meters.layers.operations import (
    RANGE,
    AttentionWatch,
    attention_statistics,
    operations_of,
    role_of,
    torch_profiler,
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

_ENTRIES = ("forward", "prefill", "decode")  # methods that count as a call of the model
_READ_S = 0.4  # if the process is killed, less than a second of rows is lost
_MOST_PASSES = 8  # reading a pass takes ten times as long as recording it
_NOTHING = contextlib.nullcontext()

_Replacement = tuple[nn.Module, str, Callable[..., Any]]


class LayerProfiler:
    """Times a model's modules while it is entered.

    Args:
        model: Any module; its repeated blocks are the members of its `ModuleList`s.
        config: What to record; `ProfilingConfig.minimal()` by default.
        sink: Receives rows (`layers`, `statistics`, `ops`); `results` returns them too.
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
        sink: Sink | None = None,
        **fields: Any,
    ) -> None:
        if fields and config is not None:
            raise BadInput(f"{next(iter(fields))}: set it in the config, or give no config")
        if "preallocate_size" in fields:
            fields["preallocate_metrics"] = fields.pop("preallocate_size")
        if config is None:
            config = ProfilingConfig.custom(**fields) if fields else ProfilingConfig.minimal()
        self.model, self.config, self._sink = model, config.replace(), sink
        blocks = _blocks(model)
        self._choose_modules(blocks)
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
        self._call: Call | None = None
        self._open: list[str] = []  # names of the running modules
        self._unread: list[Call] = []
        self._profiled: list[Call] = []
        self._read_s = time.monotonic()
        self._number = 0

    def _choose_modules(self, blocks: Sequence[str]) -> None:
        """Choose the blocks with the leaves outside them, and the modules of each n-th block."""
        self._outer: dict[str, nn.Module] = {}
        self._inner: dict[str, nn.Module] = {}
        inside = tuple(f"{block}." for block in blocks)
        detailed = inside[:: self.config.every_nth_layer] if self.config.modules else ()
        for name, module in self.model.named_modules():
            if isinstance(module, nn.ModuleList):
                continue
            if name.startswith(detailed):
                self._inner[name] = module
            is_leaf = name and not any(module.children())
            if name in blocks or (is_leaf and not name.startswith(inside)):
                self._outer[name] = module

    def __enter__(self) -> Self:
        self._in_each = [self._wrap_forward(*item) for item in self._outer.items()]
        self._in_detailed = [self._wrap_forward(*item) for item in self._inner.items()]
        entries = [
            (self.model, name, self._wrap_entry(getattr(self.model, name)))
            for name in _ENTRIES
            if hasattr(self.model, name)
        ]
        self._restore.enter_context(_replace_methods(entries))
        return self

    def __exit__(self, *exception: object) -> None:
        self._restore.close()
        self.results()

    def _wrap_entry(self, entry: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(entry)
        def watched(*args: Any, **kwargs: Any) -> Any:
            if self._call is not None:  # one entry calls another
                return entry(*args, **kwargs)
            self._call = call = self._new_call()
            around = call.profile or _NOTHING
            if call.is_detailed and self.config.deep_profiling and call.profile is None:
                around = AttentionWatch(self._add_attention_statistics)
            inner = self._in_detailed if call.is_detailed else []
            try:
                with around, _replace_methods(self._in_each + inner):
                    out = self._time("", entry, args, kwargs)
            finally:
                self._call = None
            self._unread.append(call)
            waiting = sum(call.is_detailed for call in self._unread)
            is_full = waiting >= self.config.preallocate_metrics
            is_due = time.monotonic() - self._read_s > _READ_S
            if is_full or is_due or not self.config.batch_db_commits:
                self.flush()
            return out

        return watched

    def _new_call(self) -> Call:
        """Begin a call. Detailed calls of deep mode alternate: statistics, torch's profiler."""
        turn, rest = divmod(self._number, self.config.every_kth_token)
        call = Call(self._number, is_detailed=self.config.has_details and rest == 0)
        self._number += 1
        is_due = call.is_detailed and turn % 2 == 1 and turn < 2 * _MOST_PASSES
        if is_due and self.config.deep_profiling:
            call.profile = torch_profiler(self._device)
        return call

    def _wrap_forward(self, name: str, module: nn.Module) -> _Replacement:
        forward = module.forward

        def watched(*args: Any, **kwargs: Any) -> Any:
            call = self._call
            if len(self._open) > 1 and not call.is_detailed:
                return forward(*args, **kwargs)  # a module outside the blocks that a block calls
            with _NOTHING if call.profile is None else record_function(RANGE + name):
                out = self._time(name, forward, args, kwargs)
            if call.is_detailed and call.profile is None:
                self._add_statistics(name, [*args, *kwargs.values()], out)
            return out

        return module, "forward", watched

    def _time(self, name: str, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        caller = self._open[-1] if self._open else None
        self._open.append(name)
        begin = self._watch.mark()
        try:
            return function(*args, **kwargs)
        finally:
            self._call.marks.append((name, caller, begin, self._watch.mark()))
            self._open.pop()

    def _add_statistics(self, name: str, given: Sequence[Any], out: Any) -> None:
        """Compute statistics of an output, without waiting for the device."""
        if not isinstance(out, torch.Tensor) or not out.is_floating_point() or not out.numel():
            return
        x = next((x for x in given if isinstance(x, torch.Tensor)), None)
        with self._watch.paused(), torch.no_grad():
            if self.config.capture_activations:
                self._call.outputs[name] = sample_of(out)
            if not self.config.deep_profiling or x is None:
                return
            if self._roles[name] == "norm":
                ratio = out.float().var(dim=-1).mean() / x.float().var(dim=-1).mean()
                self._note(name, "norm_variance_ratio", ratio)
            if self._roles[name] == "down":
                is_killed = x.abs() < self.config.near_zero
                self._note(name, "mlp_kill_ratio", is_killed.float().mean())

    def _add_attention_statistics(self, inputs: dict[str, Any]) -> None:
        with self._watch.paused(), torch.no_grad():
            for statistic, value in attention_statistics(inputs, self.config.near_zero).items():
                self._note("", statistic, value)

    def _note(self, name: str, statistic: str, value: torch.Tensor) -> None:
        """Note a number of the outermost module that is running; of `name` if none is."""
        layer = self._open[1] if len(self._open) > 1 else name
        self._call.values.append((layer, statistic, value))

    def flush(self) -> None:
        """Read marks and statistics and write their rows to the sink; waits for the device once."""
        calls, self._unread, self._read_s = self._unread, [], time.monotonic()
        self._watch.synchronize()
        for call in calls:
            self._read(call)
        self._watch.forget()
        if self._sink is not None and not self.config.batch_db_commits:
            self._sink.flush()

    def _read(self, call: Call) -> None:
        times = []
        for name, caller, begin, end in call.marks:
            found, ns = self._found[name], self._watch.nanoseconds(begin, end)
            times.append((name, ns))
            if found.inside is None:
                found.inside = caller
            if call.profile is None:
                found.calls_ms.append(ns / 1e6)
            elif caller == "":
                call.passes[name] = DeepPass(ns / 1e6, {})
        values = [(name, statistic, float(value)) for name, statistic, value in call.values]
        values += summarize(call.outputs, self.config.near_zero)
        for name, statistic, value in values:
            self._found[name].values[statistic].append(value)
        self._put("layers", call, times)
        self._put("statistics", call, values)
        if call.profile is not None:
            self._profiled.append(call)

    def _put(self, table: str, call: Call, rows: Iterable[tuple[str | float, ...]]) -> None:
        """Write rows to the sink, which stores names as indices."""
        if self._sink is None:
            return
        index = self._sink.name
        rows = [[index(x or "model") if isinstance(x, str) else x for x in row] for row in rows]
        self._sink.put(table, [(call.number, *row) for row in rows])

    def results(self) -> list[ModuleTime]:
        """Return the recorded data of each module, outer modules first."""
        self.flush()  # torch's profiler is read only now, since that takes longer than the calls
        for call in self._profiled:
            spent: Counter[tuple[str, str]] = Counter()
            events = call.profile.events()
            for layer, operation, ns in operations_of(events, self._roles, self._watch.is_cuda):
                spent[layer, operation] += ns
            self._put("ops", call, [(*key, ns) for key, ns in spent.items()])
            for (layer, operation), ns in spent.items():
                call.passes[layer].operations[operation] = ns / 1e6
            for layer, found in call.passes.items():
                self._found[layer].passes.append(found)
        self._profiled = []
        return [*self._found.values()]


@contextlib.contextmanager
def _replace_methods(functions: Sequence[_Replacement]) -> Iterator[None]:
    """Replace methods in the block, without `Module.__setattr__`, which is slow."""
    before = [vars(module).get(name) for module, name, _ in functions]
    for module, name, function in functions:
        vars(module)[name] = function
    try:
        yield
    finally:
        for (module, name, _), own in zip(functions, before, strict=True):
            if own is None:
                del vars(module)[name]  # the class's own is back
            else:
                vars(module)[name] = own


def _blocks(model: nn.Module) -> list[str]:
    return [
        f"{name}.{key}".lstrip(".")
        for name, parts in model.named_modules()
        if isinstance(parts, nn.ModuleList)
        for key, _ in parts.named_children()
    ]


create_profiler = LayerProfiler
