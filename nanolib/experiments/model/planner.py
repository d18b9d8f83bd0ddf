"""One model's uses planned at one shape after the other, and the largest shapes that fit."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import math
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import nn

from nanolib.config import PRESETS
from nanolib.experiments.model.model_cases import GenerationCase, ModelCase
from nanolib.experiments.model.steps import Training
from nanolib.measurement import BadInput, Held, Unsupported
from nanolib.meters.fakes import why_unknown
from nanolib.meters.holders import Holding, Part
from nanolib.meters.memory import fake_tensors
from nanolib.models.user import hugging_face_config, layers_field, silent
from nanolib.run.outcome import LookTimeout, time_to_look
from nanolib.run.params import MAX_SEQ_LEN
from nanolib.run.workload import Workload, holdings_by_depth

MAX_BATCH = 65_536
MAX_MASKED = 2**17  # tokens: where a mask is made, its tiles are real ones, and grow with the square
_ASK_S = 15.0  # what a shape may take of a model that is code
_SOON_S = 3.0  # and what others should, once one took longer
_ENOUGH = 12  # guesses along a line; then the rest is halved
_SHARDED = (Held.WEIGHTS, Held.GRADIENTS, Held.STATES)

# Use → mode of the case, optimisation.
_LEAST = {"decoding": 2}  # tokens: one in the cache, and a new one
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
        largest_batch: At this length; 0 where not one sequence fits.
        longest: At this batch, tokens; 0 where none fits.
        unbounded: Whether more than that batch, and than that length, was not tried.
        refused: Why it is not known, in one line; then there is no holding.
    """

    name: str
    holding: Holding
    memory: int
    largest_batch: int = 0
    longest: int = 0
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


class Planner:
    """Plans uses of one model at one shape after the other; each is counted once."""

    def __init__(self, source: ModelCase, optimizer: str, ranks: int) -> None:
        self.source, self.optimizer, self.ranks = source, optimizer, ranks
        self._known: dict[tuple[str, int, int], Holding] = {}
        self._fakes = fake_tensors()
        self._trainings: dict[str, Training] = {}
        self._pace: dict[str, float] = {}  # use → the most tokens of a sequence that it planned in a second
        self._late: dict[str, float] = {}  # use → the longest that it is asked for, once one took too long

    def use(self, name: str, memory: int) -> Use:
        """What a use needs, and the most that fits."""
        here = self.needs(name, memory)
        if here.refused:
            return here
        batch, length = self.source.batch_size, self.source.seq_len
        fixed = sum(size for kind, size in here.holding.by_kind.items() if kind in (*_SHARDED, Held.GATHERED))
        peaks = lambda n: self._peak(name, n * self.ranks, length)  # noqa: E731
        most = largest(peaks, memory, batch // self.ranks, MAX_BATCH // self.ranks, fixed) * self.ranks
        peaks = lambda n: self._peak(name, batch, n)  # noqa: E731
        longest = largest(peaks, memory, length, self._longest(), fixed, least=_LEAST.get(name, 1))
        late = name in self._late
        ends = (
            late or most == MAX_BATCH // self.ranks * self.ranks,
            late or (longest == self._longest() and not self.source.own),
        )
        return dataclasses.replace(here, largest_batch=most, longest=longest, unbounded=ends)

    def needs(self, name: str, memory: int) -> Use:
        """What a use needs, without the most that fits."""
        if self.source.seq_len < (least := _LEAST.get(name, 1)):
            return Use(name, Holding({}), memory, refused=f"it takes {least} tokens or more")
        try:
            here = self.holding(name, self.source.batch_size, self.source.seq_len)
        except Unsupported as error:
            return Use(name, Holding({}), memory, refused=str(error))
        except BadInput as error:
            return Use(name, Holding({}), memory, refused=error.lines[0])
        except (Exception, SystemExit) as error:  # a model may look at its data, which is not there
            return Use(name, Holding({}), memory, refused=why_unknown(error))
        return Use(name, here, memory)

    def holding(self, name: str, batch: int, length: int) -> Holding:
        """Who holds a use's peak at a shape, on one rank."""
        key = (name, batch, length)
        if key not in self._known:
            case, begin = self._case(name, batch // self.ranks, length), time.monotonic()
            watched = self._watched(name) if case.runs_code else contextlib.nullcontext()
            with self._fakes, silent(), watched:  # of a shape that a model does not take torch says more than its error
                scopes = holdings_by_depth(self.depth, lambda depth: self._at(case, depth), self._shared)
            self._known[key] = max(scopes.values(), key=lambda held: held.peak)
            self._pace[name] = max(self._pace.get(name, 0), length / (time.monotonic() - begin))
        return self._known[key]

    @contextlib.contextmanager
    def _watched(self, name: str) -> Iterator[None]:
        """Code of the user's runs here: its time is limited, and what it prints stands aside."""
        with contextlib.redirect_stdout(sys.stderr), time_to_look(_ASK_S if name in self._pace else None):
            yield

    def _peak(self, name: str, batch: int, length: int) -> float:
        """Bytes at a shape; none are enough where the model does not take it, as one of the user's own may have its limits.

        Where planning a shape took too long, as in a loop over tokens, no shape is tried that would take as long.
        """
        if length > self._late.get(name, math.inf):
            return math.inf
        try:
            return self.holding(name, batch, length).peak
        except LookTimeout:
            self._late[name] = self._pace[name] * _SOON_S
            return math.inf
        except (Exception, SystemExit):
            return math.inf

    def _case(self, name: str, batch: int, length: int) -> ModelCase:
        mode, optimisation = USES[name]
        fields = {field.name: getattr(self.source, field.name) for field in dataclasses.fields(ModelCase)}
        fields |= {"mode": mode, "optimisation": optimisation, "batch_size": batch, "seq_len": length}
        if not self.source.own:
            fields["overrides"] = self.source.overrides | room(self.source.preset, self.source.overrides, length)
        case = ModelCase(**fields)
        if mode == "generation":  # the cache holds `length` tokens in the end
            case = GenerationCase(**fields | {"seq_len": length - 1}, new_tokens=1)
        if reason := case.not_planned():
            raise Unsupported(reason)
        return case

    def _at(self, case: ModelCase, depth: int) -> tuple[nn.Module, Iterator[Workload]]:
        build = functools.partial(case.step_at_depth, depth, self.optimizer, self._layers_field)
        if case.mode != "training" or not depth:
            step = build()
        else:  # one of another shape has made the optimizer's states, which takes a step
            key = json.dumps([case.optimisation, depth, case.overrides], default=str)
            if key not in self._trainings:
                self._trainings[key] = build()
            step = self._trainings[key]
            step.ids = case.no_ids()
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
        lists = [value for value in self.source.overrides.values() if isinstance(value, list | tuple)]
        return depth if not lists and equal_blocks(self.source, depth) else 0

    def _longest(self) -> int:
        """The longest sequence that the model takes, or that is tried."""
        if self.source.own:
            return self.source.context_length or MAX_SEQ_LEN
        return MAX_SEQ_LEN if self.source.attention_type == "dense" else MAX_MASKED

    def _shared(self, whole: Holding) -> Holding:
        """What one of several ranks holds under FSDP: its share, and the weights that are gathered to compute."""
        if self.ranks == 1:
            return whole
        parts = {part: -(-size // self.ranks) if part.kind in _SHARDED else size for part, size in whole.parts.items()}
        stacks: Counter[str] = Counter()
        for (kind, module), size in whole.by_module.items():
            if kind == Held.WEIGHTS:
                stacks[module.partition(".*")[0] if ".*" in module else ""] += size
        outside = stacks.pop("", 0)
        block = max(stacks.values(), default=0) // self.depth
        gathered = outside + min(2, self.depth * len(stacks)) * block  # the block that computes, and the next
        if any(part.kind == Held.GRADIENTS for part in parts):
            parts[Part(Held.TEMPORARIES, "gradients before they are scattered")] = outside + block
        return Holding(parts | {Part(Held.GATHERED): gathered})


def equal_blocks(source: ModelCase, depth: int) -> bool:
    """Whether the one stack of so many blocks in a model of transformers is of equal ones, in shapes and in settings."""
    with fake_tensors():
        model = source.build()
    stacks = [m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) == depth]
    return len(stacks) == 1 and len({_signature(block) for block in stacks[0]}) == 1


def _signature(block: nn.Module) -> str:
    """What a block is: its modules, their plain settings but for the block's number, and the shapes of what they hold."""
    told = []
    for name, module in block.named_modules():
        plain = {
            key: value for key, value in vars(module).items() if isinstance(value, bool | int | float | str | None)
        }
        plain = {key: value for key, value in plain.items() if not key.endswith(("idx", "index", "_id"))}
        held = {
            key: tuple(p.shape)
            for key, p in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
        }
        told.append((name, type(module).__name__, sorted(plain.items(), key=str), sorted(held.items())))
    return repr(told)


def largest(need: Callable[[int], float], memory: int, start: int, most: int, fixed: int = 0, least: int = 1) -> int:
    """The largest n whose need fits and that of n + 1 does not; 0 where not even the least fits, `most` where all do.

    Args:
        need: n → bytes, growing; infinite where n is not taken.
        memory: Bytes that there are.
        start: Where to begin.
        most: The largest that is asked for.
        fixed: Bytes that do not grow with n, as far as is known.
        least: The smallest that means anything.
    """
    known: dict[int, float] = {0: fixed}
    fits, too_many, at = least - 1, most + 1, min(max(start, least), most)
    while too_many - fits > 1:
        needed = need(at)
        if needed <= memory:
            fits = at
        else:
            too_many = at
        if needed < math.inf:
            known[at] = needed
        # along the line through the two that lie next to the limit, which meets a parabola's in a few steps; not where it leads
        # past what is known not to fit, since the need grows faster from somewhere on
        a, b = (sorted(known, key=lambda n: abs(known[n] - memory)) * 2)[:2]
        slope = (known[b] - known[a]) / (b - a) if b != a else 0.0
        guess = a + int((memory - known[a]) // slope) if slope > 0 and len(known) < _ENOUGH else None
        lowest = fits if fits >= least else -math.inf  # where the least may not fit either, it is asked at once
        astray = guess is None or (too_many <= most and not lowest <= guess <= too_many)
        at = (fits + too_many) // 2 if astray else min(max(guess, fits + 1), too_many - 1)
    return fits if fits >= least else 0
