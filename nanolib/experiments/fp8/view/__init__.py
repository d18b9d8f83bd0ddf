"""What a person sees of FP8: speed, loss parity, and what casts do to the products."""

import pandas as pd

from nanolib.experiments.fp8.view.numerics import fp8_numerics, numerics_table, numerics_words
from nanolib.experiments.fp8.view.parity import (
    PARITY_COLUMNS,
    fp8_parity,
    parity_table,
    parity_words,
)
from nanolib.experiments.fp8.view.speed import (
    SPEED_COLUMNS,
    fp8_precisions,
    speed_table,
    speed_words,
)
from nanolib.report.claim import Claim
from nanolib.report.overview import cached, of_experiment
from nanolib.report.section import CaseTable, Section


@cached
def verdict(rows: pd.DataFrame) -> list[Claim]:
    """Does fp8 pay here, from which size, and at what loss."""
    if of_experiment(rows, "fp8").empty:
        return [
            Claim(
                "Nothing of fp8 was measured, so there is no verdict", advice="nano run quick fp8"
            )
        ]
    return [
        *speed_words(speed_table(rows)),
        *parity_words(parity_table(rows)),
        *numerics_words(numerics_table(rows)),
    ]


SECTION = Section(
    "fp8",
    "Is FP8 faster, and does the loss match?",
    {"fp8_precisions": fp8_precisions, "fp8_parity": fp8_parity, "fp8_numerics": fp8_numerics},
    {
        "Speed and memory": CaseTable(speed_table, SPEED_COLUMNS),
        "Loss beside bf16": CaseTable(parity_table, PARITY_COLUMNS),
    },
    verdict,
)
