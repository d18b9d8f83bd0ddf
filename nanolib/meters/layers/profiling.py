"""How closely a profiler looks: minimal, standard, deep, or as the user says."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Self

from nanolib.measurement import BadInput


@dataclass(unsafe_hash=True)  # as a key it must not be changed
class ProfilingConfig:
    """Settings of a profiler: what it records, and how often.

    Assignment is checked. A profiler keeps the settings that it was made with.

    Attributes:
        modules: Whether every module is timed in each k-th call. The blocks and what stands beside them are in every call.
        capture_activations: Whether the outputs of timed modules are summarised in each k-th call.
        deep_profiling: Whether each k-th call is a deep pass: operation by operation, and attention looked at.
        every_nth_layer: Of the blocks, only each n-th is looked into.
        every_kth_token: k: so often a call of the model is looked at closely.
        near_zero: Activations, and attention weights, smaller than this count as near zero.
        power_sample_interval_ms: How often power is read beside it.
        batch_db_commits: Whether rows of a trace are committed in batches, or else after each call of the model.
        preallocate_metrics: For so many summarised calls there is room on the device between two copies to the host.

    Example:
        >>> ProfilingConfig(modules=True, every_kth_token=0)
        Traceback (most recent call last):
        nanolib.measurement.BadInput: ...every_kth_token...
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

    def __setattr__(self, name: str, value: Any) -> None:
        """Set a field.

        Raises:
            BadInput: There is none of that name, or the value will not do; nothing is changed.
        """
        if name not in _FIELDS:
            raise BadInput(f"{name}: there is no such field; use {', '.join(_FIELDS)}")
        kind, needed = _FIELDS[name]
        fits = isinstance(value, kind) and (kind is bool or not isinstance(value, bool))
        if not fits or (kind is not bool and not value > 0):
            raise BadInput(f"{name}: {value!r} will not do; give {needed}")
        object.__setattr__(self, name, value)

    @property
    def looks(self) -> bool:
        """Whether any call is looked at closely."""
        return self.modules or self.capture_activations or self.deep_profiling

    @classmethod
    def minimal(cls) -> Self:
        """Record blocks alone."""
        return cls()

    @classmethod
    def standard(cls) -> Self:
        """Record every module, and activations, in each k-th call."""
        return cls(modules=True, capture_activations=True)

    @classmethod
    def deep(cls) -> Self:
        """Record as `standard` does, and deep passes."""
        return cls(modules=True, capture_activations=True, deep_profiling=True)

    @classmethod
    def custom(cls, **fields: Any) -> Self:
        """Change fields of `standard`.

        Raises:
            BadInput: An unknown field, or a value that will not do.
        """
        made = cls.standard()
        for name, value in fields.items():
            setattr(made, name, value)
        return made

    @classmethod
    def named(cls, mode: str) -> Self:
        """Give the settings of `minimal`, `standard` or `deep`."""
        return {"minimal": cls.minimal, "standard": cls.standard, "deep": cls.deep}[mode]()


_GIVE = {
    "bool": (bool, "true or false"),
    "int": (int, "a whole number above 0"),
    "float": (int | float, "a number above 0"),
}
_FIELDS = {each.name: _GIVE[each.type] for each in fields(ProfilingConfig)}

MODES = ("minimal", "standard", "deep")
