"""Count the live bytes of tensors, and the bytes that operations read from tensors."""

import functools
import math
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from nanolib.torch_internals import FakeTensor, TorchDispatchMode

aten = torch.ops.aten
_DEVICE = torch.ops.prim.device.default
_LOOK_UPS = {aten.embedding, aten.index, aten.index_select, aten.gather}
_FLASH_BACKWARD = aten._scaled_dot_product_flash_attention_backward.default
# FlashAttention rounds lengths up to multiples of 128, and head sizes up to multiples of 32.
_ROWS, _COLUMNS = 128, 32
_WORKSPACE = -1  # No storage has this key.


class LiveBytes(TorchDispatchMode):
    """Count the bytes of each storage that an operation returns, until torch frees the storage.

    The count is deterministic. Counting is slow, so nanolib never counts inside a timing. Buffers
    inside an operation do not count, except the workspaces that `workspace_bytes` computes.

    Attributes:
        current: Live bytes of new storages and of storages given to `watch`.
        peak: Largest number of live bytes so far.
    """

    supports_higher_order_operators = True  # FlexAttention is a higher-order operation.

    def __init__(self):
        super().__init__()
        self.current = 0
        self.peak = 0
        self._alive = {}  # key of a live storage → a weak reference to it
        self._operation = None  # the last operation that began

    def watch(self, *tensors: torch.Tensor) -> None:
        """Count the storages of tensors. A storage that several tensors share counts once."""
        for tensor in _tensors(tensors):
            storage = tensor.untyped_storage()
            key, size = storage._cdata, storage.nbytes()
            if size and key not in self._alive:
                died = functools.partial(self._forget, key, size)
                self._alive[key] = weakref.ref(storage, died)
                self._count(key, size)

    def _forget(self, key: int, size: int, _):
        """Stop counting a storage that torch has freed."""
        del self._alive[key]
        self._count(key, -size)

    def _count(self, key: int, size: int):
        """Add the size of a new storage, or the negative size of a freed storage."""
        self.current += size
        self.peak = max(self.peak, self.current)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Run the operation and count the storages that it makes."""
        if func is _DEVICE and isinstance(args[0], FakeTensor):
            # Two thirds of a plan's operations only request the device, so this case must be fast.
            return args[0].fake_device
        self._operation = func
        out = func(*args, **kwargs or {})
        new = [x for x in _tensors(out) if storage_key(x) not in self._alive]
        if new:  # A view or an in-place result uses the storage of an argument.
            given = {storage_key(x) for x in _tensors((args, kwargs))}
            self.watch(*(x for x in new if storage_key(x) not in given))
        if workspace := workspace_bytes(func, args):  # An operation frees its own workspace.
            self._count(_WORKSPACE, workspace)
            self._count(_WORKSPACE, -workspace)
        return out


def workspace_bytes(operation, args: Sequence[Any]) -> int:
    """Return the bytes that a GPU operation uses in addition to its inputs and results.

    FlashAttention's backward pass sums the queries' gradients in float32. If heads come before
    positions in memory, torch copies the output and its gradient. In grouped-query attention,
    torch computes the gradients of keys and values for each query head and sums these gradients.

    Args:
        operation: An operation, as `__torch_dispatch__` receives it.
        args: Arguments of the operation.

    Source: torch 2.11, `_flash_attention_backward` and `mha_bwd`. The peaks of torch's allocator
    agree within 0.01 % (tests/meters/test_memory.py).
    """
    if operation is not _FLASH_BACKWARD or args[1].device.type != "cuda":
        return 0
    grad_out, q, k, _, out = args[:5]
    batch, heads, q_len, head_dim = q.shape
    rows = batch * heads * _ROWS * math.ceil(q_len / _ROWS)
    sums = 4 * rows * (_COLUMNS * math.ceil(head_dim / _COLUMNS) + 1)
    copies = sum(x.nbytes for x in (grad_out, out) if not x.transpose(1, 2).is_contiguous())
    per_head = 2 * batch * heads * k.shape[2] * head_dim * k.element_size()
    return sums + copies + (per_head if k.shape[1] != heads else 0)


class BytesRead(TorchDispatchMode):
    """Count the bytes that operations read from given tensors. Each element counts once.

    If operations read different parts of a tensor, the largest part counts. In a lookup table, at
    most one row per lookup counts. In a stack of experts, at most one expert per token counts.
    Elements that the call wrote before do not count.

    Args:
        tensors: Tensors that exist before the call, such as weights and a cache.
    """

    supports_higher_order_operators = True

    def __init__(self, tensors: Iterable[torch.Tensor]):
        super().__init__()
        self._read = {storage_key(x): 0 for x in tensors}  # key of a storage → bytes read from it
        self._written = Counter()  # key of a storage → elements that operations wrote

    @property
    def bytes(self) -> int:
        """Number of bytes that operations have read."""
        return sum(self._read.values())

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Run the operation and count the bytes that it reads."""
        out = func(*args, **kwargs or {})
        if func is _DEVICE:
            return out
        schema = getattr(func, "_schema", None)  # FlexAttention has no schema.
        made = {storage_key(x) for x in _tensors(out)}
        for x in _tensors((args, kwargs)):
            key = storage_key(x)
            if key not in self._read:
                continue
            if key not in made:
                taken = (_taken(func, args, x, out) - self._written[key]) * x.element_size()
                self._read[key] = max(self._read[key], taken)
            elif schema and schema.is_mutable:  # An operation that makes a view reads nothing.
                self._written[key] += _elements(x)
        return out


def _taken(func, args: tuple[Any, ...], x: torch.Tensor, out) -> int:
    """Return how many elements of a tensor the operation reads."""
    operation = getattr(func, "overloadpacket", None)
    if operation in _LOOK_UPS and x is args[0]:
        return min(_elements(x), out.numel())
    if operation is aten._grouped_mm and x.dim() == 3 and args[0].dim() == 2:
        return _elements(x[0]) * min(x.shape[0], args[0].shape[0])
    return _elements(x)


def _elements(x: torch.Tensor) -> int:
    """Count the elements of a tensor in memory. An expanded dimension has size 1 in memory."""
    return math.prod(size for size, stride in zip(x.shape, x.stride(), strict=True) if stride)


def storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Return the bytes that tensors hold together. Quantized weights hold their packed data."""
    counter = LiveBytes()
    counter.watch(*tensors)
    return counter.current


def _tensors(value) -> Iterator[torch.Tensor]:
    # This function runs twice per operation, and torch's `tree_leaves` is slower.
    if isinstance(value, torch.Tensor):
        if hasattr(value, "__tensor_flatten__"):  # The tensor wraps others, such as packed data.
            yield from _tensors([getattr(value, name) for name in value.__tensor_flatten__()[0]])
        elif value.layout is torch.strided:  # A sparse tensor has no storage.
            yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, dict):
        yield from _tensors([*value.values()])


def storage_key(tensor: torch.Tensor) -> int:
    """Return a number that identifies the storage of a tensor and of its views."""
    return tensor.untyped_storage()._cdata
