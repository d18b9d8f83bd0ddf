"""One model's uses planned at one shape after the other, and the largest shapes that fit."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import nn

from nanolib.config import PRESETS
from nanolib.experiments.model.model_cases import GenerationCase, ModelCase
from nanolib.measurement import BadInput, Held, Unsupported
from nanolib.meters.holders import Holding, Part
from nanolib.meters.memory import fake_tensors, why_not_planned
from nanolib.models.user import hugging_face_config, layers_field, resolve, silent
from nanolib.run.params import MAX_SEQ_LEN
from nanolib.run.workload import Workload, holdings_by_depth

MAX_BATCH = 65_536
MAX_MASKED = (
    2**17
)  # tokens: where a mask is made, its tiles are real ones, and grow with the square
_BISECT_EVERY = 4  # guesses: a line alone may creep towards a bend
_SHARDED = (Held.WEIGHTS, Held.GRADIENTS, Held.STATES)
_LEAST = {"decoding": 2}  # tokens: one in the cache, and a new one

# Use → mode of the case, optimisation.
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
        holding: Who holds its peak; of one rank where there are several.
        memory: How much there is, bytes.
        largest_batch: At this length; 0 where not one sequence fits; None where it is not known.
        longest: At this batch, tokens; 0 where none fits; None where it is not known.
        unbounded: Whether more than that batch, and than that length, was not tried.
        refused: Why it is not planned, in one line; then there is no holding.
    """

    name: str
    holding: Holding
    memory: int
    largest_batch: int | None = None
    longest: int | None = None
    unbounded: tuple[bool, bool] = (False, False)
    refused: str = ""

    @property
    def fits(self) -> bool:
        """Whether its peak is at most what there is."""
        return not self.refused and self.holding.peak <= self.memory


def room(preset: str, options: Mapping[str, Any], seq_len: int) -> dict[str, int]:
    """A preset's context made as long as the sequence."""
    context = options.get("context_length") or PRESETS.get(preset, {}).get("context_length", 0)
    return {"context_length": seq_len} if isinstance(context, int) and context < seq_len else {}


def uses_of(source: ModelCase, optimizer: str, ranks: int, memory: int) -> Iterator[Use]:
    """What each use of a model needs; then each that is planned again, with the most that fits.

    Args:
        source: The model and the shape, of any mode.
        optimizer: A key of `OPTIMIZERS`.
        ranks: How many share it out.
        memory: Of one rank, bytes.

    Raises:
        BadInput: There is no such model, or ranks cannot share it out.
    """
    if source.runs_code:
        resolve(source.preset)
    planner = Planner(source, optimizer, ranks)
    if ranks > 1 and not planner.depth:
        raise BadInput(
            f"ranks: {source.preset} is not known to be a stack of equal blocks, which FSDP would gather; leave it out"
        )
    needs = [planner.needs(name, memory) for name in USES]
    yield from needs
    for use in needs:
        if not use.refused:
            yield planner.with_most(use)


class Planner:
    """Plans uses of one model at one shape after the other; each is counted once."""

    def __init__(self, source: ModelCase, optimizer: str, ranks: int) -> None:
        self.source, self.optimizer, self.ranks = source, optimizer, ranks
        self._known: dict[tuple[str, int, int], Holding] = {}

    def needs(self, name: str, memory: int) -> Use:
        """What a use needs, without the most that fits."""
        refused = functools.partial(Use, name, Holding({}), memory)
        if self.source.seq_len < (least := _LEAST.get(name, 1)):
            return refused(refused=f"it takes {least} tokens or more")
        try:
            return Use(
                name, self.holding(name, self.source.batch_size, self.source.seq_len), memory
            )
        except Unsupported as error:
            return refused(refused=str(error))
        except (Exception, SystemExit) as error:  # a model may look at its data, which is not there
            return refused(refused=why_not_planned(error))

    def with_most(self, use: Use) -> Use:
        """The same with the largest batch and the longest sequence that fit."""
        name, memory = use.name, use.memory
        batch, length = self.source.batch_size, self.source.seq_len
        most_sequences, most_tokens = MAX_BATCH // self.ranks, self._longest()
        share = largest(
            lambda n: self._peak(name, n * self.ranks, length),
            memory,
            batch // self.ranks,
            most_sequences,
        )
        longest = largest(
            lambda n: self._peak(name, batch, n), memory, length, most_tokens, _LEAST.get(name, 1)
        )
        ends = share == most_sequences, longest == most_tokens and not self.source.own
        return dataclasses.replace(
            use, largest_batch=share * self.ranks, longest=longest, unbounded=ends
        )

    def holding(self, name: str, batch: int, length: int) -> Holding:
        """Who holds a use's peak at a shape, on one rank."""
        key = (name, batch, length)
        if key not in self._known:
            at = functools.partial(self._at, self._case(name, batch // self.ranks, length))
            with (
                fake_tensors(),
                silent(),
            ):  # of a shape that a model does not take torch says more than its error
                scopes = holdings_by_depth(self.depth, at, self._shared)
            self._known[key] = max(scopes.values(), key=lambda held: held.peak)
        return self._known[key]

    def _peak(self, name: str, batch: int, length: int) -> float:
        """Bytes at a shape; none are enough where the model does not take it, as one of the user's own may have its limits."""
        try:
            return self.holding(name, batch, length).peak
        except (Exception, SystemExit):
            return math.inf

    def _case(self, name: str, batch: int, length: int) -> ModelCase:
        mode, optimisation = USES[name]
        fields = {
            field.name: getattr(self.source, field.name) for field in dataclasses.fields(ModelCase)
        }
        fields |= {
            "mode": mode,
            "optimisation": optimisation,
            "batch_size": batch,
            "seq_len": length,
        }
        if not self.source.own:
            fields["overrides"] = self.source.overrides | room(
                self.source.preset, self.source.overrides, length
            )
        if mode == "generation":  # the cache holds `length` tokens in the end
            return GenerationCase(**fields | {"seq_len": length - 1}, new_tokens=1)
        return ModelCase(**fields)

    def _at(self, case: ModelCase, depth: int) -> tuple[nn.Module, Iterator[Workload]]:
        step = case.step_at_depth(depth, self.optimizer, self._layers_field)
        return step.model, step.workloads()

    @cached_property
    def _layers_field(self) -> str:
        """What the option is called that says how many blocks there are; empty where nobody knows."""
        if not self.source.own:
            return "num_layers"
        if self.source.runs_code:
            return ""
        return layers_field(hugging_face_config(self.source.preset, self.source.overrides))

    @cached_property
    def depth(self) -> int:
        """How many equal blocks lie on one another; 0 where they differ, or nobody knows."""
        if not self.source.own:
            return self.source.config.num_layers
        if not self._layers_field:
            return 0
        config = hugging_face_config(self.source.preset, self.source.overrides)
        depth = getattr(config, self._layers_field)
        return (
            depth
            if len({*(getattr(config, "layer_types", None) or ())}) < 2
            and self._equal_blocks(depth)
            else 0
        )

    def _equal_blocks(self, depth: int) -> bool:
        """Whether a model of transformers has one stack of so many blocks, whose parts and sizes are equal."""
        with fake_tensors():
            model = self.source.build()
        stacks = [m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) == depth]
        lists = [
            value for value in self.source.overrides.values() if isinstance(value, list | tuple)
        ]
        return len(stacks) == 1 and len(set(map(repr, stacks[0]))) == 1 and not lists

    def _longest(self) -> int:
        """The longest sequence that the model takes, or that is tried."""
        if self.source.own:
            return self.source.context_length or MAX_SEQ_LEN
        return MAX_SEQ_LEN if self.source.attention_type == "dense" else MAX_MASKED

    def _shared(self, whole: Holding) -> Holding:
        """What one of several ranks holds under FSDP: its share, and the weights that are gathered to compute."""
        if self.ranks == 1:
            return whole
        parts = {
            part: -(-size // self.ranks) if part.kind in _SHARDED else size
            for part, size in whole.parts.items()
        }
        stacks: Counter[str] = Counter()
        for (kind, module), size in whole.by_module.items():
            if kind == Held.WEIGHTS:
                stacks[module.partition(".*")[0] if ".*" in module else ""] += size
        outside = stacks.pop("", 0)
        block = max(stacks.values(), default=0) // self.depth
        gathered = (
            outside + min(2, self.depth * len(stacks)) * block
        )  # the block that computes, and the next
        if any(part.kind == Held.GRADIENTS for part in parts):
            parts[Part(Held.TEMPORARIES, "gradients before they are scattered")] = outside + block
        return Holding(parts | {Part(Held.GATHERED): gathered})


def largest(
    need: Callable[[int], float], memory: int, start: int, most: int, least: int = 1
) -> int:
    """The largest n whose need fits and that of n + 1 does not; 0 where not even the least fits, `most` where all do.

    The next n is where the line through the last two needs meets the memory, and now and then the middle.

    Args:
        need: n → bytes, growing; infinite where n is not taken.
        memory: Bytes that there are.
        start: Where to begin.
        most: The largest that is asked for.
        least: The smallest that means anything.
    """
    fits, too_many = least - 1, most + 1
    before, at, guesses = (0, 0.0), min(max(start, least), most), 0
    while too_many - fits > 1:
        needed, guesses = need(at), guesses + 1
        if needed <= memory:
            fits = at
        else:
            too_many = at
        slope = (needed - before[1]) / (at - before[0]) if at != before[0] else math.inf
        line = at + (memory - needed) / slope if 0 < slope < math.inf else math.nan
        if needed < math.inf:
            before = at, needed
        if math.isnan(line) or guesses % _BISECT_EVERY == 0:
            at = (fits + too_many) // 2
        else:
            at = min(max(int(min(line, most)), fits + 1), too_many - 1)
    return fits if fits >= least else 0
