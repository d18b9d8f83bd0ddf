"""Four numbers per module that say what its output looks like, computed where it lives and copied to the host now and then."""

from __future__ import annotations

from typing import Any

import torch

STATISTICS = ("mean_abs", "sd", "max_abs", "near_zero")
SAMPLE = 2048


class Activations:
    """Outputs of a model's modules, summarised call by call.

    Of a large output an even sample of `SAMPLE` elements is looked at, but for its largest one, which is that of all. The sums of
    all modules are taken at once when the call is over: module by module they would cost more than the model.

    Args:
        modules: How many there are.
        rooms: Calls for which there is room on the device.
        near_zero: An element smaller than this counts as near zero.
        device: Of the model.
    """

    def __init__(self, modules: int, rooms: int, near_zero: float, device: torch.device) -> None:
        self.rooms, self._near_zero = rooms, near_zero
        with torch.inference_mode(
            False
        ):  # what is made in inference mode could not be written outside of it
            self._sample = torch.zeros(modules, SAMPLE, device=device)
            self._largest = torch.zeros(modules, device=device)
            self._place = torch.arange(SAMPLE, device=device)
            self._table = torch.zeros(rooms, modules, len(STATISTICS), device=device)
        self._rows, self._maxima = list(self._sample), list(self._largest)
        self._lengths = [0] * modules
        self.used = 0

    def take(self, at: int, out: Any) -> None:
        """Note the output of one module; of several calls of it within one of the model the last counts."""
        if not isinstance(out, torch.Tensor) or not out.is_floating_point() or not out.numel():
            return
        flat = out.reshape(-1)
        step = -(-len(flat) // SAMPLE)
        part = flat[::step] if step > 1 else flat
        self._lengths[at] = len(part)
        self._rows[at][: len(part)].copy_(part)
        if step > 1:
            low, high = torch.aminmax(flat)  # a norm would take ten times as long
            self._maxima[at].copy_(torch.maximum(low.neg(), high))
        else:
            self._maxima[at].zero_()  # the sample holds it

    def end_call(self) -> None:
        """Summarise what was noted."""
        lengths = torch.tensor(self._lengths, device=self._sample.device)
        inside = self._place < lengths[:, None]
        count = lengths.float()
        x = self._sample.where(inside, 0.0)
        size = x.abs()
        mean = x.sum(dim=1) / count
        square = ((x - mean[:, None]) * inside).square().sum(dim=1) / (count - 1)
        near = ((size < self._near_zero) & inside).sum(dim=1) / count
        largest = torch.maximum(size.amax(dim=1), self._largest).where(lengths > 0, torch.nan)
        values = (size.sum(dim=1) / count, square.sqrt(), largest, near)
        self._table[self.used] = torch.stack(values, dim=1)  # NaN where a module gave nothing
        self._lengths = [0] * len(self._lengths)
        self.used += 1

    def copy(self) -> torch.Tensor:
        """The summaries so far on the host, shape [calls, modules, len(STATISTICS)]; room is free again."""
        table, self.used = self._table[: self.used].clone().cpu(), 0
        return table
