"""Plan the memory of each use of a model, and find the largest batches that fit."""

import math
from bisect import bisect_right
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Self

import torch
from pydantic import ByteSize, Field, field_validator, model_validator
from tqdm import tqdm

from nanolib.config import DTYPES, PRESETS, NanoConfig
from nanolib.experiments.model.case import ModelCase
from nanolib.experiments.model.cases import check_hugging_face
from nanolib.experiments.model.look import blocks_of, record_calls
from nanolib.measurement import MemoryKind, Unsupported
from nanolib.meters.memory_breakdown import MemoryBreakdown, Part
from nanolib.models.user import check_name
from nanolib.params import StrictModel
from nanolib.run import case as shared
from nanolib.run.outcome import planning_time_limit
from nanolib.torch_internals import describe_plan_failure

# Each use of a model has a mode, an optimization, and an optimization for mixed precision.
USES = {
    "inference": ("inference", "eager", "eager"),
    "decoding": ("generation", "eager", "eager"),
    "training": ("training", "eager", "autocast_bfloat16"),
    "training, checkpointed": ("training", "checkpoint", "autocast_bfloat16_checkpoint"),
}
MAX_BATCH = 65_536
_SHARDED = (MemoryKind.WEIGHTS, MemoryKind.GRADIENTS, MemoryKind.STATES)
_LONGEST = 2**17  # Masks of longer sequences have too many tiles to plan.
_TEXT_ONLY = (
    "to plan only its text model, use a config.json with the fields of text_config, "
    "and with the class of the text model, such as Gemma3ForCausalLM, in architectures"
)


class Request(StrictModel):
    """Arguments of `plan`."""

    model: str
    memory: ByteSize = Field(gt=0, lt=2**63)
    seq_len: shared.Length = 1024
    batch_size: shared.Batch = 1
    dtype: Literal[DTYPES] | None = None
    precision: Literal["mixed", "pure"] | None = None
    kv_dtype: Literal["float32", "bfloat16", "float16", "float8_e4m3fn"] | None = None
    ranks: int = Field(1, gt=0)
    options: dict[str, Any] = Field(default_factory=dict)

    @field_validator("model")
    @classmethod
    def _is_preset_or_own(cls, name: str) -> str:
        if ":" in name:
            return check_name(name)
        NanoConfig.from_preset(name)
        return name

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.batch_size % self.ranks:
            raise ValueError(f"ranks: must divide batch_size {self.batch_size}, got {self.ranks}")
        if "dtype" in self.options:
            raise ValueError("options: dtype is not an option of the model; use --dtype")
        case = self.case
        if case.is_own_model and not case.runs_code:
            check_hugging_face(self.model, self.options, "seq_len", self.seq_len)
        if reason := case.plan_obstacle():
            raise ValueError(
                f"attention_type: {case.attention_type} has no plan ({reason}); use dense"
            )
        return self

    @property
    def is_mixed(self) -> bool:
        """Return whether training uses mixed precision."""
        return self.precision == "mixed" or (self.precision is None and self.dtype is None)

    @property
    def title(self) -> str:
        """Describe the dtypes, the shape and the memory of the request."""
        precision = self.case.dtype + (", training in mixed precision" if self.is_mixed else "")
        cache = f", cache in {self.kv_dtype}" if self.kv_dtype else ""
        ranks, each = "", ""
        if self.ranks > 1:
            ranks, each = f" over {self.ranks} ranks (FSDP, modelled)", " each"
        shape = f"{self.batch_size} × {self.seq_len} tokens{ranks}"
        return f"{precision}{cache}, {shape}, memory {format_bytes(self.memory)}{each}"

    @property
    def case(self) -> ModelCase:
        """Return the case of a forward pass of the model."""
        options, kind = self.options, "own"
        if self.model in PRESETS:
            # The context grows with the sequence, unless an option sets the context.
            context = PRESETS[self.model]["context_length"]
            options = {"context_length": max(context, self.seq_len)} | options
            kind = options.get("attention_type", "dense")
        shape = (self.seq_len, self.batch_size, self.dtype or "float32")
        return ModelCase("cpu", "", self.model, options, kind, *shape, "inference")

    def case_of(self, use: str, length: int) -> ModelCase:
        """Return the case of a use with `length` tokens per sequence."""
        mode, *optimizations = USES[use]
        changes = {"mode": mode, "optimization": optimizations[self.is_mixed], "seq_len": length}
        if mode == "training" and self.is_mixed:
            changes["dtype"] = "float32"
        if mode == "generation":
            if length < 2:
                raise Unsupported("decoding needs a prompt; use a seq_len of 2 or more")
            # Windows of the package transformers keep the whole prompt until the first token.
            new_tokens = 2 if self.model.startswith("hf:") else 1
            changes |= {"seq_len": length - 1, "new_tokens": new_tokens}
        return replace(self.case, **changes)

    @property
    def contexts(self) -> list[int]:
        """Return the context lengths to plan.

        These are the requested length, the largest power of two in the model's context, and a
        quarter of that power.
        """
        most = min(max(self.seq_len, self.case.context_length or 0), _LONGEST)
        power = 1 << most.bit_length() - 1
        return sorted({self.seq_len, power, power // 4 or power})


@dataclass(frozen=True)
class Use:
    """Memory plan for one use of a model, such as decoding.

    Attributes:
        name: Key of `USES`.
        memory: Available memory of one rank, in bytes.
        breakdown: Parts of the peak memory.
        batches: Largest batch size that fits, by context length, or 0 if no sequence fits. Lengths
            that take too long to plan are missing.
        small_cache: Bytes of the cache after the first token, if the prompt needs a larger cache.
        splits_attention: Whether attention computes all scores, without a fused kernel.
        next_step: Shape that fits, or what to change if no shape fits.
        refused: Reason why there is no plan, in one line, or an empty string.
    """

    name: str
    memory: int
    breakdown: MemoryBreakdown = field(default_factory=lambda: MemoryBreakdown({}))
    batches: Mapping[int, int] = field(default_factory=dict)
    small_cache: int = 0
    splits_attention: bool = False
    next_step: str = ""
    refused: str = ""

    @property
    def fits(self) -> bool:
        """Return whether the peak fits in the available memory."""
        return not self.refused and self.breakdown.peak <= self.memory

    @property
    def remedy(self) -> str:
        """Describe the missing memory, the largest kind of memory, and the next step."""
        peak, by_kind = self.breakdown.peak, self.breakdown.bytes_by_kind
        kind = max(by_kind, key=by_kind.get)
        return (
            f"{self.name} needs {format_bytes(peak)}, "
            f"{format_bytes(peak - self.memory)} more than available; "
            f"{kind} are {by_kind[kind] / peak:.0%} of the peak. Next: use {self.next_step}"
        )


def uses_of(request: Request) -> list[Use]:
    """Plan each use of a model, and find the largest batch that fits at each length."""
    uses = []
    for name in tqdm(USES, "planning", unit="use", leave=False, disable=None):
        try:
            uses.append(_use(request, name))
        except TimeoutError as error:  # A model that computes token by token takes too long.
            late = f"{error}; lower seq_len"
            rest = [*USES][len(uses) :]
            return uses + [Use(name, request.memory, refused=late) for name in rest]
        except (Exception, SystemExit) as error:  # A model that reads tensor values has no plan.
            reason = describe_plan_failure(error)
            if isinstance(error, Unsupported):
                reason = str(error)
            elif "text_config" in request.options:
                reason = f"{reason.split(';')[0]}; {_TEXT_ONLY}"
            uses.append(Use(name, request.memory, refused=reason))
    return uses


def _use(request: Request, name: str) -> Use:
    with planning_time_limit():
        breakdown = plan_use(request, name, request.seq_len, request.batch_size)
    batches = {}
    with suppress(TimeoutError):
        for length in request.contexts:
            with planning_time_limit():
                batches[length] = _largest_batch(request, name, length)
    small_cache = _small_cache(request) if name == "decoding" else 0
    next_step = _next_step(request, batches, breakdown.peak)
    splits = record_calls(request.case_of(name, request.seq_len)).splits_attention
    return Use(name, request.memory, breakdown, batches, small_cache, splits, next_step)


def _next_step(request: Request, batches: Mapping[int, int], peak: int) -> str:
    """Return a batch that fits, preferably at the requested length, or what to change."""
    fitting = {length: most for length, most in batches.items() if most}
    if fitting:
        length = request.seq_len if request.seq_len in fitting else max(fitting)
        return f"batch size {fitting[length]} at {length} tokens"
    ranks = request.ranks * math.ceil(peak / request.memory)
    return f"a smaller --seq-len, a smaller model, or --ranks {ranks} --batch-size {ranks}"


def plan_use(request: Request, name: str, length: int, batch: int) -> MemoryBreakdown:
    """Plan the peak memory of one rank for a use of the model.

    Args:
        request: Request with the model and the dtypes.
        name: Key of `USES`.
        length: Tokens per sequence. At the end of decoding, the cache contains `length` tokens.
        batch: Number of sequences over all ranks.
    """
    scopes = _scopes(request, name, length, batch).values()
    return max((each for sections in scopes for each in sections), key=lambda each: each.peak)


def _scopes(
    request: Request, name: str, length: int, batch: int
) -> dict[str, list[MemoryBreakdown]]:
    """Return one rank's memory at the peak of each section of each call.

    Raises:
        Unsupported: FSDP cannot share the model.
    """
    case = request.case_of(name, length)
    depth = blocks_of(case)[1]
    if request.ranks > 1 and not depth:
        raise Unsupported(f"FSDP needs equal blocks, and nanolib finds none in {request.model}")
    found = record_calls(case).breakdowns(batch // request.ranks)
    return {
        scope: [_one_rank(each, request, case, depth) for each in sections]
        for scope, sections in found.items()
    }


def _one_rank(
    whole: MemoryBreakdown, request: Request, case: ModelCase, depth: int
) -> MemoryBreakdown:
    """Return the memory of one FSDP rank: its share of the model, and the weights in use.

    FSDP gathers the weights of the current block and of the next block, and of all modules outside
    the blocks. It scatters the gradients of a block after the block's backward pass.
    """
    ranks, item = request.ranks, getattr(torch, request.kv_dtype or case.dtype).itemsize
    parts = dict(whole.parts)
    for part, size in whole.parts.items():
        if part.kind == MemoryKind.CACHE:
            parts[part] = size * item // case.item
        if part.kind in _SHARDED:
            parts[part] = -(-size // ranks)
    if ranks > 1:
        weights = whole.bytes_by_kind[MemoryKind.WEIGHTS]
        outside = sum(
            size
            for part, size in whole.parts.items()
            if part.kind == MemoryKind.WEIGHTS and ".*" not in part.module
        )
        block = (weights - outside) // depth
        parts[Part(MemoryKind.GATHERED)] = outside + min(2, depth) * block
        if MemoryKind.GRADIENTS in whole.bytes_by_kind:
            scattered = Part(MemoryKind.TEMPORARIES, "gradients before they are scattered")
            parts[scattered] = outside + block
    return MemoryBreakdown(parts)


def _largest_batch(request: Request, name: str, length: int) -> int:
    """Return the largest batch that fits, or 0 if no sequence fits."""
    ranks = request.ranks
    return ranks * bisect_right(
        range(ranks, MAX_BATCH + 1, ranks),
        request.memory,
        key=lambda batch: plan_use(request, name, length, batch).peak,
    )


def _small_cache(request: Request) -> int:
    """Return the cache's bytes after the first token, or 0 if the prompt needs no larger cache."""
    scopes = _scopes(request, "decoding", request.seq_len, request.batch_size)
    prompt = max(each.bytes_by_kind.get(MemoryKind.CACHE, 0) for each in scopes["prefill"])
    later = max(each.parts.get(Part(MemoryKind.CACHE), 0) for each in scopes["decode"])
    return later if later < prompt else 0


def format_bytes(size: int) -> str:
    """Format an amount of memory with its unit."""
    return ByteSize(size).human_readable(separator=" ")
