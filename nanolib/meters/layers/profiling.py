"""How closely a profiler looks: minimal, standard, deep, or as the user says."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Self

from nanolib.measurement import BadInput


@dataclass(frozen=True)
class ProfilingConfig:
    """What is recorded, and how often.

    Attributes:
        modules: Whether every module is timed in each k-th call. The blocks and what stands beside them are in every call.
        capture_activations: Whether the outputs of timed modules are summarised in each k-th call.
        deep_profiling: Whether each k-th call is a deep pass: operation by operation, attention in steps and looked at.
        every_nth_layer: Of the blocks, only each n-th is looked into.
        every_kth_token: k: so often a call of the model is looked at closely.
        near_zero: Activations, and attention weights, smaller than this count as near zero.
        power_sample_interval_ms: How often power is read beside it.
        batch_db_commits: Whether rows of a trace are committed in batches, or else after each call of the model.
        preallocate_metrics: For so many summarised calls there is room on the device between two copies to the host.
    """

    modules: bool = False
    capture_activations: bool = False
    deep_profiling: bool = False
    every_nth_layer: int = 1
    every_kth_token: int = 16
    near_zero: float = 1e-2
    power_sample_interval_ms: float = 50.0
    batch_db_commits: bool = True
    preallocate_metrics: int = 64

    def __post_init__(self) -> None:
        for name in ("every_nth_layer", "every_kth_token", "preallocate_metrics"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise BadInput(f"{name}: {value!r} will not do; give a whole number above 0")
        for name in ("near_zero", "power_sample_interval_ms"):
            value = getattr(self, name)
            if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
                raise BadInput(f"{name}: {value!r} will not do; give a number above 0")
        for name in ("modules", "capture_activations", "deep_profiling", "batch_db_commits"):
            if not isinstance(getattr(self, name), bool):
                raise BadInput(f"{name}: {getattr(self, name)!r} will not do; give true or false")

    @property
    def looks(self) -> bool:
        """Whether any call is looked at closely."""
        return self.modules or self.capture_activations or self.deep_profiling

    @classmethod
    def minimal(cls) -> Self:
        """Blocks alone."""
        return cls()

    @classmethod
    def standard(cls) -> Self:
        """Every module, and activations now and then."""
        return cls(modules=True, capture_activations=True)

    @classmethod
    def deep(cls) -> Self:
        """The standard one, and deep passes."""
        return cls(modules=True, capture_activations=True, deep_profiling=True)

    @classmethod
    def custom(cls, **fields: Any) -> Self:
        """The standard one, changed.

        Raises:
            BadInput: An unknown field, or a value that will not do.
        """
        try:
            return replace(cls.standard(), **fields)
        except TypeError:
            unknown = sorted(set(fields) - set(cls.__dataclass_fields__))
            raise BadInput(f"{unknown[0]}: there is no such field; use {', '.join(cls.__dataclass_fields__)}") from None

    @classmethod
    def named(cls, mode: str) -> Self:
        """`minimal`, `standard` or `deep`."""
        return {"minimal": cls.minimal, "standard": cls.standard, "deep": cls.deep}[mode]()


MODES = ("minimal", "standard", "deep")
