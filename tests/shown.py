"""What the report shows, by name."""

from nanolib.experiments import sections

SECTIONS = sections()
CHARTS = {name: chart for section in SECTIONS for name, chart in section.charts.items()}
CLAIMS = {section.experiment: section.verdict for section in SECTIONS}
VERDICTS = {
    name: lambda rows, findings=findings: list(map(str, findings(rows)))
    for name, findings in CLAIMS.items()
}
