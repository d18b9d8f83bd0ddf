"""What a person sees of whole models: inference, generation, training, memory, loss, and how they grow with the length."""

from nanolib.experiments.model.view import charts
from nanolib.experiments.model.view.batches import BATCH_COLUMNS, batch_table, generation_batches
from nanolib.experiments.model.view.charts import (
    model_loss,
    model_memory,
    model_performance,
    model_roofline,
)
from nanolib.experiments.model.view.memory import (
    HOLDER_COLUMNS,
    holders_table,
    model_peaks,
)
from nanolib.experiments.model.view.tables import (
    MODEL_COLUMNS,
    SCALING_COLUMNS,
    loss_table,
    model_table,
    scaling_table,
)
from nanolib.experiments.model.view.words import verdict
from nanolib.report.section import CaseTable, Section

SECTION = Section(
    "model",
    "What does a whole model cost?",
    charts.CHARTS,
    {
        "Inference, generation and training": CaseTable(model_table, MODEL_COLUMNS),
        "Batches of a generation": CaseTable(batch_table, BATCH_COLUMNS),
        "How it grows with the length": CaseTable(scaling_table, SCALING_COLUMNS),
        "Who holds the memory": CaseTable(holders_table, HOLDER_COLUMNS),
    },
    verdict,
    files=charts.FILES,
)
