"""What a person sees of ranks: decoding over a sharded cache, prefill, memory, and training."""

import pandas as pd

from nanolib.experiments.distributed.view.decode import decode_scaling, decode_shares, decode_words
from nanolib.experiments.distributed.view.decode_tables import (
    COMPONENT_COLUMNS,
    DECODE_COLUMNS,
    component_table,
    decode_table,
)
from nanolib.experiments.distributed.view.sharding import (
    PREFILL_COLUMNS,
    TRAINING_COLUMNS,
    prefill_table,
    prefill_times,
    sharded_memory,
    sharding_words,
    training_scaling,
    training_table,
)
from nanolib.report.claim import Claim
from nanolib.report.overview import cached
from nanolib.report.section import CaseTable, Section


@cached
def verdict(rows: pd.DataFrame) -> list[Claim]:
    """Which form on how many ranks, what bounds it, and what training's communication costs."""
    nothing = Claim(
        "No case across ranks gave a time, so there is no verdict",
        advice="nano run quick distributed",
    )
    return [*decode_words(rows), *sharding_words(rows)] or [nothing]


SECTION = Section(
    "distributed",
    "How well does attention scale across ranks?",
    {
        "decode_scaling": decode_scaling,
        "decode_shares": decode_shares,
        "sharded_memory": sharded_memory,
    },
    {
        "Decoding": CaseTable(decode_table, DECODE_COLUMNS),
        "Components of a call": CaseTable(component_table, COMPONENT_COLUMNS),
        "Whole sequences": CaseTable(prefill_table, PREFILL_COLUMNS),
        "Training": CaseTable(training_table, TRAINING_COLUMNS),
    },
    verdict,
    files={"prefill_times": prefill_times, "training_scaling": training_scaling},
)
