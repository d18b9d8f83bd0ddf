"""The colours of charts."""

# Okabe & Ito (2008): told apart by every common kind of colour vision.
PALETTE = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000"]
# Of charts with more series; the n-th of these has the shape of the (n + 1)-th above, and is far from it in hue and lightness.
SERIES = [*PALETTE, "#1F2A80", "#6B3A12", "#005500", "#7A2FB0", "#D6249F", "#9A8CFF", "#8A8A00"]
INK, TEXT, QUIET = "#1b1b1b", "#333333", "#555555"  # titles, labels, what stands beside
FRAME, GRID, GUIDE = "#888888", "#e8e8e8", "#bbbbbb"  # axes, grid, lines that only guide the eye
FAILED = "#B00020"
PAPER = "#ffffff"
