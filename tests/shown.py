"""What the report shows, by name."""

from nanolib.experiments import sections

SECTIONS = sections()
CHARTS = {name: chart for section in SECTIONS for name, chart in section.charts.items()}
VERDICTS = {
    section.experiment: lambda rows, section=section: list(map(str, section.verdict(rows)))
    for section in SECTIONS
}
