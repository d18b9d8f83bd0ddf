"""What can this machine reach at best? Its ceilings alone, by the same path as everything else; `nano doctor` runs it."""

from __future__ import annotations

from typing import ClassVar

import pydantic

from nanolib.meters.ceilings import PRODUCTS
from nanolib.meters.machine import resolve_device
from nanolib.run import params as shared
from nanolib.run.case import Case
from nanolib.run.params import distinct, known_dtypes
from nanolib.run.peaks_case import SustainedCase, ceiling_cases, no_product


class Params(shared.Params):
    """Parameters of the examination.

    Attributes:
        dtypes: For which dtypes to time a matrix product; tf32 and 8 bits are added where the device has them.
        sustained_s: Time each product for so long too, and take the second half, s; 0 for not.
    """

    NAME: ClassVar[str] = "doctor"

    dtypes: list[str] = pydantic.Field(["float32", "bfloat16", "float16"], min_length=1)

    sustained_s: float = pydantic.Field(0.0, ge=0, le=3600)

    _dtypes = pydantic.field_validator("dtypes")(known_dtypes)
    _distinct = pydantic.field_validator("dtypes")(distinct)


def cases(params: Params) -> list[Case]:
    """One ceiling per way to multiply, the copy, and what each product sustains where that is asked for."""
    device = resolve_device(params.device)
    kinds = [*params.dtypes, *(kind for kind in PRODUCTS if not no_product(kind, device))]
    long = (
        [SustainedCase(device, kind, params.sustained_s) for kind in kinds]
        if params.sustained_s
        else []
    )
    return [*ceiling_cases(device, kinds, params.budget_s), *long]
