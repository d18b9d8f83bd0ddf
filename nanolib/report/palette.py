"""The colours of charts, and what each becomes on a dark page."""

# Okabe & Ito (2008): told apart by every common kind of colour vision.
PALETTE = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000"]
# Of charts with more series; the n-th of these has the shape of the (n + 1)-th above, and is far from it in hue and lightness.
SERIES = [*PALETTE, "#1F2A80", "#6B3A12", "#005500", "#7A2FB0", "#D6249F", "#9A8CFF", "#8A8A00"]
INK, TEXT, QUIET = "#1b1b1b", "#333333", "#555555"  # titles, labels, what stands beside
FRAME, GRID, GUIDE = "#888888", "#e8e8e8", "#bbbbbb"  # axes, grid, lines that only guide the eye
FAILED = "#B00020"
PAPER = "#ffffff"

# On a dark page, where text and series need a contrast of 4.5 : 1 against its background.
DARK_PAPER = "#16191d"
DARK = {
    "#0072B2": "#4DA9E8",
    "#D55E00": "#FF8A3D",
    "#009E73": "#2CC79B",
    "#CC79A7": "#E39AC4",
    "#E69F00": "#F0B429",
    "#56B4E9": "#8CD0F5",
    "#000000": "#F2F2F2",
    "#1F2A80": "#6F86FF",
    "#6B3A12": "#B87333",
    "#005500": "#4CB02C",
    "#7A2FB0": "#B061F0",
    "#D6249F": "#FF4FB4",
    "#9A8CFF": "#C4B5FF",
    "#8A8A00": "#E6E65A",
    INK: "#f2f2f2",
    TEXT: "#d6d9dd",
    QUIET: "#b4bac1",
    FRAME: "#8f969e",
    GRID: "#2d3238",
    GUIDE: "#79818a",
    FAILED: "#FF7B7B",
    PAPER: DARK_PAPER,
}

_LEAST = 4.5  # of text, by WCAG 2.2, and here of series too


def contrast(one: str, other: str) -> float:
    """Contrast of two colours written `#rrggbb`, 1 to 21; by WCAG 2.2."""
    light, dark = sorted((_luminance(one), _luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def _luminance(colour: str) -> float:
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def on_dark(colour: str) -> str:
    """What a colour `#rrggbb` becomes on a dark page: as declared, or with as much white as its contrast needs."""
    known = {light.lower(): dark for light, dark in DARK.items()}.get(colour.lower())
    if known:
        return known
    parts = [int(colour[at : at + 2], 16) for at in (1, 3, 5)]
    for white in range(0, 101, 5):
        mixed = "#" + "".join(f"{round(part + (255 - part) * white / 100):02x}" for part in parts)
        if contrast(mixed, DARK_PAPER) >= _LEAST:
            return mixed
    return PAPER
