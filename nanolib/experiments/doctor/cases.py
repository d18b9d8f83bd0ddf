"""Parameters and cases of `nano doctor`: the peak rates of this machine."""

from __future__ import annotations

from typing import ClassVar

import pydantic

from nanolib.meters.ceilings import PRODUCTS
from nanolib.meters.machine import resolve_device
from nanolib.run import params as shared
from nanolib.run.case import Case
from nanolib.run.params import known_dtypes
from nanolib.run.peaks_case import SustainedCase, ceiling_cases, no_product


class Params(shared.Params):
    """Parameters of `nano doctor`.

    Attributes:
        dtypes: Dtypes of the matrix products. tf32 and FP8 are added if the device has them.
        sustained_s: Length of a sustained measurement of each product, s. 0 means none.
    """

    NAME: ClassVar[str] = "doctor"

    dtypes: list[str] = pydantic.Field(["float32", "bfloat16", "float16"], min_length=1)

    sustained_s: float = pydantic.Field(0.0, ge=0, le=3600)

    _dtypes = pydantic.field_validator("dtypes")(known_dtypes)


def cases(params: Params) -> list[Case]:
    """List the peaks of each product and of the copy, and the sustained rates if requested."""
    device = resolve_device(params.device)
    kinds = [*params.dtypes, *(kind for kind in PRODUCTS if not no_product(kind, device))]
    long = (
        [SustainedCase(device, kind, params.sustained_s) for kind in kinds]
        if params.sustained_s
        else []
    )
    return [*ceiling_cases(device, kinds, params.budget_s), *long]
