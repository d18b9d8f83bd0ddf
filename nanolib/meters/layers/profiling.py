"""Settings of a profiler: `minimal`, `standard`, `deep`, or your own."""

from __future__ import annotations

from typing import Any, ClassVar, Self

import pydantic

from nanolib.params import StrictModel


class ProfilingConfig(StrictModel):
    """What a profiler records, and how often.

    Assignment is validated. A profiler keeps the settings with which it was made.

    Attributes:
        modules: Time all modules in each k-th call. Blocks, and the modules next to them, are timed
            in every call.
        capture_activations: Summarize the outputs of the timed modules in each k-th call.
        deep_profiling: Profile the operations and the attention weights of each k-th call.
        every_nth_layer: Time the modules of each n-th block only.
        every_kth_token: k, in calls of the model.
        near_zero: Activations and attention weights below this count as near zero.
        power_sample_interval_ms: Time between power samples.
        batch_db_commits: Commit rows of a trace in batches; if false, after each call.
        preallocate_metrics: Summaries that stay on the device before they are copied to the host.

    Example:
        >>> ProfilingConfig(every_kth_token=0)
        Traceback (most recent call last):
        nanolib.measurement.BadInput: profiling.every_kth_token: ...
    """

    NAME: ClassVar[str] = "profiling"

    modules: bool = False
    capture_activations: bool = False
    deep_profiling: bool = False
    every_nth_layer: int = pydantic.Field(1, gt=0)
    every_kth_token: int = pydantic.Field(16, gt=0)
    near_zero: float = pydantic.Field(1e-2, gt=0)
    power_sample_interval_ms: float = pydantic.Field(50.0, gt=0)
    batch_db_commits: bool = True
    preallocate_metrics: int = pydantic.Field(64, gt=0)

    @property
    def has_details(self) -> bool:
        """Whether each k-th call is profiled in detail."""
        return self.modules or self.capture_activations or self.deep_profiling

    @classmethod
    def minimal(cls, **changes: Any) -> Self:
        """Time the blocks only."""
        return cls(**changes)

    @classmethod
    def standard(cls, **changes: Any) -> Self:
        """Time every module, and summarize its output, in each k-th call."""
        return cls(**{"modules": True, "capture_activations": True} | changes)

    custom = standard

    @classmethod
    def deep(cls, **changes: Any) -> Self:
        """Like `standard`, and profile the operations of each k-th call."""
        return cls.standard(**{"deep_profiling": True} | changes)


MODES = {
    "minimal": ProfilingConfig.minimal,
    "standard": ProfilingConfig.standard,
    "deep": ProfilingConfig.deep,
}
