"""Plan the memory of each use of a model, and find the largest batches that fit."""

from bisect import bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from nanolib.experiments.model.case import ModelCase
from nanolib.experiments.model.look import blocks_of, recorded
from nanolib.measurement import BadInput, MemoryKind, Unsupported
from nanolib.meters.memory import why_not_planned
from nanolib.meters.memory_breakdown import MemoryBreakdown, Part
from nanolib.models.user import resolve
from nanolib.run.memory_plan import bytes_at
from nanolib.run.timeout import planning_time_limit

MAX_BATCH = 65_536
_LONGEST = 2**17  # Masks of longer sequences have too many tiles to plan.
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


def uses_of(request: Any) -> Iterator[Use]:
    """Plan each use of a model, and find the largest batch that fits at each length.

    Args:
        request: A `planning.Request`.

    Raises:
        BadInput: The model does not exist, or ranks cannot share the model.
    """
    source, late = request.case, ""
    if source.runs_code:
        resolve(source.preset)
    if request.ranks > 1 and not blocks_of(source)[1]:
        raise BadInput(
            f"ranks: FSDP needs equal blocks, and nanolib finds none in {source.preset}; use 1 rank"
        )
    for name in USES:
        found = partial(Use, name, request.memory)
        breakdown, batches = _NOTHING, {}
        if late:
            yield found(refused=late)
            continue
        try:
            with planning_time_limit():
                breakdown = planned(request, name, source.seq_len, source.batch_size)
            for length in _contexts(source):
                with planning_time_limit():
                    batches[length] = _largest_batch(request, name, length)
            yield found(breakdown, batches)
        except Unsupported as error:
            yield found(refused=str(error))
        except TimeoutError as error:  # A model that computes token by token takes too long.
            late = f"{error}; lower seq_len"
            yield found(breakdown, batches, refused="" if breakdown.parts else late)
        except (Exception, SystemExit) as error:  # A model that reads tensor values has no plan.
            reason = why_not_planned(error)
            if "text_config" in source.overrides:
                reason = f"{reason.split(';')[0]}; {_TEXT_ONLY}"
            yield found(refused=reason)


def _contexts(source: ModelCase) -> list[int]:
    """Return the context lengths to plan.

    These are the requested length, the largest power of two in the model's context, and a quarter
    of that power.
    """
    length = source.seq_len
    most = min(max(length, source.context_length or 0), _LONGEST)
    power = 1 << most.bit_length() - 1
    return sorted({length, *(power // part for part in (4, 1) if power >= part)})


def _largest_batch(request: Any, name: str, length: int) -> int:
    """Return the largest batch that fits, or 0 if no sequence fits."""
    batches = range(request.ranks, MAX_BATCH + 1, request.ranks)
    fitting = bisect_right(
        batches, request.memory, key=lambda batch: planned(request, name, length, batch).peak
    )
    return request.ranks * fitting


def planned(request: Any, name: str, length: int, batch: int) -> MemoryBreakdown:
    """Plan the peak memory of one rank for a use of the model.

    Args:
        request: A `planning.Request`.
        name: Key of `USES`.
        length: Tokens per sequence. At the end of decoding, the cache contains `length` tokens.
        batch: Number of sequences over all ranks.
    """
    case = _case(request, name, length)
    resized = partial(bytes_at, batch // request.ranks)
    scopes = recorded(case).breakdowns(resized, partial(_shared, request, case))
    return max(scopes.values(), key=lambda found: found.peak)


def _case(request: Any, name: str, length: int) -> ModelCase:
    mode, *optimizations = USES[name]
    case = replace(request.case, mode=mode, optimization=optimizations[request.is_mixed])
    if request.is_mixed and mode == "training":
        case = replace(case, dtype="float32")
    if mode == "generation":
        return replace(case, seq_len=length - 1, new_tokens=1)
    return replace(case, seq_len=length)


def _shared(request: Any, case: ModelCase, whole: MemoryBreakdown) -> MemoryBreakdown:
    """Return the memory of one rank: its share of the model, and the gathered weights."""
    item = getattr(torch, request.kv_dtype or case.dtype).itemsize
    parts = {
        part: size * item // case.item if part.kind == MemoryKind.CACHE else size
        for part, size in whole.parts.items()
    }
    if request.ranks == 1:
        return MemoryBreakdown(parts)
    depth, sizes = blocks_of(case)[1], [0, 0]
    for part, size in whole.parts.items():
        if part.kind == MemoryKind.WEIGHTS:
            sizes[".*" in part.module] += size
    outside, block = sizes[0], sizes[1] // depth
    for part in parts:
        if part.kind in _SHARDED:
            parts[part] = -(-parts[part] // request.ranks)
    if MemoryKind.GRADIENTS in whole.by_kind:
        scattered = Part(MemoryKind.TEMPORARIES, "gradients before they are scattered")
        parts[scattered] = outside + block
    # FSDP gathers the weights of the current block and of the next block.
    return MemoryBreakdown(parts | {Part(MemoryKind.GATHERED): outside + min(2, depth) * block})
