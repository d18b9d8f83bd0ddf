"""Where the time of a model goes, block by block, module by module, operation by operation, and what its activations look like.

The forward of chosen modules is wrapped while a profiler is entered and put back when it is left, however that happens. Wrapping
looks on: the model's output is the same to the last bit.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Self

import torch
from torch import nn

from nanolib.measurement import BadInput
from nanolib.meters.layers.activations import STATISTICS, Activations
from nanolib.meters.layers.operations import FUSED, OperationTimer, role_of
from nanolib.meters.layers.profiling import ProfilingConfig
from nanolib.meters.layers.results import DeepLayer, ModuleTime
from nanolib.meters.sink import Sink
from nanolib.meters.time.stopwatch import stopwatch_for

_ENTRIES = ("forward", "prefill", "decode")  # a call of the model is a call of one of these
READ_S = 0.4  # marks are read so often: a kill loses the rows of less than a second
_NOTHING = contextlib.nullcontext()
_MLP_WORDS = ("mlp", "intermediate", "DenseReluDense", "feed_forward")  # in the path of a module


@dataclass
class _Call:
    """One call of the model.

    Attributes:
        number: Which.
        close: Whether it is looked at closely: every module, and what the configuration asks for.
        timer: The pass that looked at operations, where it was a deep one.
        summarised: Whether its activations were.
        marks: (module, inside which, begin, end), until they are read.
        times: (module, inside which, nanoseconds), since then.
        operations: (layer, operation, nanoseconds).
        looked: (layer, name, value) of deep statistics.
    """

    number: int
    close: bool
    timer: OperationTimer | None = None
    summarised: bool = False
    marks: list[tuple[int, int, Any, Any]] = field(default_factory=list)
    times: list[tuple[int, int, int]] = field(default_factory=list)
    operations: list[tuple[int, str, int]] = field(default_factory=list)
    looked: list[tuple[int, str, Any]] = field(default_factory=list)


_Wrapping = tuple[nn.Module, str, Callable[..., Any]]


class LayerProfiler:
    """Times a model's modules while it is entered.

    Args:
        model: Any module; repeated blocks are found as the members of its `ModuleList`s.
        config: How closely to look.
        sink: Where rows go as they are made (`layers`, `statistics`, `ops`); what `results` gives is kept all the same.
        fields: Of `ProfilingConfig.custom`, instead of `config`; `preallocate_size` is another name of `preallocate_metrics`.

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
        self.model = model
        self.config = (
            replace(config)
            if config
            else ProfilingConfig.custom(**fields)
            if fields
            else ProfilingConfig.minimal()
        )
        self._chosen = list(_chosen(model, self.config))
        self._roles = [role_of(name, module) for name, _, module in self._chosen]
        blocks = [name for name, kind, _ in self._chosen if kind == "block"]
        self._inside = [
            any(name.startswith(f"{block}.") for block in blocks) for name, _, _ in self._chosen
        ]
        self._in_mlp = [any(word in name for word in _MLP_WORDS) for name, _, _ in self._chosen]
        device = next((p.device for p in model.parameters()), torch.device("cpu"))
        self._watch = stopwatch_for(device)
        self._sink = sink
        self._names = [sink.name(name or "model") for name, _, _ in self._chosen] if sink else []
        self._read: list[_Call] = []  # calls whose marks have been read
        self._unread: list[_Call] = []
        self._read_s = time.monotonic()
        self._call: _Call | None = None
        self._number = 0
        self._open: list[int] = []  # the model, and what of it is running
        self._activations: Activations | None = None
        if self.config.capture_activations:
            rooms, near = self.config.preallocate_metrics, self.config.near_zero
            self._activations = Activations(len(self._chosen), rooms, near, device)
        self._statistics: list[tuple[int, torch.Tensor]] = []  # call, and its row of the table
        self._outer: list[
            _Wrapping
        ] = []  # the model's entries, its blocks, and what stands beside them: all the time
        self._inner: list[
            _Wrapping
        ] = []  # what is in the blocks: in calls that are looked at closely
        self.rows = 0  # of a trace, so far

    # wrapping

    def __enter__(self) -> Self:
        for at, (_, _, module) in enumerate(self._chosen):
            for name in _ENTRIES if module is self.model else ("forward",):
                if name in vars(module):
                    kind = type(module).__name__
                    raise BadInput(
                        f"model: {kind}.{name} is wrapped already; leave the other profiler first"
                    )
            if module is self.model:
                entries = [name for name in _ENTRIES if hasattr(module, name)]
                self._outer += [
                    (module, name, self._watched_entry(getattr(module, name))) for name in entries
                ]
            elif self._inside[at]:
                self._inner.append((module, "forward", self._watched(at, module.forward)))
            else:
                self._outer.append((module, "forward", self._watched(at, module.forward)))
        _wrap(self._outer)
        return self

    def __exit__(self, *exception: object) -> None:
        _unwrap(self._outer)
        self._outer, self._inner = [], []
        self.flush()

    def _watched(self, at: int, forward: Callable[..., Any]) -> Callable[..., Any]:
        mark, opened = self._watch.mark, self._open

        def watched(*args: Any, **kwargs: Any) -> Any:
            call = self._call
            # someone calls a part of the model; or a block calls what stands beside the blocks, in a call not looked at closely
            if call is None or (not call.close and len(opened) > 1):
                return forward(*args, **kwargs)
            opened.append(at)
            begin = mark()
            try:
                out = forward(*args, **kwargs)
            finally:
                end = mark()
                opened.pop()
            call.marks.append((at, opened[-1], begin, end))
            if call.close:
                self._look(call, at, [*args, *kwargs.values()], out)
            return out

        return watched

    def _watched_entry(self, entry: Callable[..., Any]) -> Callable[..., Any]:
        mark, opened = self._watch.mark, self._open

        @functools.wraps(entry)
        def watched(*args: Any, **kwargs: Any) -> Any:
            if self._call is not None:  # one entry calls another
                return entry(*args, **kwargs)
            call = self._call = self._new_call()
            inner = self._inner if call.close else []
            _wrap(inner)
            opened.append(0)
            begin = mark()
            try:
                with call.timer or _NOTHING:
                    out = entry(*args, **kwargs)
            finally:
                end = mark()
                opened.pop()
                _unwrap(inner)
                self._call = None
            call.marks.append((0, -1, begin, end))
            if call.close and self._activations is not None:
                with torch.no_grad():
                    self._activations.end_call()
                call.summarised = True
            self._unread.append(call)
            if not self.config.batch_db_commits or time.monotonic() - self._read_s > READ_S:
                self.flush()
            return out

        return watched

    def _new_call(self) -> _Call:
        config = self.config
        call = _Call(
            self._number, close=config.looks and self._number % config.every_kth_token == 0
        )
        self._number += 1
        if call.close and config.deep_profiling:
            call.timer = OperationTimer(self._watch, self._place, config.near_zero)
        if (
            call.close
            and self._activations is not None
            and self._activations.used == self._activations.rooms
        ):
            self.flush()
        return call

    def _place(self) -> tuple[int, str, bool]:
        """Where the model is: the layer, and the role of the innermost module."""
        opened = self._open
        innermost = opened[-1]
        return (
            (opened[1] if len(opened) > 1 else 0),
            self._roles[innermost],
            self._in_mlp[innermost],
        )

    # looking

    def _look(self, call: _Call, at: int, given: list[Any], out: Any) -> None:
        """Numbers of an output, left where they are: nothing waits for the device."""
        self._watch.pause()
        with torch._C.DisableTorchFunction(), torch.no_grad():
            if self._activations is not None:
                self._activations.take(at, out)
            x = next((x for x in given if isinstance(x, torch.Tensor)), None)
            if call.timer is not None and x is not None and isinstance(out, torch.Tensor):
                self._look_deep(call, at, x, out)
        self._watch.resume()

    def _look_deep(self, call: _Call, at: int, x: torch.Tensor, out: torch.Tensor) -> None:
        layer = self._open[1] if len(self._open) > 1 else at
        if self._roles[at] == "norm":
            ratio = out.float().var(dim=-1).mean() / x.float().var(dim=-1).mean()
            call.looked.append((layer, "norm_variance_ratio", ratio))
        if self._roles[at] == "down":
            killed = (x.abs() < self.config.near_zero).to(torch.float32).mean()
            call.looked.append((layer, "mlp_kill_ratio", killed))

    # what was seen

    def flush(self) -> None:
        """Hand all marks and statistics to the sink; waits for the device once."""
        calls, self._unread, self._read_s = self._unread, [], time.monotonic()
        self._watch.settle()
        nanoseconds = self._watch.nanoseconds
        for call in calls:
            call.times = [
                (at, outer, nanoseconds(begin, end)) for at, outer, begin, end in call.marks
            ]
            call.marks.clear()
            if call.timer is not None:
                call.looked += call.timer.statistics
                call.operations = [
                    (m.layer, m.operation, nanoseconds(m.begin, m.end)) for m in call.timer.marks
                ]
                call.timer = None
        self._watch.forget()
        looked = [value for call in calls for *_, value in call.looked]
        values = iter(torch.stack([value.float() for value in looked]).tolist() if looked else [])
        for call in calls:
            call.looked = [(layer, name, next(values)) for layer, name, _ in call.looked]
        summarised = [call.number for call in calls if call.summarised]
        table = self._activations.copy() if summarised else ()
        statistics = list(zip(summarised, table, strict=True))
        self._statistics += statistics
        self._read += calls
        self.rows += sum(
            len(call.times) + len(call.operations) + len(call.looked) for call in calls
        )
        self.rows += len(statistics) * len(self._chosen) * len(STATISTICS)
        if self._sink is not None and calls:
            self._hand_over(self._sink, calls, statistics)

    def _hand_over(
        self, sink: Sink, calls: list[_Call], statistics: list[tuple[int, torch.Tensor]]
    ) -> None:
        """Rows that no reader waits for are made in the thread that writes them."""
        names = self._names
        sink.put(
            "layers", ((call.number, names[at], ns) for call in calls for at, _, ns in call.times)
        )
        ids = [sink.name(name) for name in STATISTICS]
        sink.put(
            "statistics",
            (
                (number, names[at], ids[i], value)
                for number, table in statistics
                for at, values in enumerate(table.tolist())
                for i, value in enumerate(values)
                if value == value  # NaN: a module that gives no tensor
            ),
        )
        for call in calls:
            sums: dict[tuple[int, str], int] = defaultdict(int)
            for layer, operation, ns in call.operations:
                sums[layer, operation] += ns
            sink.put(
                "ops",
                [
                    (call.number, names[layer], sink.name(op), ns)
                    for (layer, op), ns in sums.items()
                ],
            )
            sink.put(
                "statistics",
                [(call.number, names[layer], sink.name(name), x) for layer, name, x in call.looked],
            )
        if not self.config.batch_db_commits:
            sink.flush()

    def results(self) -> list[ModuleTime]:
        """Give the time of every module so far, in the model's order; waits for the device once."""
        self.flush()
        found = [ModuleTime(name, kind) for name, kind, _ in self._chosen]
        for call in self._read:
            for at, outer, ns in () if call.operations else call.times:
                if found[at].inside is None and outer >= 0:
                    found[at].inside = self._chosen[outer][0]
                found[at].calls_ms.append(ns / 1e6)
        if self._statistics:
            table = torch.stack([row for _, row in self._statistics])
            for at, module in enumerate(found):
                module.statistics = table[~table[:, at].isnan().any(dim=1), at]
        return found

    def deep_results(self) -> list[DeepLayer]:
        """Give what the deep passes saw of each layer, in the model's order."""
        self.flush()
        found: dict[int, DeepLayer] = {}
        for number, call in enumerate(call for call in self._read if call.operations):
            for at, outer, ns in call.times:
                if outer == 0:
                    layer = found.setdefault(at, DeepLayer(self._chosen[at][0]))
                    _add(layer.passes_ms, number, ns / 1e6)
            for at, operation, ns in call.operations:
                if at in found:
                    layer = found[at]
                    _add(layer.operations.setdefault(operation, []), number, ns / 1e6)
            looked: dict[tuple[int, str], list[float]] = defaultdict(list)
            for at, name, value in call.looked:
                looked[at, name].append(value)
            for (at, name), values in looked.items():
                if at in found:
                    found[at].statistics.setdefault(name, []).append(sum(values) / len(values))
        for at, layer in found.items():
            layer.unseen = self._unseen(at, layer)
            for (
                series
            ) in layer.operations.values():  # an operation may be missing from the last passes
                _add(series, len(layer.passes_ms) - 1, 0.0)
        return [found[at] for at in sorted(found)]

    def _unseen(self, at: int, layer: DeepLayer) -> list[str]:
        """What a block does not show, and why; what stands beside the blocks is no block."""
        if self._chosen[at][1] != "block":
            return []
        said = []
        if not {FUSED, "softmax"} & layer.operations.keys():
            said.append(
                "attention: no softmax of a product and no fused kernel of torch's was called; it has another way (torch's "
                "nn.MultiheadAttention and nn.TransformerEncoderLayer are one operation, whose fast path is off while it is "
                "looked at), or none"
            )
        if "mlp_kill_ratio" not in layer.statistics:
            said.append("dead activations: no layer was known as the MLP's last by its name")
        return said

    def reset(self) -> None:
        """Forget what was seen."""
        self.flush()
        self._read.clear()
        self._statistics.clear()
        self._number = 0


def _wrap(wrappings: list[_Wrapping]) -> None:
    for module, name, watched in wrappings:
        vars(module)[name] = watched  # past `Module.__setattr__`, which takes its time


def _unwrap(wrappings: list[_Wrapping]) -> None:
    for module, name, _ in wrappings:
        vars(module).pop(name, None)  # the class's own is seen again


def _add(series: list[float], place: int, value: float) -> None:
    series += [0.0] * (place + 1 - len(series))
    series[place] += value


def _chosen(model: nn.Module, config: ProfilingConfig) -> Iterator[tuple[str, str, nn.Module]]:
    """The model, its blocks, and the leaves beside them; with `modules` every module within each n-th block too."""
    yield "", "model", model
    blocks = {
        f"{name}.{key}".lstrip("."): part
        for name, parts in model.named_modules()
        if isinstance(parts, nn.ModuleList)
        for key, part in parts.named_children()
    }
    looked_into = [name for at, name in enumerate(blocks) if at % config.every_nth_layer == 0]
    for name, module in model.named_modules():
        if not name or isinstance(module, nn.ModuleList):
            continue
        if name in blocks:
            yield name, "block", module
        elif any(name.startswith(block + ".") for block in blocks):
            if config.modules and any(name.startswith(block + ".") for block in looked_into):
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
