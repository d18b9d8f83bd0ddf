"""Plan the memory of each use of a model, and find the largest batches that fit."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial
from typing import Any

import torch
from torch import nn

from nanolib.config import PRESETS
from nanolib.experiments.model.case import GenerationCase, ModelCase
from nanolib.experiments.model.look import without_data
from nanolib.experiments.model.steps import Step
from nanolib.measurement import BadInput, MemoryKind, Unsupported
from nanolib.meters.memory import fake_tensors, why_not_planned
from nanolib.meters.memory_breakdown import MemoryBreakdown, Part
from nanolib.models.user import hugging_face_config, layers_field, resolve
from nanolib.run.memory_plan import FOLLOWED_BATCH, StackMemory, bytes_at
from nanolib.run.timeout import planning_time_limit

MAX_BATCH = 65_536
MAX_MASKED = 2**17  # Masks of longer sequences have too many tiles to plan.
# Linear guesses may converge slowly, so every fourth guess is the middle of the range.
_BISECT_EVERY = 4
_NOTHING = MemoryBreakdown({})
_TEXT_ONLY = (
    "to plan only its text model, use a config.json with the fields of text_config, "
    "and with the class of the text model, such as Gemma3ForCausalLM, in architectures"
)
_SHARDED = (MemoryKind.WEIGHTS, MemoryKind.GRADIENTS, MemoryKind.STATES)

# Each use of a model has a mode, an optimization, and an optimization for mixed precision.
USES = {
    "inference": ("inference", "eager", "eager"),
    "decoding": ("generation", "eager", "eager"),
    "training": ("training", "eager", "autocast_bfloat16"),
    "training, checkpointed": ("training", "checkpoint", "autocast_bfloat16_checkpoint"),
}


@dataclass(frozen=True)
class Use:
    """Memory plan for one use of a model, such as decoding.

    Attributes:
        name: Key of `USES`.
        memory: Available memory of one rank, in bytes.
        breakdown: Parts of the peak memory of one rank.
        batches: Largest batch size that fits, by context length, or 0 if no sequence fits. Lengths
            that take too long to plan are missing.
        refused: Reason why there is no plan, in one line, or an empty string.
    """

    name: str
    memory: int
    breakdown: MemoryBreakdown = _NOTHING
    batches: Mapping[int, int] = field(default_factory=dict)
    refused: str = ""

    @property
    def fits(self) -> bool:
        """Return whether the peak fits in the available memory."""
        return not self.refused and self.breakdown.peak <= self.memory


class Planner:
    """Plan each use of one model from recordings of the model's calls.

    Args:
        request: A `planning.Request` with the model, the dtypes, the optimizer and the ranks.
    """

    def __init__(self, request: Any) -> None:
        self.request, self.source, self.ranks = request, request.case, request.ranks
        self.breakdown, self._late = cache(self._breakdown), ""
        self._memory, self._step = map(cache, (self._followed, self._built))
        self._cache_share = cache(self._share_of_cache)
        self._mode = fake_tensors()  # Calls that share weights need the same `FakeTensorMode`.

    def use(self, name: str) -> Use:
        """Plan one use of the model, and find the largest batch that fits at each length."""
        found = partial(Use, name, self.request.memory)
        if self.source.seq_len < 2 and name != "inference":
            return found(refused="it needs at least two tokens; raise seq_len")
        if self._late:
            return found(refused=self._late)
        breakdown, batches = None, {}
        try:
            with planning_time_limit():
                breakdown = self.breakdown(name, self.source.batch_size, self.source.seq_len)
            for length, batch in self._batches(name, breakdown):
                batches[length] = batch
        except Unsupported as error:
            return found(refused=str(error))
        except TimeoutError as error:  # A model that computes token by token takes too long.
            self._late = f"{error}; lower seq_len"
            if breakdown is None:
                return found(refused=self._late)
        except (Exception, SystemExit) as error:  # A model that reads tensor values has no plan.
            reason = why_not_planned(error)
            if "text_config" in self.source.overrides:
                reason = f"{reason.split(';')[0]}; {_TEXT_ONLY}"
            return found(refused=reason)
        return found(breakdown, batches)

    def _batches(self, name: str, breakdown: MemoryBreakdown) -> Iterator[tuple[int, int]]:
        """Yield each context length and its largest batch. A longer context has no larger batch."""
        fixed = sum(breakdown.by_kind.get(kind, 0) for kind in _SHARDED)
        most, guess = MAX_BATCH // self.ranks, self.source.batch_size // self.ranks
        for length in self.contexts:
            with planning_time_limit():
                need = partial(self._need, name, length)
                most = largest(need, self.request.memory, guess, most, fixed)
            guess = max(1, most // 4)
            yield length, most * self.ranks

    @property
    def contexts(self) -> list[int]:
        """Return the context lengths to plan.

        These are the requested length, the largest power of two in the model's context, and a
        quarter of that power.
        """
        length = self.source.seq_len
        most = min(max(length, self.source.context_length or 0), MAX_MASKED)
        power = 1 << most.bit_length() - 1
        return sorted({length, *(power // part for part in (4, 1) if power >= part)})

    def _breakdown(self, name: str, batch: int, length: int) -> MemoryBreakdown:
        """Plan the peak memory of one rank for a use of the model."""
        batch //= self.ranks
        # A user's code may depend on the batch size, so nanolib records calls of the same size.
        runs_code = self.source.runs_code
        followed = batch if runs_code else FOLLOWED_BATCH
        shortest, longest = min(self.contexts), max(self.contexts)
        grows_evenly = not self.source.own and self.source.attention_type == "dense"
        lengths = (shortest, longest) if grows_evenly and shortest < longest else (length,)

        def resized(short: int, long: int = 0) -> int:
            if len(lengths) == 2:
                short += (long - short) * (length - shortest) // (longest - shortest)
            return short if runs_code else bytes_at(batch, short)

        shared = partial(self._shared, cache_share=self._cache_share(name, length))
        scopes = self._memory(name, followed, lengths).breakdowns(shared, resized)
        return max(scopes.values(), key=lambda found: found.peak)

    def _followed(self, name: str, batch: int, lengths: tuple[int, ...]) -> StackMemory:
        """Record the calls for one use of the model at each length."""
        with without_data(self.source.own, self._mode):
            ats = (partial(self._at, name, batch, length) for length in lengths)
            return StackMemory(self.stack[1], *ats)

    def _at(self, name: str, batch: int, length: int, depth: int) -> Step:
        """Return the calls for one use of the model at a shape. Calls of one depth share a model."""
        case, step = self._case(name, batch, length), self._step(name, depth)
        step.read(case.no_ids() if case.mode == "training" else case.no_ids()[:, :-1])
        return step

    def _built(self, name: str, depth: int) -> Step:
        layers, optimizer = self.stack[0], self.request.optimizer
        return self._case(name, 1, 2).at_depth(depth, optimizer, layers)

    def _share_of_cache(self, name: str, length: int) -> float:
        """Return the size of a cache in `kv_dtype`, divided by its size in the model's dtype."""
        case = self._case(name, 1, length)
        if not self.request.kv_dtype or case.mode != "generation":
            return 1.0
        with without_data(self.source.own, self._mode):
            step = self._at(name, 1, length, min(1, self.stack[1]))
            step.first()
            size = sum(x.nbytes for x in step.kinds()[MemoryKind.CACHE])
            cached = step.generation.keys_and_values
        item = getattr(torch, self.request.kv_dtype).itemsize
        return 1 - sum(x.nbytes - x.numel() * item for x in cached) / size

    def _need(self, name: str, length: int, batch: int) -> float:
        """Return the peak bytes of one rank for a batch, or infinity if the plan fails."""
        try:
            return self.breakdown(name, batch * self.ranks, length).peak
        except (Exception, SystemExit):
            return math.inf

    def _case(self, name: str, batch: int, length: int) -> ModelCase:
        mode, *optimizations = USES[name]
        case = replace(self.source, mode=mode, batch_size=batch)
        case = replace(case, optimization=optimizations[self.request.is_mixed])
        if self.request.is_mixed and mode == "training":
            case = replace(case, dtype="float32")
        if mode == "generation":  # At the end, the cache contains `length` tokens.
            return GenerationCase(**vars(case) | {"seq_len": length - 1})
        return replace(case, seq_len=length)

    @cached_property
    def stack(self) -> tuple[str, int]:
        """Return the name and value of the option for the number of equal blocks, or ("", 0)."""
        source = self.source
        if not source.own:
            return "num_layers", source.config.num_layers
        config = None if source.runs_code else hugging_face_config(source.preset, source.overrides)
        field = layers_field(config) if config else ""
        per_layer = any(isinstance(value, list | tuple) for value in source.overrides.values())
        if not field or per_layer or len({*(getattr(config, "layer_types", None) or ())}) > 1:
            return "", 0
        depth = getattr(config, field)
        with without_data(source.own):
            parts = source.build().modules()
        stacks = [part for part in parts if isinstance(part, nn.ModuleList) and len(part) == depth]
        equal = len(stacks) == 1 and len(set(map(repr, stacks[0]))) == 1
        return (field, depth) if equal else ("", 0)

    def _shared(self, whole: MemoryBreakdown, cache_share: float) -> MemoryBreakdown:
        """Return the memory of one rank: its share of the model, and the gathered weights."""
        parts = {
            part: round(size * cache_share) if part.kind == MemoryKind.CACHE else size
            for part, size in whole.parts.items()
        }
        if self.ranks == 1:
            return MemoryBreakdown(parts)
        depth, sizes = self.stack[1], [0, 0]
        for part, size in whole.parts.items():
            if part.kind == MemoryKind.WEIGHTS:
                sizes[".*" in part.module] += size
        outside, block = sizes[0], sizes[1] // depth
        for part in parts:
            if part.kind in _SHARDED:
                parts[part] = -(-parts[part] // self.ranks)
        if MemoryKind.GRADIENTS in whole.by_kind:
            scattered = Part(MemoryKind.TEMPORARIES, "gradients before they are scattered")
            parts[scattered] = outside + block
        # FSDP gathers the weights of the current block and of the next block.
        return MemoryBreakdown(parts | {Part(MemoryKind.GATHERED): outside + min(2, depth) * block})


def largest(
    need: Callable[[int], float], memory: int, start: int, most: int, fixed: int = 0
) -> int:
    """Find the largest batch from 1 to `most` that fits in memory, or 0 if none fits.

    Each guess gives a point: a batch and its bytes. The next guess is the batch at which the line
    through the last two points reaches `memory`. Every fourth guess is the middle of the remaining
    range. The bytes are the largest of several linear functions, and therefore a convex function of
    the batch. Outside the interval between two of its points, a convex function is never below the
    line through these points.

    Args:
        need: Function that returns the bytes of a batch, or infinity if the batch is not valid.
            The bytes must be a rising and convex function of the batch.
        memory: Available memory, in bytes.
        start: First guess of the batch.
        most: Largest allowed batch.
        fixed: Estimate of the bytes that do not depend on the batch.
    """
    fits, too_many = 0, most + 1
    before, at, guesses = (0, fixed), min(start, most), 0
    while too_many - fits > 1:
        needed, guesses = need(at), guesses + 1
        fits, too_many = (at, too_many) if needed <= memory else (fits, at)
        follows = (fits + too_many) // 2
        grows = 0 < (needed - before[1]) * (at - before[0]) < math.inf
        if grows and guesses % _BISECT_EVERY:
            follows = at + (memory - needed) * (at - before[0]) // (needed - before[1])
            if before[0] and (needed <= memory) == (before[1] <= memory):
                too_many = min(too_many, follows + 1)
        before = (at, needed) if needed < math.inf else before
        at = min(max(follows, fits + 1), too_many - 1)
    return fits


def uses_of(request: Any) -> Iterator[Use]:
    """Plan each use of a model.

    Raises:
        BadInput: The model does not exist, or ranks cannot share the model.
    """
    planner = Planner(request)
    source = planner.source
    if source.runs_code:
        resolve(source.preset)
    if planner.ranks > 1 and not planner.stack[1]:
        raise BadInput(
            f"ranks: FSDP needs equal blocks, and nanolib finds none in {source.preset}; use 1 rank"
        )
    for name in USES:
        yield planner.use(name)


def lengthened(preset: str, options: Mapping[str, Any], seq_len: int) -> dict[str, int]:
    """Return the option that extends a preset's context to the sequence, or an empty dict."""
    context = options.get("context_length") or PRESETS[preset].get("context_length", 0)
    return {"context_length": seq_len} if context < seq_len else {}
