"""The parameters that all notebooks share."""

from __future__ import annotations

import functools
import json
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, Self

import pydantic

from nanolib.config import ATTENTION_KINDS, DTYPES, PRESETS, NanoConfig
from nanolib.measurement import MOST_LABEL, BadInput, did_you_mean, shown
from nanolib.meters.machine import resolve_device
from nanolib.meters.time.sampler import Collect, Timing
from nanolib.models import attention, text
from nanolib.params import StrictModel, free_label

# Parameters that schedule and name a run and do not change what it measures: `--resume` continues
# a run under another label.
SCHEDULING = {"suite", "label", "resume", "trace"}

MAX_SEQ_LEN = 2**24
MAX_CASES = 4096

Length = Annotated[int, pydantic.Field(gt=0, le=MAX_SEQ_LEN)]
Batch = Annotated[int, pydantic.Field(gt=0, le=65_536)]
Count = Annotated[
    int, pydantic.Field(gt=0, le=4096)
]  # of heads, their dimensions, layers or threads


class Params(StrictModel):
    """Parameters that every measuring notebook has.

    Attributes:
        device: `auto`, `cpu`, `cuda`, `cuda:1`, `mps` or `xpu`.
        rel_ci: Stop timing when the interval's half-width is this share of the estimate.
        budget_s: At most this long for one timing, s.
        case_timeout_s: At most this long for one case, s.
        isolation: `none`, or `process` for each case in a fresh one.
        seed: Seeds the inputs.
        trace: Whether to write torch's profile of each case, a Chrome trace, into `traces` in the
            output folder.
        suite: Which params set this is.
        label: Your name for the run.
        resume: Continue the last run with the same parameters, version and machine.
        grids: Names of lists whose every combination is a case.
    """

    grids: ClassVar[tuple[tuple[str, ...], ...]] = ()

    device: str = "auto"
    rel_ci: float = pydantic.Field(0.01, gt=0, lt=1)
    budget_s: float = pydantic.Field(0.3, gt=0, le=86_400)
    case_timeout_s: float = pydantic.Field(300.0, gt=0, le=604_800)
    isolation: Literal["none", "process"] = "none"
    seed: int = pydantic.Field(0, ge=0, lt=2**31)
    trace: bool = False
    suite: str = pydantic.Field("", max_length=MOST_LABEL)
    label: str = pydantic.Field("", max_length=MOST_LABEL)
    resume: bool = False
    _collect: Collect | None = pydantic.PrivateAttr(None)

    _label = pydantic.field_validator("label")(free_label)
    _distinct = pydantic.field_validator("*")(
        lambda value: distinct(value) if isinstance(value, list) else value
    )

    @pydantic.field_validator("device")
    @classmethod
    def _device_is_here(cls, value: str) -> str:
        resolve_device(value)
        return value

    @pydantic.model_validator(mode="after")
    def _cases_can_be_listed(self) -> Self:
        for grid in self.grids:
            if (count := math.prod(len(getattr(self, name)) for name in grid)) > MAX_CASES:
                longest = max(grid, key=lambda name: len(getattr(self, name)))
                raise ValueError(
                    f"{longest}: {' × '.join(grid)} are {count} combinations; "
                    f"give fewer values, for at most {MAX_CASES}"
                )
        return self

    def look(self, cases: Sequence[Any]) -> None:
        """Run the user's code that the parameters name on tensors without data, once for all cases.

        Raises:
            BadInput: There is no such code.
        """

    def timing(self, device: str) -> dict[str, Any]:
        """Return the arguments of `measure` for a call on this device."""
        return {
            "rel_ci": self.rel_ci,
            "budget_s": self.budget_s,
            "device": device,
            "collect": self._collect,
        }

    def timed(
        self, device: str, phases: Mapping[str, Callable[[], object]], *, total: str = "total"
    ) -> Timing:
        """Make the timing that a case yields, to be timed in turns with those of other cases.

        Args:
            device: Where it computes.
            phases: Scope → call.
            total: The scope of the phases' sum.
        """
        return Timing(phases, total=total, **self.timing(device))

    def collected_by(self, collect: Collect) -> Self:
        """Return a copy whose timings take their blocks from `collect`; see `measure`."""
        copy = self.model_copy()
        copy._collect = collect
        return copy

    def defining(self) -> dict[str, Any]:
        """Return the parameters that define what is measured, for the fingerprint of a run."""
        return {
            name: value
            for name, value in self.model_dump(mode="json").items()
            if name not in SCHEDULING
        }


def distinct(values: list[Any]) -> list[Any]:
    """Return `values` if none is repeated: a run measures each case once."""
    seen = [json.dumps(value, sort_keys=True) for value in values]
    times = Counter(seen)
    if twice := [value for value, text in zip(values, seen, strict=True) if times[text] > 1]:
        raise ValueError(f"{shown(twice[0])} is given twice; leave one out")
    return values


def known(values: list[str], names: Any, what: str) -> list[str]:
    """Return `values` if each is one of the names."""
    for value in values:
        if value not in names:
            hint = did_you_mean(value, names)
            raise ValueError(
                f"{shown(value)} is not a known {what}; {hint and f'{hint} '}use {', '.join(names)}"
            )
    return values


known_presets = functools.partial(known, names=PRESETS, what="preset")
known_dtypes = functools.partial(known, names=DTYPES, what="dtype")
known_kinds = functools.partial(known, names=ATTENTION_KINDS, what="attention kind")


def known_corpus(value: str) -> str:
    """Return `value` if it names a text; two bytes are enough to know."""
    text.load(value, max_bytes=2)
    return value


def fitting_config(
    preset: str,
    overrides: Mapping[str, Any],
    *,
    longest: tuple[str, int] = ("", 0),
    reads_text: bool = False,
) -> NanoConfig:
    """Make the config of a preset with `overrides`, options of its attention included.

    Args:
        preset: A key of `PRESETS`.
        overrides: Fields that differ.
        longest: The field of the longest sequence, and its tokens.
        reads_text: Whether its input is bytes of text, and not ids of its own vocabulary.

    Raises:
        ValueError: They do not fit; the message begins with a field.
    """
    try:
        config = NanoConfig.from_preset(preset, **overrides)
        attention.shared_options(config.attention_type, config.attention_options)
    except BadInput as error:
        raise ValueError(
            "; ".join(f"overrides: {preset}: {line}" for line in error.lines)
        ) from None
    name, tokens = longest
    if tokens > config.context_length:
        raise ValueError(
            f"{name}: {tokens} exceeds the context_length {config.context_length} of {preset}; "
            f"shorten it or set overrides: {{context_length: {tokens}}}"
        )
    if reads_text and config.vocab_size < text.VOCAB_SIZE:
        raise ValueError(
            f"overrides: vocab_size {config.vocab_size} cannot hold the {text.VOCAB_SIZE} bytes "
            "of the text; raise it"
        )
    return config
