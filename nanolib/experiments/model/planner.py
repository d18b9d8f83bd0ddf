"""One model's uses planned at one shape after the other, and the largest shapes that fit."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from nanolib.config import PRESETS
from nanolib.experiments.model.case import GenerationCase, ModelCase
from nanolib.measurement import BadInput, MemoryKind, Unsupported
from nanolib.meters.memory import fake_tensors, why_not_planned
from nanolib.meters.memory_breakdown import MemoryBreakdown, Part
from nanolib.models.user import hugging_face_config, layers_field, resolve, silent
from nanolib.run.memory_plan import breakdowns_by_depth
from nanolib.run.params import MAX_SEQ_LEN

MAX_BATCH = 65_536
MAX_MASKED = 2**17  # tokens, if a mask is made: its tiles are real and grow with the square
_BISECT_EVERY = 4  # guesses: a line may creep towards a bend
_NOTHING = MemoryBreakdown({})
_SHARDED = (MemoryKind.WEIGHTS, MemoryKind.GRADIENTS, MemoryKind.STATES)

# Use → mode of the case, optimization.
USES = {
    "inference": ("inference", "eager"),
    "decoding": ("generation", "eager"),
    "training": ("training", "eager"),
    "training, checkpointed": ("training", "checkpoint"),
}


@dataclass(frozen=True)
class Use:
    """What one use of the model needs.

    Attributes:
        name: One of `USES`.
        memory: How much there is, bytes.
        breakdown: What uses the memory at its peak; of one rank if there are several.
        largest_batch: At this length; 0 if not one sequence fits.
        longest: At this batch, tokens; 0 if none fits.
        refused: Why it is not planned, in one line; then there is no breakdown.
    """

    name: str
    memory: int
    breakdown: MemoryBreakdown = _NOTHING
    largest_batch: int = 0
    longest: int = 0
    refused: str = ""

    @property
    def fits(self) -> bool:
        """Whether its peak is at most what there is."""
        return not self.refused and self.breakdown.peak <= self.memory


class Planner:
    """Plans uses of one model at one shape after the other; each is counted once.

    Args:
        source: The case that all others are made from.
        optimizer: A key of `OPTIMIZERS`.
        ranks: Over which FSDP shares the model.
    """

    def __init__(self, source: ModelCase, optimizer: str = "adamw", ranks: int = 1) -> None:
        self.source, self.optimizer, self.ranks = source, optimizer, ranks
        self.breakdown = functools.cache(self._breakdown)

    def use(self, name: str, memory: int) -> Use:
        """What a use needs, and the largest batch and the longest sequence that fit."""
        batch, length, ranks = self.source.batch_size, self.source.seq_len, self.ranks
        try:
            breakdown = self.breakdown(name, batch, length)
        except Unsupported as error:
            return Use(name, memory, refused=str(error))
        except (Exception, SystemExit) as error:  # a model may look at its data, which is not there
            return Use(name, memory, refused=why_not_planned(error))

        def of_batch(each: int) -> float:
            return self._peak(name, each * ranks, length)

        def of_length(tokens: int) -> float:
            return self._peak(name, batch, tokens)

        each = largest(of_batch, memory, batch // ranks, MAX_BATCH // ranks)
        longest = largest(of_length, memory, length, self._most_tokens)
        return Use(name, memory, breakdown, each * ranks, longest)

    def _breakdown(self, name: str, batch: int, length: int) -> MemoryBreakdown:
        """What uses the memory at a use's peak at a shape, on one rank."""
        case = self._case(name, batch // self.ranks, length)
        layers, depth = self.stack
        at = functools.partial(case.at_depth, optimizer=self.optimizer, layers=layers)
        with fake_tensors(), silent():
            scopes = breakdowns_by_depth(depth, at, self._shared)
        return max(scopes.values(), key=lambda found: found.peak)

    def _peak(self, name: str, batch: int, length: int) -> float:
        """Bytes at a shape; infinite if the model does not take it."""
        try:
            return self.breakdown(name, batch, length).peak
        except (Exception, SystemExit):
            return math.inf

    def _case(self, name: str, batch: int, length: int) -> ModelCase:
        mode, optimization = USES[name]
        case = replace(self.source, mode=mode, optimization=optimization, batch_size=batch)
        if not case.own:
            longer = lengthened(case.preset, case.overrides, length)
            case = replace(case, overrides=case.overrides | longer)
        if mode == "generation":  # the cache holds `length` tokens in the end
            return GenerationCase(**vars(case) | {"seq_len": length - 1})
        return replace(case, seq_len=length)

    @functools.cached_property
    def stack(self) -> tuple[str, int]:
        """The option that says how many equal blocks there are, and their number; 0 if unknown."""
        source = self.source
        if not source.own:
            return "num_layers", source.config.num_layers
        config = None if source.runs_code else hugging_face_config(source.preset, source.overrides)
        field = layers_field(config) if config else ""
        per_layer = any(isinstance(value, list | tuple) for value in source.overrides.values())
        if not field or per_layer or len({*(getattr(config, "layer_types", None) or ())}) > 1:
            return "", 0
        depth = getattr(config, field)
        with fake_tensors():
            parts = source.build().modules()
        stacks = [part for part in parts if isinstance(part, nn.ModuleList) and len(part) == depth]
        equal = len(stacks) == 1 and len(set(map(repr, stacks[0]))) == 1
        return (field, depth) if equal else ("", 0)

    @property
    def _most_tokens(self) -> int:
        """The longest sequence that the model takes, or that is tried."""
        if self.source.own:
            return self.source.context_length or MAX_SEQ_LEN
        return MAX_SEQ_LEN if self.source.attention_type == "dense" else MAX_MASKED

    def _shared(self, whole: MemoryBreakdown) -> MemoryBreakdown:
        """What one of several ranks holds under FSDP: its share, and the weights that are gathered."""
        if self.ranks == 1:
            return whole
        depth, sizes = self.stack[1], [0, 0]
        for (kind, module), size in whole.by_module.items():
            if kind == MemoryKind.WEIGHTS:
                sizes[".*" in module] += size
        outside, block = sizes[0], sizes[1] // depth
        parts = {
            part: -(-size // self.ranks) if part.kind in _SHARDED else size
            for part, size in whole.parts.items()
        }
        if MemoryKind.GRADIENTS in whole.by_kind:
            parts[Part(MemoryKind.TEMPORARIES, "gradients before they are scattered")] = (
                outside + block
            )
        # the computing block and the next
        return MemoryBreakdown(parts | {Part(MemoryKind.GATHERED): outside + min(2, depth) * block})


def largest(need: Callable[[int], float], memory: int, start: int, most: int) -> int:
    """The largest n whose need fits; 0 if not even 1 does, `most` if all do.

    The next n is where the line through the last two needs meets the memory, and now and then the
    middle.

    Args:
        need: n → bytes, growing; infinite if n is not taken.
        memory: Bytes that there are.
        start: Where to begin.
        most: The largest n.
    """
    fits, too_many = 0, most + 1
    before, at, guesses = (0, 0.0), min(start, most), 0
    while too_many - fits > 1:
        needed, guesses = need(at), guesses + 1
        fits, too_many = (at, too_many) if needed <= memory else (fits, at)
        slope = (needed - before[1]) / (at - before[0])
        follows = (fits + too_many) // 2
        if 0 < slope < math.inf and guesses % _BISECT_EVERY:
            follows = min(at + (memory - needed) / slope, most)
        before = (at, needed) if needed < math.inf else before
        at = min(max(int(follows), fits + 1), too_many - 1)
    return fits


def uses_of(source: ModelCase, optimizer: str, ranks: int, memory: int) -> Iterator[Use]:
    """What each use of a model needs, and the most that fits.

    Raises:
        BadInput: There is no such model, or ranks cannot share it.
    """
    if source.runs_code:
        resolve(source.preset)
    planner = Planner(source, optimizer, ranks)
    if ranks > 1 and not planner.stack[1]:
        raise BadInput(
            f"ranks: FSDP gathers equal blocks, which {source.preset} is not known to have"
        )
    for name in USES:
        yield planner.use(name, memory)


def lengthened(preset: str, options: Mapping[str, Any], seq_len: int) -> dict[str, int]:
    """A preset's context made as long as the sequence."""
    context = options.get("context_length") or PRESETS[preset].get("context_length", 0)
    return {"context_length": seq_len} if context < seq_len else {}
