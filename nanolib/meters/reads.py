"""Count the bytes that a call reads of existing tensors: weights and a cache."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from math import prod
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

aten = torch.ops.aten
_LOOK_UPS = {aten.embedding, aten.index, aten.index_select, aten.gather}


class BytesRead(TorchDispatchMode):
    """Counts the bytes that operations read of some tensors, each element once.

    If a tensor is read in parts, the largest part counts. A table counts by the rows that are
    looked up, and experts by the rows of tokens that choose them. Elements that the call has
    written do not count.

    Args:
        tensors: The existing tensors.
    """

    supports_higher_order_operators = True

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self._sizes = {_key(x): x.element_size() for x in tensors}
        self._read: Counter[int] = Counter()
        self._written: Counter[int] = Counter()

    @property
    def bytes(self) -> int:
        """Bytes that were read."""
        return sum(
            max(0, most - self._written[key]) * self._sizes[key] for key, most in self._read.items()
        )

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run the operation and count what it reads."""
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.prim.device.default:  # fake tensors call it
            return out
        made = {_key(x) for x in tree_leaves(out) if isinstance(x, torch.Tensor)}
        schema = getattr(func, "_schema", None)  # FlexAttention has none
        names = [argument.name for argument in schema.arguments] if schema else range(len(args))
        for name, value in (dict(zip(names, args, strict=False)) | (kwargs or {})).items():
            for x in tree_leaves(value):
                if not isinstance(x, torch.Tensor) or (key := _key(x)) not in self._sizes:
                    continue
                if schema and _is_written(schema, name):
                    self._written[key] += _elements(x)
                elif key not in made:  # a view reads nothing
                    self._read[key] = max(self._read[key], _taken(func, args, x, out))
        return out


def _is_written(schema: Any, name: str) -> bool:
    info = next(x.alias_info for x in schema.arguments if x.name == name)
    return info is not None and info.is_write


def _taken(func: Any, args: tuple[Any, ...], x: torch.Tensor, out: Any) -> int:
    """Return how many elements of a tensor the operation reads."""
    operation = getattr(func, "overloadpacket", None)
    if operation in _LOOK_UPS and x is args[0]:
        return min(_elements(x), out.numel())
    if operation is aten._grouped_mm and x.dim() == 3 and args[0].dim() == 2:
        return _elements(x[0]) * min(x.shape[0], args[0].shape[0])
    return _elements(x)


def _key(x: torch.Tensor) -> int:
    return x.untyped_storage()._cdata


def _elements(x: torch.Tensor) -> int:
    """Count the elements in memory: an expanded dimension counts once."""
    return prod(size for size, stride in zip(x.shape, x.stride(), strict=True) if stride)
