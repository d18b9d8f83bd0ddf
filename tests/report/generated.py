"""Databases drawn at random, and what in a verdict contradicts the rows that it was made of."""

import math
import re

from hypothesis import strategies as st

from nanolib.measurement import Flag, Measurement, exact
from nanolib.store import Run, Store
from tests.report.cases import (
    CEILINGS,
    attention_case,
    decode_case,
    fp8_case,
    inference,
    layer_case,
    model_case,
    overhead_case,
    parity_case,
    quality_case,
    rated,
    timed,
    training,
)
from tests.report.rows import MACHINE, in_turns, interval, warmup_process, with_endings
from tests.shown import CLAIMS

_LENGTHS = (64, 128, 256, 512, 1024)


@st.composite
def intervals(draw, least=0.5, most=40.0):
    """Low, estimate, high; few enough values that ends touch, and now and then an end that is not known."""
    low, estimate, high = sorted(draw(st.tuples(*[st.integers(1, 24)] * 3)))
    scale = draw(st.sampled_from((1.0, 1.0, 1.7)))
    ends = [least + (most - least) * value * scale / 41 for value in (low, estimate, high)]
    if draw(st.integers(0, 9)) == 0:
        return math.nan, ends[1], math.nan
    return tuple(ends)


@st.composite
def _attention(draw):
    names = [
        "dense (flash)",
        *draw(st.lists(st.sampled_from(("window", "random", "block", "dense")), unique=True)),
    ]
    shape = {"dtype": "float32"}
    cases = []
    for n in draw(st.lists(st.sampled_from(_LENGTHS), min_size=1, max_size=4, unique=True)):
        for name in names:
            tiles = 0.0 if name.startswith("dense") else draw(st.sampled_from((0.0, 0.5, 0.9)))
            flags = draw(st.sampled_from(((), (), (Flag.NO_STEADY_STATE,))))
            cases.append(
                attention_case(
                    name, *draw(intervals()), tiles=tiles, seq_len=n, flags=flags, **shape
                )
            )
    if draw(st.booleans()):
        cases += [
            *CEILINGS,
            *(rated(name, *(1e9 * end for end in draw(intervals()))) for name in ("a", "b")),
        ]
    for target in draw(st.lists(st.sampled_from((0.5, 0.9)), unique=True)):
        losses = {
            scope: [end - 8 for end in draw(intervals())] for scope in ("replaced", "fine_tuned")
        }
        cases.append(quality_case(target, losses, draw(st.sampled_from((50, 400)))))
    return cases


@st.composite
def _model(draw):
    cases = []
    for n in draw(st.lists(st.sampled_from(_LENGTHS), min_size=1, max_size=5, unique=True)):
        for optimization in ("eager", "compile"):
            shape = {"seq_len": n, "optimization": optimization}
            shape["name"] = "tiny" if optimization == "eager" else "tiny (compile)"
            cases.append(
                inference(*draw(intervals()), memory=draw(st.sampled_from((8.0, 9.0))), **shape)
            )
            if draw(st.booleans()):
                cases.append(
                    training([draw(intervals()) for _ in range(3)], step=draw(intervals()), **shape)
                )
            if draw(st.booleans()):
                rows = [timed("prefill", *draw(intervals())), timed("decode", *draw(intervals()))]
                rows.append(Measurement("tokens_per_second", 9.0, scope="decode"))
                cases.append(model_case("generation", rows, **shape))
    ceiling = interval("ceiling_flops", *draw(intervals()), scope="float32")
    return [*cases, ({"ceiling": "float32", "device": "cpu"}, [ceiling])]


@st.composite
def _warmup(draw):
    cases = []
    for direction in ("forward", "forward_backward"):
        settings = draw(st.lists(st.sampled_from((0, 2, 5)), unique=True, min_size=1))
        for process in range(1, 6):
            times = {
                count: (draw(intervals())[1], 10.0 * draw(st.sampled_from((1.0, 1.1, 1.3))))
                for count in settings
            }
            needed = draw(st.sampled_from((0.0, 1.0, 3.0, None)))
            cases.append(warmup_process(direction, process, 10, times, needed))
    return cases


@st.composite
def _energy(draw):
    operations = {name: float(draw(st.integers(1, 9))) for name in ("between", "gate", "up", "qk")}
    cases = [layer_case("blocks.0", operations)]
    for mode in ("minimal", "standard", "deep"):
        cases.append(
            overhead_case(mode, *((end - 8) / 100 for end in draw(intervals())), look=mode)
        )
    return cases


@st.composite
def _fp8(draw):
    cases = []
    for size in (1, 2, 4):
        cases.append(fp8_case(size, "bfloat16", *draw(intervals())))
        cases += [
            fp8_case(size, recipe, *draw(intervals()))
            for recipe in ("fp8_a", "fp8_b")
            if draw(st.booleans())
        ]
        shape = {"m": 2, "k": 3, "n": size}
        cases.append((shape | {"precision": "bfloat16"}, [timed("product", *draw(intervals()))]))
        rows = [timed(scope, *draw(intervals())) for scope in ("product", "product_with_cast")]
        cases.append((shape | {"precision": "fp8"}, rows))
    for recipe, control in (("row_wise", False), ("off_by_2", True)):
        difference = draw(st.sampled_from((-0.5, 0.0005, 0.5)))
        verdict = {-0.5: "better", 0.0005: "equivalent", 0.5: "worse"}[difference]
        cases.append(parity_case(recipe, verdict, difference, control=control))
    return cases


@st.composite
def _distributed(draw):
    cases = []
    algorithms = ("fused", "ring", "gather")[: draw(st.integers(1, 3))]
    for world in draw(st.lists(st.sampled_from((1, 2, 4)), min_size=1, unique=True)):
        found = {
            algorithm: (
                draw(intervals()),
                draw(st.integers(1, 3)),
                [draw(intervals()) for _ in range(3)],
            )
            for algorithm in algorithms
        }
        flags = draw(st.sampled_from(((), (), (Flag.OVERSUBSCRIBED,))))
        cases.append(decode_case(found, world=world, flags=flags))
    rows = [
        timed(f"{algorithm} forward", *draw(intervals()))
        for algorithm in ("dense", "ring", "zigzag")
    ]
    rows += [
        exact("peak_memory", value, scope=f"{algorithm} forward")
        for algorithm, value in (("dense", 8.0), ("ring", 2.0), ("zigzag", 2.0))
    ]
    shape = {"seq_len": 2048, "dtype": "float32", "world_size": 4, "batch_size": 3}
    cases.append((shape | {"prefill_algorithms": ["ring", "zigzag"]}, rows))
    return cases


DRAWN = {
    "attention": _attention(),
    "model": _model(),
    "warmup": _warmup(),
    "energy": _energy(),
    "fp8": _fp8(),
    "distributed": _distributed(),
}


@st.composite
def databases(draw):
    """An experiment, and its runs: one or two, on one machine or two, each with its cases."""
    name = draw(st.sampled_from(sorted(DRAWN)))
    machines = draw(st.sampled_from((["m1"], ["m1"], ["m1", "m1"], ["m1", "m2"])))
    return name, [(machine, draw(DRAWN[name])) for machine in machines]


def contradictions(name, runs, path):
    """Store the runs of an experiment, and say of each claim of its verdict what the rows do not bear."""
    with Store(path) as store:
        for at, (machine, cases) in enumerate(runs):
            rows = in_turns(name, with_endings(cases))
            store.add(
                Run(name, MACHINE | {"machine_id": machine}, rows=rows, run_id=f"{name}-{at}")
            )
        rows = store.measurements(samples=True)
    return [
        f"{finding}: {wrong}" for finding in CLAIMS[name](rows) for wrong in _wrong(finding, rows)
    ]


# What a sentence says of two figures, the first against each of the others.
_SAYS = (
    (r" is the fastest", {"above"}),
    (r"(?i)^no clear difference between (?!sparse)", {"no clear difference"}),
    (r" is faster on .+ than on one$", {"above"}),
    (r" is slower on .+ than on one$", {"below"}),
    (r"increases the loss|has a higher loss than bf16|is higher without", {"above"}),
    (r"lowers the loss|has a lower loss than bf16|is lower without", {"below"}),
    (r"^FP8 is slower", {"below"}),
    # the first of its modes
    (r"^The profiling overhead is [^a-z]*\(no clear difference", {"no clear difference"}),
    (r"^The profiling overhead is [^a-z(]*in mode", {"above", "below"}),
)
_ORDERING = re.compile(
    r"fastest|faster|slower|is higher|is lower|compute-bound(?! in \d)|limited by waiting"
    r"|communication-bound"
)


def _wrong(finding, rows):
    stands = {
        (row.metric, *map(_known, (row.low, row.estimate, row.high))) for row in rows.itertuples()
    }
    figures = [figure for pair in finding.compared for figure in (pair[0], pair[2])] + list(
        finding.figures
    )
    for figure in figures:
        ends = map(_known, (figure.low, figure.estimate, figure.high))
        if figure.metric and (figure.metric, *ends) not in stands:
            yield f"no row holds {figure}"
    for first, order, second in finding.compared:
        lies = (
            "below"
            if first.high < second.low
            else "above"
            if first.low > second.high
            else "no clear difference"
        )
        if lies != order:
            yield f"{first} is {lies} {second}, and not {order}"
    said = str(finding)
    # a sentence on the loss before and after a fine-tune has a figure for each
    clauses = finding.text.split(", and after a fine-tune it ")
    if 1 < len(clauses) != len(finding.compared):
        yield f"{len(finding.compared)} figures for {len(clauses)} clauses"
    for at, clause in enumerate(clauses):
        lies = {str(order) for _, order, _ in finding.compared[at : at + 1]}
        for pattern, allowed in _SAYS:
            if re.search(pattern, clause) and not lies <= allowed:
                yield f"its figures lie {sorted(lies)}"
    if _ORDERING.search(finding.text) and not finding.compared:
        yield "it orders without figures"
    if "add a larger number to world_sizes" in said and not any(
        second.estimate == 0.8 for _, _, second in finding.compared
    ):
        yield "it advises more ranks without an efficiency"
    orders = [order for _, order, _ in finding.compared]
    if faster := re.search(
        r"^Sparse attention is faster than .* at ([\d,]+(?:, [\d,]+)*(?: and [\d,]+)?) tokens",
        finding.text,
    ):
        lengths = re.split(r", | and ", faster[1])
        if orders.count("above") < len(lengths):
            yield f"it is faster at {orders.count('above')} of {len(lengths)} lengths"
    if finding.text.startswith("Dense attention is faster") and "below" not in orders:
        yield "no dense kernel is faster"


def _known(value):
    return None if value is None or math.isnan(value) else float(value)
