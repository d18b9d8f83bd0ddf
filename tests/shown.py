"""What the report shows, by name."""

from nanolib.report.charts import CHARTS
from nanolib.report.page import SECTIONS
from nanolib.report.verdicts import VERDICTS

__all__ = ["CHARTS", "SECTIONS", "VERDICTS", "verdict"]


def verdict(section, rows):
    return VERDICTS[section.experiment](rows)
