"""What can this machine reach at best? Its ceilings alone, by the same path as everything else; `nano doctor` runs it."""

from __future__ import annotations

from typing import ClassVar

import pydantic

from nanolib.meters.machine import resolve_device
from nanolib.run import params as shared
from nanolib.run.case import Case
from nanolib.run.ceilings import ceiling_cases
from nanolib.run.params import distinct, known_dtypes


class Params(shared.Params):
    """Parameters of the examination.

    Attributes:
        dtypes: For which dtypes to time a matrix product.
    """

    NAME: ClassVar[str] = "doctor"

    dtypes: list[str] = pydantic.Field(["float32", "bfloat16", "float16"], min_length=1)

    _dtypes = pydantic.field_validator("dtypes")(known_dtypes)
    _distinct = pydantic.field_validator("dtypes")(distinct)


def cases(params: Params) -> list[Case]:
    """One ceiling per dtype, and the copy."""
    return ceiling_cases(resolve_device(params.device), params.dtypes, params.budget_s)
