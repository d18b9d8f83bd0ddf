"""Tensors that have shapes and no data, which do and refuse what those with data would."""

from __future__ import annotations

import threading
import weakref
from typing import Any, Self

import torch
from torch import nn
from torch._prims_common import suggest_memory_format
from torch._subclasses import FakeTensor, FakeTensorMode
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.utils._pytree import tree_leaves

aten = torch.ops.aten
_PRODUCTS = {aten.mm, aten.bmm, aten.addmm, aten.baddbmm}
_COPIES = {aten.clone, aten._to_copy}
_KEEP = {aten.mkldnn_rnn_layer, aten._cudnn_rnn, aten.miopen_rnn}  # a workspace of their own, which no shape tells
# Normalisation → the argument that the kernel of a CPU lays its first result out like, where torch without data takes another's.
_LAID_OUT_LIKE = {
    aten.native_batch_norm: 0,
    aten._native_batch_norm_legit: 0,
    aten._native_batch_norm_legit_no_training: 0,
    aten.native_batch_norm_backward: 1,
}
_TABLES = {aten.embedding, aten.index, aten.index_select, aten.nll_loss_forward}
NEEDS_DATA = (DataDependentOutputException, DynamicOutputShapeException)


class NotPlanned(Exception):
    """What tensors without data do not tell, in words for people."""


class OutOfTable(IndexError):
    """A table is too small for what is looked up in it.

    Attributes:
        rows: What it has.
        index: The largest that is looked up.
        of_text: Whether that is an id of a text, and no position.
    """

    def __init__(self, table: str, rows: int, index: int, of_text: bool) -> None:
        self.rows, self.index, self.of_text = rows, index, of_text
        what, remedy = (
            ("id", "give it a vocabulary of") if of_text else ("position", "shorten the sequence, or give it")
        )
        super().__init__(f"{what} {index} is out of the model's {table} of {rows}; {remedy} {index + 1} or more")


class Fakes(FakeTensorMode):
    """torch's mode, and where it says other than tensors with data would: layouts, tables, types, `.to` and deep copies."""

    supports_higher_order_operators = True  # as torch's own does by its type: FlexAttention is one

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self._ranges: dict[int, tuple[weakref.ref[Any], int, int, bool]] = {}

    def __enter__(self) -> Self:
        """See `FakeTensorMode`; modules of such tensors can be moved and copied within it."""
        _Patches.enter()
        return super().__enter__()

    def __exit__(self, *exception: Any) -> None:
        """See `FakeTensorMode`."""
        super().__exit__(*exception)
        _Patches.leave()

    def holds_ids(self, ids: torch.Tensor, vocabulary: int) -> None:
        """Say that these are ids of a text, any of so many."""
        self._know(ids, vocabulary - 1, 0, of_text=True)

    def _know(self, x: torch.Tensor, first: int, step: int, of_text: bool = False) -> None:
        """The element at an offset of its storage is at most `first` and so many steps."""
        storage = x.untyped_storage()
        key = storage._cdata
        self._ranges[key] = weakref.ref(storage, lambda _: self._ranges.pop(key, None)), first, step, of_text

    def _most(self, x: Any) -> tuple[int, bool] | None:
        """The largest index that a tensor holds and whether that is of a text; None where nobody knows."""
        found = self._ranges.get(x.untyped_storage()._cdata) if isinstance(x, torch.Tensor) and x.numel() else None
        if found is None:
            return None
        _, first, step, of_text = found
        last = x.storage_offset() + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
        return first + step * last, of_text

    def _look_up(self, operation: Any, args: tuple[Any, ...]) -> None:
        table, *indices = args
        if operation is aten.index:
            pairs = list(zip(table.shape, indices[0], strict=False))
        elif operation is aten.index_select:
            pairs = [(table.shape[indices[0]], indices[1])]
        else:
            pairs = [(table.shape[-1 if operation is aten.nll_loss_forward else 0], indices[0])]
        for rows, index in pairs:
            if (most := self._most(index)) and most[0] >= rows:
                raise OutOfTable("logits" if operation is aten.nll_loss_forward else "table", rows, *most)

    def _grouped(self, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
        """Products of experts: kernels take other types than bfloat16 too, torch's rule for tensors without data does not."""
        a, b, *rest = args
        with self:
            narrow = a.to(torch.bfloat16), b.to(torch.bfloat16)
        out = super().__torch_dispatch__(func, types, (*narrow, *rest), kwargs)
        with self:
            return torch.empty_like(out, dtype=a.dtype)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Refuse what tensors with data would, and lay results out as they do."""
        operation = getattr(func, "overloadpacket", None)
        if operation in _TABLES and self._ranges:
            self._look_up(operation, args)
        elif operation in _PRODUCTS:
            types_given = [str(x.dtype)[6:] for x in args if isinstance(x, torch.Tensor)]
            if len(set(types_given)) > 1:
                raise RuntimeError(f"{' and '.join(types_given)} are multiplied; make both one type")
        elif operation in _KEEP and args[[a.name for a in func._schema.arguments].index("train")]:
            raise NotPlanned(
                "what its recurrent layers keep for the backward pass is their kernel's own; run it to know"
            )
        if operation is aten._grouped_mm and args[0].dtype is not torch.bfloat16:
            return self._grouped(func, types, args, kwargs or {})
        out = super().__torch_dispatch__(func, types, args, kwargs)
        if operation in _LAID_OUT_LIKE and isinstance(out[0], torch.Tensor) and out[0].device.type == "cpu":
            with self:
                like = suggest_memory_format(args[_LAID_OUT_LIKE[operation]])
                out = (torch.empty_like(out[0], memory_format=like), *out[1:])
        elif operation is aten.arange and not out.is_floating_point():
            start, _, step = (0, *args, 1)[:3] if len(args) == 1 else (*args, 1)[:3]
            if step > 0:
                self._know(out, start, step)
        elif self._ranges and operation in _COPIES and (most := self._most(args[0])):
            self._know(out, most[0], 0, most[1])
        elif self._ranges and operation is not None and func._schema.is_mutable:
            for x in tree_leaves(args):
                if isinstance(x, torch.Tensor):
                    self._ranges.pop(x.untyped_storage()._cdata, None)
        return out


def why_unknown(error: BaseException) -> str:
    """Why tensors without data did not tell, in one line."""
    if isinstance(error, NEEDS_DATA):
        return f"what it does depends on its data, which a plan does not have ({error.func}); run it to know"
    said = " ".join(str(error).split())[:200]
    return said if isinstance(error, NotPlanned | OutOfTable) else f"{type(error).__name__}: {said}"


class _Patches:
    """What torch refuses to do with modules of tensors without data, done while a mode is entered in any thread."""

    _lock, _entered = threading.Lock(), 0
    _torchs = nn.Module._apply, torch.Tensor.__deepcopy__

    @classmethod
    def enter(cls) -> None:
        with cls._lock:
            cls._entered += 1
            nn.Module._apply, torch.Tensor.__deepcopy__ = _applied, _copied

    @classmethod
    def leave(cls) -> None:
        with cls._lock:
            cls._entered -= 1
            if not cls._entered:
                nn.Module._apply, torch.Tensor.__deepcopy__ = cls._torchs


def _applied(module: nn.Module, fn: Any, recurse: bool = True) -> nn.Module:
    """`.to`, `.double` and the like: torch's swaps the tensors, which those without data do not allow."""
    held = (*module.parameters(), *module.buffers())
    if not any(isinstance(x, FakeTensor) for x in held):
        return _Patches._torchs[0](module, fn, recurse)
    for child in module.children() if recurse else ():
        child._apply(fn)
    made = vars(fn).setdefault("made", {})  # what modules share they share afterwards
    for tensors in (module._parameters, module._buffers):
        for name, x in tensors.items():
            if x is None:
                continue
            if id(x) not in made:
                with torch.no_grad():
                    new = fn(x)
                made[id(x)] = x, nn.Parameter(new, x.requires_grad) if isinstance(x, nn.Parameter) else new
            setattr(module, name, made[id(x)][1])
    return module


def _copied(x: torch.Tensor, memo: dict[int, Any]) -> torch.Tensor:
    """A deep copy: torch's has another storage than what is computed from it."""
    if not isinstance(x, FakeTensor):
        return _Patches._torchs[1](x, memo)
    if id(x) not in memo:
        new = x.detach().clone()
        memo[id(x)] = (
            nn.Parameter(new, x.requires_grad) if isinstance(x, nn.Parameter) else new.requires_grad_(x.requires_grad)
        )
    return memo[id(x)]
