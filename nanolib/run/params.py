"""Define the parameters that all measuring notebooks share, and check their values."""

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal, Self, TypeVar

import pydantic

from nanolib.config import ATTENTION_KINDS, DTYPES, PRESETS
from nanolib.measurement import MOST_LABEL, quote
from nanolib.meters.machine import resolve_device
from nanolib.meters.sampler import Collect, Timing
from nanolib.params import StrictModel

Length = Annotated[int, pydantic.Field(gt=0, le=2**24)]
Batch = Annotated[int, pydantic.Field(gt=0, le=65_536)]
# The number of heads, layers or threads, or the dimension of a head.
Count = Annotated[int, pydantic.Field(gt=0, le=4096)]
Steps = Annotated[int, pydantic.Field(gt=0, le=1_000_000)]
_Value = TypeVar("_Value")
# A list of values. Each value gives one or more cases.
Grid = Annotated[list[_Value], pydantic.Field(min_length=1, max_length=64)]
Preset = Literal[tuple(PRESETS)]
Kind = Literal[tuple(ATTENTION_KINDS)]
Dtypes = Grid[Literal[DTYPES]]


class Params(StrictModel):
    """Parameters of every measuring notebook.

    Attributes:
        device: Device to measure: `auto`, `cpu`, `cuda`, `cuda:1`, `mps` or `xpu`.
        rel_ci: Stop timing when the interval's half-width is at most this share of the estimate.
        budget_s: Longest time of one timing, s.
        case_timeout_s: Longest time of one case, s.
        isolation: Use `process` to run each case in a fresh process, otherwise `none`.
        seed: Seed of the random inputs.
        trace: Whether to write a Chrome trace of each case into the folder `traces`.
        suite: Name of the parameter set.
        label: Your name for the run.
        resume: Continue the last run with the same parameters, version and machine.
    """

    device: str = "auto"
    rel_ci: float = pydantic.Field(0.01, gt=0, lt=1)
    budget_s: float = pydantic.Field(0.3, gt=0, le=86_400)
    case_timeout_s: float = pydantic.Field(300.0, gt=0, le=604_800)
    isolation: Literal["none", "process"] = "none"
    seed: int = pydantic.Field(0, ge=0, lt=2**31)
    trace: bool = False
    suite: str = pydantic.Field("", max_length=MOST_LABEL)
    # papermill passes a label of digits as a number.
    label: str = pydantic.Field("", max_length=MOST_LABEL, coerce_numbers_to_str=True)
    resume: bool = False
    _collect: Collect | None = pydantic.PrivateAttr(None)

    @pydantic.field_validator("*")
    @classmethod
    def _fold(cls, value):
        # A repeated value would give the same case again.
        if not isinstance(value, list):
            return value
        return [item for index, item in enumerate(value) if item not in value[:index]]

    @pydantic.field_validator("device")
    @classmethod
    def _device_is_here(cls, value: str) -> str:
        resolve_device(value)
        return value

    @pydantic.field_validator("label")
    @classmethod
    def _label_is_a_name(cls, value: str) -> str:
        is_taken = value in ("all", "latest", "newest") or value.startswith("latest~")
        if is_taken or not value.isprintable():
            raise ValueError(
                f"{quote(value)} cannot name a run; "
                "use other printable text than all, newest, latest or latest~1"
            )
        return value

    def look(self, cases: Sequence[Any]) -> None:
        """Run the user's code once for all cases, on tensors without data.

        Raises:
            BadInput: The code that a parameter names does not exist.
        """

    def timing(self, device: str, phases: Mapping[str, Callable[[], object]], **changes) -> Timing:
        """Make the `Timing` of some calls, such as the one that a case yields.

        Args:
            device: Device on which the calls compute.
            phases: Name of each scope → function to time.
            changes: Other values of the fields of `Timing`.
        """
        settings = {"rel_ci": self.rel_ci, "budget_s": self.budget_s, "collect": self._collect}
        return Timing(phases, device=device, **settings | changes)

    def with_collector(self, collect: Collect) -> Self:
        """Return a copy of the parameters. Timings with this copy call `collect` for blocks."""
        copy = self.model_copy()
        copy._collect = collect
        return copy

    def defining(self) -> dict[str, Any]:
        """Return the parameters that define what a run measures, for the run's fingerprint.

        `--resume` continues a run even if the values of the other parameters differ.
        """
        return self.model_dump(mode="json", exclude={"suite", "label", "resume", "trace"})


def check_heads(params):
    """Return `params` if `num_kv_heads` divides `num_heads`. 0 means `num_heads`."""
    heads, kv_heads = params.num_heads, params.num_kv_heads
    if kv_heads and heads % kv_heads:
        raise ValueError(
            f"num_kv_heads: {kv_heads} does not divide num_heads {heads}; choose a divisor"
        )
    return params
