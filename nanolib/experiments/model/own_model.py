"""What the parameters of notebooks share that take a model of the user's own."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import pydantic

from nanolib.meters.machine import resolve_device
from nanolib.run import params as shared
from nanolib.run.own_model import known_model, rehearse


class OwnModelParams(shared.Params):
    """Parameters whose notebook declares `model` and `model_options`, among its own and in their order."""

    LENGTHS: ClassVar[str] = "seq_lens"  # the parameter that says how long its sequences are

    _model = pydantic.field_validator("model", check_fields=False)(known_model)

    @property
    def reads(self) -> tuple[int, str]:
        """The longest sequence that a model is given, tokens, and the parameter that says so."""
        return int(np.max(getattr(self, self.LENGTHS))), self.LENGTHS

    def rehearse(self) -> None:
        """Build a model of the user's own once, and let it read, so that what is wrong with it is told once.

        Raises:
            BadInput: It cannot be built.
        """
        rehearse(self.model, self.model_options, *self.reads, resolve_device(self.device))
