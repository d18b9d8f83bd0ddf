"""What in a verdict contradicts the rows that it was made of."""

import math
import re

# What a sentence says of two figures, the first against each of the others.
_SAYS = (
    (r" is the fastest", {"above"}),
    (r"(?i)^no clear difference between (?!sparse)", {"no clear difference"}),
    (r" is faster than one rank", {"above"}),
    (r" is slower than one rank", {"below"}),
    (r"increases the loss|is higher without", {"above"}),
    (r"lowers the loss|is lower without", {"below"}),
)
_ORDERING = re.compile(r"fastest|faster|slower|is higher|is lower|compute-bound(?! in \d)")
_LENGTHS = re.compile(r"^Sparse attention is faster than .* at ([\d,]+(?:(?:, | and )[\d,]+)*) tok")


def contradictions(finding, rows):
    """Say what the rows do not bear: figures of no row, other orders, orders without figures."""
    stands = {(row.metric, *_ends(row)) for row in rows.itertuples()}
    pairs = finding.compared
    for figure in [*finding.figures, *(one for pair in pairs for one in pair[::2])]:
        if figure.metric and (figure.metric, *_ends(figure)) not in stands:
            yield f"no row holds {figure}"
    for first, order, second in pairs:
        if (order == "below") != (first.high < second.low):
            yield f"{first} is not {order} {second}"
        if (order == "above") != (first.low > second.high):
            yield f"{first} is not {order} {second}"
    orders = [str(order) for _, order, _ in pairs]
    for pattern, allowed in _SAYS:
        if re.search(pattern, finding.text) and not {*orders[:1]} <= allowed:
            yield f"its figures lie {orders[0]}"
    if _ORDERING.search(finding.text) and not pairs:
        yield "it orders without figures"
    faster = _LENGTHS.search(finding.text)
    if faster and orders.count("above") < len(re.split(r", | and ", faster[1])):
        yield "it is faster at fewer lengths"
    if finding.text.startswith("Dense attention is faster") and "below" not in orders:
        yield "no dense kernel is faster"


def _ends(line):
    """The interval and the estimate, of which each may not be known."""
    values = (line.low, line.estimate, line.high)
    return [None if value is None or math.isnan(value) else float(value) for value in values]
