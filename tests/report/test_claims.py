"""No verdict claims more than its intervals: what orders, names or advises is tried from both sides, apart and overlapping."""

import math

import pytest

from nanolib.measurement import Flag, Measurement, Provenance, exact
from nanolib.report.claim import Claim
from tests.report.rows import ended
from tests.shown import CHARTS


def timed(scope, low, ms, high, **rest):
    """A latency whose interval is not symmetric."""
    rest = {"details": {"mean": 1.5 * ms, "sd": ms / 5, "cv": 0.2, "p50": ms, "p95": 2 * ms, "p99": 3 * ms}} | rest
    return Measurement("latency", ms, low, high, 0.95, 20, method="perf_counter", scope=scope, **rest)


SHAPE = {"seq_len": 64, "batch_size": 3, "dtype": "float32", "causal": False, "device": "cpu", "options": {}}


def attention_case(name, low, ms, high, tiles=0.0, **shape):
    found = [timed("forward", low, ms, high, flags=shape.pop("flags", ()))]
    found += [exact("sparsity", 0.7, method="mask"), exact("block_sparsity", tiles, method="mask")]
    found.append(Measurement("ceiling_share", 0.37, 0.3, 0.5, 0.95, 20, scope="forward"))
    return SHAPE | {"name": name} | shape, found


@pytest.mark.parametrize(
    ("window", "random", "said"),
    [
        ((10.91, 12, 14), (11.5, 13, 20), "dense is the fastest forward: 10.0 ms [9.00 … 10.9]"),
        ((10.90, 12, 14), (11.5, 13, 20), "dense and window cannot be told apart forward: dense 10.0 ms"),
        ((10.91, 12, 14), (10.5, 13, 20), "dense and random cannot be told apart forward"),
        ((10.50, 12, 14), (10.5, 13, 20), "dense, window and random cannot be told apart forward"),
        ((8.000, 8.5, 8.99), (11.5, 13, 20), "window is the fastest forward"),
        ((8.000, 9.5, 9.60), (11.5, 13, 20), "window and dense cannot be told apart forward"),
        ((math.nan, 12, math.nan), (11.5, 13, 20), "dense and window cannot be told apart forward"),
    ],
)
def test_the_fastest_is_named_when_its_interval_overlaps_no_other(say, window, random, said):
    cases = [attention_case("dense", 9, 10, 10.9), attention_case("window", *window), attention_case("random", *random)]
    (line,) = (line for line in say("attention", cases) if "forward" in line)
    assert line.startswith(f"Non-causal, batch 3, float32: at 64 tokens {said}")
    assert ", at 37% of the machine's matrix-product ceiling." in line
    assert ("Next: a larger budget_s" in line) == ("told apart" in line)


def test_one_kind_alone_is_not_the_fastest_and_only_the_longest_tells_its_share_of_the_ceiling(say):
    cases = [attention_case("dense", 9, 10, 11), attention_case("window", 5, 6, 7)]
    alone = attention_case("dense", 20, 21, 22, seq_len=128)
    lines = [line for line in say("attention", [*cases, alone]) if "forward" in line]
    assert lines == ["Non-causal, batch 3, float32: at 64 tokens window is the fastest forward: 6.00 ms [5.00 … 7.00]."]
    assert "Only dense kinds were measured" in say("attention", [alone])[-1]


@pytest.mark.parametrize("same", [True, False])
def test_times_of_two_runs_or_devices_are_not_ranked(say, same):
    slow, fast = attention_case("dense", 9, 10, 11), attention_case("window", 5, 6, 7)
    assert any("fastest" in line for line in say("attention", [slow, fast]))
    if same:
        lines = say("attention", [slow], [fast])
    else:
        lines = say("attention", [slow, attention_case("window", 5, 6, 7, device="cuda:0")])
    assert not any("fastest" in line or "told apart" in line for line in lines)


def test_each_run_and_device_is_named_where_there_are_several(say):
    cases = [
        attention_case(name, *ms, device=device)
        for device in ("cpu", "cuda:0")
        for name, ms in (("dense", (9, 10, 11)), ("window", (5, 6, 7)))
    ]
    lines = say("attention", cases, cases)
    named = [line.partition(": at 64")[0] for line in lines if "fastest" in line]
    places = [f"run run-{at}-of, {device}" for at in (0, 1) for device in ("cpu", "cuda:0")]
    assert named == [f"Non-causal, batch 3, float32, {place}" for place in places]


@pytest.mark.parametrize(
    ("ends", "said"),
    [
        (
            (8, 10, 12),
            "from 64 tokens on window is faster than dense: 2.00× [1.50 … 2.88] at 64 tokens, at most 4.00× possible",
        ),
        ((8, 17, 18), "at 64 tokens window and dense cannot be told apart: 1.18× [1.00 … 2.88] at"),
        ((22, 23, 24), "at 64 tokens window and dense cannot be told apart"),
        ((23, 24, 25), "at 64 tokens window and dense cannot be told apart"),
        ((23.1, 24, 25), "window is not faster than dense up to 64 tokens: 0.83× [0.72 … 1.00] at"),
    ],
)
def test_sparse_beats_dense_when_the_whole_range_of_its_speed_up_is_above_one(say, ends, said):
    cases = [attention_case("dense", 18, 20, 23), attention_case("window", *ends, tiles=0.75)]
    lines = say("attention", cases)
    assert sum("window is faster" in line or "not faster" in line or said in line for line in lines) == 1
    (line,) = (line for line in lines if said in line)
    assert line.endswith("; it removes 70% of the connections there.")


@pytest.mark.parametrize(
    ("wins", "said"),
    [
        ((64, 128, 256, 512), "from 64 tokens on window is faster than dense"),
        ((64, 256, 512), "from 256 tokens on window is faster than dense"),
        ((256,), "at 512 tokens window is slower than dense, though it is faster at 256:"),
        ((), "window is not faster than dense up to 512 tokens"),
    ],
)
def test_it_pays_from_the_length_on_from_which_it_wins_at_every_longer_one(say, wins, said):
    cases = []
    for seq_len in (512, 64, 256, 128):
        ms = 10 if seq_len in wins else 40
        cases.append(attention_case("dense", 18, 20, 23, seq_len=seq_len))
        cases.append(attention_case("window", ms - 1, ms, ms + 1, seq_len=seq_len, tiles=0.75))
    (line,) = (line for line in say("attention", cases) if "it removes 70%" in line)
    assert said in line and " at 512 tokens, at most" in line


def test_what_never_settled_is_counted(say):
    cases = [attention_case("dense", 9, 10, 11), attention_case("b", 5, 6, 7, flags=(Flag.NO_STEADY_STATE,))]
    said = "1 of 2 cases never settled: trust no difference that rests on them."
    assert any(line.startswith(said) for line in say("attention", cases))
    assert not any("never settled" in line for line in say("attention", cases[:1]))


MODEL = {"attention_type": "dense", "seq_len": 64, "batch_size": 3, "dtype": "float32", "device": "cpu"}


def model_case(mode, found, **shape):
    weights = [exact("parameters", 700, method="count"), exact("footprint", 5.0, method="count")]
    return MODEL | {"name": "tiny", "mode": mode, "optimisation": "eager"} | shape, [*weights, *found]


def inference(low=11, ms=12, high=15, memory=8.0, predicted=4.0, **shape):
    found = [timed("inference", low, ms, high, predicted=predicted), exact("peak_memory", memory, scope="inference")]
    return model_case("inference", [*found, Measurement("tokens_per_second", 16_000.0, scope="inference")], **shape)


def training(phases, memory=60.0, step=(35, 36, 39), **shape):
    found = [timed(name, *ends) for name, ends in zip(("forward", "backward", "optimizer_step"), phases, strict=True)]
    found += [timed("training_step", *step), exact("peak_memory", memory, scope="training_step")]
    return model_case("training", found, **shape)


def test_a_model_is_told_with_its_batch_its_tail_and_its_ratios(say):
    generation = [timed("prefill", 19, 20, 22), timed("decode", 1.9, 2, 2.5, predicted=0.5)]
    generation.append(Measurement("tokens_per_second", 1500.0, scope="decode"))
    generation.append(Measurement("tokens_per_second", 9600.0, scope="prefill"))
    longest = {"seq_len": 128}
    step = training([(9, 10, 11), (19, 20, 21), (5, 6, 7)], **longest)
    cases = [inference(**longest), step, model_case("generation", generation, **longest), inference(1, 2, 3)]
    shape = "tiny (dense, float32), batch 3, n = 128"
    assert say("model", cases)[:3] == [
        f"{shape}: inference takes 12.0 ms [11.0 … 15.0], 16,000 tokens/s: 3.0× the roofline's prediction.",
        f"{shape}: the first token comes after 20.0 ms [19.0 … 22.0], then one takes 2.00 ms [1.90 … 2.50]: p99 6 ms, "
        "1,500 tokens/s, 4.0× what reading the weights once takes.",
        f"{shape}: a training step takes 36.0 ms [35.0 … 39.0] and 60 MiB at its peak: 3.0× inference (3× is what the FLOPs "
        "say), 12.0× the weights; the backward (20 ms) is the largest part.",
    ]


@pytest.mark.parametrize(
    ("phases", "said"),
    [
        ([(9, 10, 11), (12, 20, 21), (5, 6, 7)], "the backward (20 ms) is the largest part"),
        ([(9, 10, 12), (12, 20, 21), (5, 6, 7)],
         "the backward (20 ms) and the forward (10 ms) cannot be told apart as the largest part"),
        ([(5, 6, 7), (9, 10, 11), (12, 20, 21)], "the optimizer step (20 ms) is the largest part"),
    ],
)  # fmt: skip
def test_the_largest_phase_is_named_when_its_interval_is_above_the_others(say, phases, said):
    text = " ".join(say("model", [inference(), training(phases)]))
    assert f"; {said}." in text


@pytest.mark.parametrize(
    ("ends", "memory", "said"),
    [
        ((5, 6, 7), 8.0, "inference 2.00× [1.57 … 3.00] as fast (faster)"),
        ((5, 6, 11), 8.0, "inference 2.00× [1.00 … 3.00] as fast (not told apart)"),
        ((15, 24, 25), 8.0, "inference 0.50× [0.44 … 1.00] as fast (not told apart)"),
        ((16, 24, 25), 8.0, "inference 0.50× [0.44 … 0.94] as fast (slower)"),
        ((5, 6, 7), 8.03, "inference 2.00× [1.57 … 3.00] as fast (faster)"),
        ((5, 6, 7), 8.05, "inference 2.00× [1.57 … 3.00] as fast (faster), inference peak 1.01×"),
        ((5, 6, 7), 4.0, "inference 2.00× [1.57 … 3.00] as fast (faster), inference peak 0.50×"),
    ],
)
def test_an_optimisation_is_faster_or_slower_when_the_ranges_do_not_overlap(say, ends, memory, said):
    shape = {"name": "tiny (compile)", "optimisation": "compile"}
    cases = [inference(), inference(*ends, memory=memory, **shape), inference(1, 2, 3, seq_len=32)]
    cases.append(inference(1, 2, 3, seq_len=32, **shape))
    lines = [line for line in say("model", cases) if "against eager" in line]
    assert lines == [f"tiny (compile), n = 64, against eager: {said}."]


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_how_many_warm_up_steps_are_enough(say, steps):
    curve = {"direction": "forward_backward", "warmup_steps": 0, "curve": True}
    needed = Measurement("warmup_needed", float(steps), scope="forward_backward", details={"steady_median": 10.25})
    words = ["no warm-up was detected", "1 warm-up step is enough", "2 warm-up steps are enough"][steps]
    line = say("warmup", [(curve, [needed])])[0]
    assert line == f"forward + backward: {words} in this one fresh process: a step then takes 10.2 ms."


@pytest.mark.parametrize(
    ("warm", "said"),
    [((9, 10, 10.9), "is +50% against that after 5"), ((9, 10, 14), "cannot be told from that after 5")],
)
def test_what_no_warm_up_does_to_the_mean_and_to_the_median_are_told_apart(say, warm, said):
    def case(direction, steps, ends, mean):
        factors = {"direction": direction, "warmup_steps": steps, "curve": False}
        return factors, [timed(direction, *ends, details={"mean": mean, "sd": 3.0, "cv": 0.33})]

    cases = [case("forward", 0, (14, 15, 17), 30.0), case("forward", 5, warm, 12.0), case("forward", 2, warm, 12.0)]
    cases.append(case("forward_backward", 0, (1, 2, 3), 70.0))  # without its own five steps nothing is said of it
    needed = Measurement("warmup_needed", scope="forward", message="it never settles", details={})
    curve = ({"direction": "forward", "warmup_steps": 0, "curve": True}, [needed])
    lines = [line for line in say("warmup", [curve, *cases]) if "median" in line]
    assert lines == [
        "forward: without warm-up the mean is +150% against that after 5 steps, with a CV of 33%: "
        f"the median, 15 ms, {said}."
    ]


# across ranks

CORES = Flag.OVERSUBSCRIBED


def decode_case(forms, world=4, flags=(), **factors):
    """Of each form: its interval, its rounds, and the intervals of compute, wait and communication."""
    found = []
    for form, (ends, rounds, parts) in forms.items():
        found.append(timed(form, *ends, flags=flags))
        found.append(exact("rounds", rounds, scope=form))
        for kind, (low, value, high) in zip(("compute", "wait", "communication"), parts, strict=True):
            found.append(Measurement("part_time", value, low, high, 0.95, 20, scope=f"{form}: {kind}"))
    shape = {"seq_len": 4096, "dtype": "float32", "world_size": world, "forms": list(forms), "batch_size": 3}
    return shape | factors, found


COMPUTING = [(8, 8.5, 9), (0.1, 0.2, 0.3), (0.5, 0.6, 0.7)]


@pytest.mark.parametrize(
    ("ring", "gather", "said"),
    [
        ((9.6, 11, 13), (10, 12, 30), "fused is the fastest: 9.00 [8.00 … 9.50] ms per token"),
        ((9.5, 11, 13), (10, 12, 30), "fused and ring cannot be told apart: fused 9.00 [8.00 … 9.50] ms per token"),
        ((9.6, 11, 13), (9, 12, 30), "fused and gather cannot be told apart"),
        ((9, 11, 13), (9, 12, 30), "fused, ring and gather cannot be told apart"),
    ],
)
def test_the_fastest_form_across_ranks_overlaps_no_other(say, ring, gather, said):
    forms = {"gather": (gather, 1, COMPUTING), "ring": (ring, 3, COMPUTING), "fused": ((8, 9, 9.5), 2, COMPUTING)}
    alone = decode_case({"fused": ((26, 27, 30), 0, COMPUTING)}, world=1)
    fewer = decode_case({"ring": ((1, 2, 3), 2, COMPUTING)}, world=2)
    crowded = decode_case({"ring": ((1, 2, 3), 2, COMPUTING)}, world=8, flags=(CORES,))
    line = say("distributed", [alone, decode_case(forms), fewer, crowded])[0]
    assert line.startswith(f"Decoding over 4,096 keys, float32: on 4 ranks {said}")
    assert line.endswith("; 75% parallel efficiency [68% … 94%] (100 % = perfect scaling).")


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ([(3.1, 5, 6), (1, 1.2, 1.4), (1, 1.3, 1.6)], "compute-bound: compute 5 ms, wait 1.200 ms, communication 1.300 ms, and"),
        ([(2.9, 5, 6), (1, 1.2, 1.4), (1, 1.3, 1.6)], "what bounds it cannot be told: compute 5 ms"),
        ([(1, 1.5, 1.9), (1.7, 3, 4), (0.3, 1, 1.6)], "bound by waiting: compute 1.500 ms"),
        ([(1, 1.5, 2), (1.7, 3, 4), (0.3, 1, 1.6)], "what bounds it cannot be told"),
        ([(1, 1.5, 1.9), (1.6, 3, 4), (0.5, 1, 1.6)], "what bounds it cannot be told"),
        ([(1, 1.5, 1.9), (0.3, 1, 1.6), (1.7, 3, 4)], "communication-bound: compute 1.500 ms, wait 1 ms, communication 3 ms, 55%."),
        ([(1, 1.5, 1.9), (0.5, 1, 1.6), (1.5, 3, 4)], "what bounds it cannot be told"),
    ],
)  # fmt: skip
def test_what_bounds_a_token_is_said_when_the_intervals_of_its_parts_tell(say, parts, said):
    lines = say("distributed", [decode_case({"fused": ((8, 9, 9.5), 2, parts)})])
    assert lines[1].startswith(f"Decoding over 4,096 keys, float32: {said}")


@pytest.mark.parametrize(
    ("other", "rounds", "said"),
    [
        ((9, 11, 13), 1, "Next: one message meets 1 time(s)."),
        ((9.6, 11, 13), 1, "Next: longer sequences per rank, or fewer ranks."),
        ((9, 11, 13), 2, "Next: longer sequences per rank, or fewer ranks."),
    ],
)
def test_a_form_with_fewer_rounds_is_advised_unless_it_was_slower(say, other, rounds, said):
    sending = [(1, 1.5, 1.9), (0.3, 1, 1.6), (1.7, 3, 4)]
    forms = {"one_message": (other, rounds, sending), "fused": ((8, 9, 9.5), 2, sending)}
    assert say("distributed", [decode_case(forms)])[1].endswith(said)


def test_without_cores_or_several_ranks_no_form_is_the_fastest(say):
    forms = {"fused": ((8, 9, 9.5), 2, COMPUTING), "ring": ((18, 19, 20), 2, COMPUTING)}
    (line,) = say("distributed", [decode_case(forms, flags=(CORES,))])
    assert "speed is not" in line and "fastest" not in line
    (line,) = say("distributed", [decode_case(forms, world=1)])
    assert "only one rank was measured" in line and "fastest" not in line


@pytest.mark.parametrize(
    ("second", "said"),
    [
        ((5.1, 6, 7), "ring on 4 ranks is the fastest across ranks"),
        ((5, 6, 7), "ring on 4 ranks and zigzag on 4 ranks cannot be told apart"),
    ],
)
def test_a_form_for_whole_sequences_is_told_with_those_that_tie_with_it(say, second, said):
    found = [exact("peak_memory", 8.0, scope="dense forward"), exact("peak_memory", 2.0, scope="ring forward")]
    found += [timed("dense forward", 14, 15, 17), timed("zigzag forward", *second), timed("ring forward", 3, 4, 5)]
    case = {"seq_len": 2048, "dtype": "float32", "world_size": 4, "prefill_forms": ["ring", "zigzag"], "batch_size": 3}
    (line,) = say("distributed", [(case, found)])
    took = "ring on 4 ranks takes 4.00 [3.00 … 5.00] ms, one rank 15.0 [14.0 … 17.0] ms (faster)"
    assert line == f"Over 2,048 tokens, forward: {said}: {took}; its peak is 0.25 of one rank's."


@pytest.mark.parametrize(
    ("low", "zero"), [(0.1, ""), (0.0, ", not distinguishable from zero"), (-1.0, ", not disting")]
)
def test_communication_that_is_not_hidden_is_held_against_zero(say, low, zero):
    found = [timed("alone", 7, 8, 9), timed("ddp", 15, 16, 20)]
    found.append(Measurement("exposed_communication", 4.0, low, 6.0, 0.95, 20, scope="ddp"))
    case = {"name": "tiny", "world_size": 4, "strategies": ["ddp"], "batch_size": 3, "seq_len": 64}
    (line,) = say("distributed", [(case, found)])
    assert line.startswith("Training tiny on 4 ranks with ddp: 4.00 [")
    assert f" ms of a step (25%) is communication that computing does not hide{zero}" in line
    assert ("not distinguishable" in line) == bool(zero)
    assert line.endswith(": efficiency 0.500 [0.350 … 0.600].")


# fp8


def fp8_case(size, precision, low, ms, high, **changes):
    factors = {"preset": "p", "name": f"size {size}", "mode": "inference", "precision": precision, "compiled": True}
    row = timed("inference", low, ms, high, details={"parameters": size})
    bound = Measurement("converted_share", 0.5, scope="model", details={"amdahl_bound": 1.75})
    return factors | {"seq_len": 64, "batch_size": 3} | changes, [row, bound]


@pytest.mark.parametrize(
    ("times", "said"),
    [
        ({1: 4, 2: 4, 4: 4}, "FP8 pays from size 1 on: at best 2.00 [1.40 … 3.00] times"),
        ({1: 8, 2: 4, 4: 4}, "FP8 pays from size 2 on"),
        ({1: 4, 2: 8, 4: 4}, "FP8 pays from size 4 on"),
        ({1: 4, 2: 4, 4: 8}, "FP8 pays at size 1 and size 2 and is not seen to at the largest size"),
        ({1: 8, 2: 8, 4: 8}, "FP8 is not seen to pay at any size measured: at best 1.00 [0.778 … 1.29] times"),
        ({1: 16, 2: 16, 4: 16}, "FP8 does not pay at any size measured: at best 0.500 [0.412 … 0.600] times"),
    ],
)
def test_fp8_pays_where_its_whole_range_is_above_one_and_from_there_on(say, times, said):
    cases = []
    for size in (4, 1, 2):
        cases.append(fp8_case(size, "bfloat16", 7, 8, 9))
        cases.append(fp8_case(size, "fp8_rowwise", {4: 3, 8: 7, 16: 15}[times[size]], times[size], times[size] + 1))
    line = say("fp8", cases)[0]
    assert line.startswith(f"inference: {said}")
    assert (", where Amdahl allows 1.75." in line) == ("FP8 pays" in line)


@pytest.mark.parametrize(
    ("endings", "said"),
    [
        ([("unsupported", "no tensor cores"), ("unsupported", "none")], "FP8 gains no time here: no tensor cores."),
        ([("unsupported", ""), ("unsupported", "none")], "FP8 gains no time here: none."),
        ([("unsupported", "no tensor cores"), ("oom", "too large")], "No FP8 case gave a time: no tensor cores."),
        ([("error", "")], "No FP8 case gave a time: no fp8 case was run to its end."),
    ],
)
def test_why_fp8_gives_no_time_is_said_with_the_first_reason(say, endings, said):
    cases = [fp8_case(1, "bfloat16", 7, 8, 9)]
    for size, (status, message) in enumerate(endings, 1):
        factors, _ = fp8_case(size, "fp8_rowwise", 1, 2, 3)
        cases.append((factors, [Measurement("case_time", 1.0, n=1, status=status, message=message, method="last")]))
    assert say("fp8", cases)[0].startswith(said)


@pytest.mark.parametrize(
    ("other", "who"),
    [((7, 8, 9), "(size 1 in fp8_a)"), ((4.5, 5, 6), "(size 1 in fp8_a and size 1 in fp8_b, not told apart)")],
)
def test_the_best_recipe_of_fp8_is_named_with_those_it_cannot_be_told_from(say, other, who):
    base, best = fp8_case(1, "bfloat16", 19.9, 20, 20.1), fp8_case(1, "fp8_a", 4, 4.9, 5)
    assert f"times bf16 {who}" in say("fp8", [base, fp8_case(1, "fp8_b", *other), best])[0]


@pytest.mark.parametrize(
    ("ends", "said"),
    [
        ((6, 7, 7.9), "The smallest product that gains with its cast is 2 x 3 x 5: 1.29 [1.01 … 1.67] times."),
        ((6, 7, 8), "No product measured is seen to gain from fp8 once its cast is paid."),
        ((10, 11, 12), "No product measured is seen to gain from fp8 once its cast is paid."),
        ((11, 12, 13), "No product measured gains from fp8 once its cast is paid."),
    ],
)
def test_a_product_gains_when_the_whole_range_with_its_cast_is_above_one(say, ends, said):
    cases = [({"m": 2, "k": 3, "n": 5, "precision": "bfloat16"}, [timed("product", 8, 9, 10)])]
    fp8 = [timed("product", 1, 2, 3), timed("product_with_cast", *ends)]
    cases.append(({"m": 2, "k": 3, "n": 5, "precision": "fp8"}, fp8))
    if "smallest" in said:  # a larger one gains more
        for larger in (
            {"m": 4, "k": 3, "n": 5},
            {"m": 1, "k": 3, "n": 60},
            {"m": 60, "k": 1, "n": 3},
            {"m": 8, "k": 1, "n": 8},
        ):
            cases.append((larger | {"precision": "bfloat16"}, [timed("product", 80, 90, 100)]))
            cases.append((larger | {"precision": "fp8"}, fp8))
    assert said in say("fp8", cases)


def test_formats_are_told_the_least_noisy_first(say):
    cases = [
        (
            {"variant": name},
            [Measurement(metric, value, n=1, scope="a forward") for metric in ("relative_error", "sqnr")],
        )
        for name, value in (("coarse", 20.0), ("fine", 40.0), ("middling", 30.0))
    ]
    assert "fine 40.0 dB, middling 30.0 dB, coarse 20.0 dB" in " ".join(say("fp8", cases))


def parity_case(arm, verdict, difference=None, control=False, **rest):
    low, high = (None, None) if difference is None else (difference - 0.002, difference + 0.001)
    details = {"verdict": verdict, "control": control, "margin_nats": 0.0025, "tenths": None}
    row = Measurement("parity", difference, low, high, 0.95, 3, scope=arm, details=details, **rest)
    return {"arm": arm, "seeds": 3, "steps": 400}, [row]


def test_parity_is_told_with_its_pairs_and_a_control_that_was_not_found_worse_takes_the_trust(say):
    arm = parity_case("row_wise", "equivalent", 0.0005, provenance=Provenance.EMULATED)
    lines = say("fp8", [arm, parity_case("off_by_2", "worse", 0.5, control=True)])
    assert lines[0].startswith("row wise (emulated): equivalent after 400 steps: 5.00e-04 [-0.00150 … 0.00150]")
    assert lines[0].endswith("nats per byte above bf16, margin 0.0025, 3 pairs.")
    assert not any("The control" in line for line in lines)
    lines = say("fp8", [arm, parity_case("off_by_2", "inconclusive", 0.5, control=True)])
    assert any(line.startswith("The control off by 2 was not found worse") for line in lines)


# rooflines, what sparsity costs, where time goes


def rated(name, low, achieved, high, flops=4e6, moved=1e5, **shape):
    rate = Measurement("flops_per_second", achieved, low, high, 0.95, 20, scope="forward")
    factors, found = attention_case(name, 9, 10, 11, **shape)
    return factors, [*found, exact("flops", flops, scope="forward"), exact("bytes", moved, scope="forward"), rate]


CEILINGS = [
    ({"ceiling": "float32", "device": "cpu"}, [Measurement("ceiling_flops", 1e11, scope="float32")]),
    ({"ceiling": "copy", "device": "cpu"}, [Measurement("ceiling_bytes", 1e10, scope="copy")]),
]


@pytest.mark.parametrize(
    ("second", "said"),
    [
        ((3e10, 5e10, 5.9e10), "dense n=64 comes nearest to its roof, 80% of 1e+11 FLOP/s."),
        ((3e10, 5e10, 6e10), "dense n=64 comes nearest to its roof (not told apart from 1 more), 80% of 1e+11 FLOP/s."),
    ],
)
def test_who_comes_nearest_to_its_roof_overlaps_no_other(say, second, said):
    cases = [
        *CEILINGS,
        rated("window", *second),
        rated("dense", 6e10, 8e10, 9e10),
        rated("b", 1e9, 2e9, 3e9, moved=1e6),
    ]
    (line,) = (line for line in say("attention", cases) if "Forward is bound" in line)
    assert line == f"Forward is bound by compute in 2 of 3 cases and memory in 1 of 3 cases: {said}"


@pytest.mark.parametrize(
    ("moved", "rate", "said"),
    [
        (1e5, 1.2e11, "120% of 1e+11 FLOP/s, which is above it: the ceiling was measured too low"),
        (1e6, 6e10, "150% of 4e+10 FLOP/s, which is above it: some of it stays in a cache"),
    ],
)
def test_why_a_kernel_can_lie_above_its_roof_is_said(say, moved, rate, said):
    cases = [*CEILINGS, rated("dense", 0.99 * rate, rate, 1.01 * rate, moved=moved), rated("b", 1e9, 2e9, 3e9)]
    (line,) = (line for line in say("attention", cases) if "Forward is bound" in line)
    assert said in line and ("nano doctor" in line) == (moved == 1e5)


def test_at_the_ridge_compute_is_the_bound_and_several_batches_are_named(say):
    cases = [*CEILINGS, rated("a", 6e10, 8e10, 9e10, 1e6, 1e5), rated("b", 1e9, 2e9, 3e9, 1e6, 1e5, batch_size=4)]
    (line,) = (line for line in say("attention", cases) if "Forward is bound" in line)
    assert line == (
        "Forward is bound by compute in 2 of 2 cases: a n=64 batch=3 comes nearest to its roof, 80% of 1e+11 FLOP/s."
    )


@pytest.mark.parametrize(
    ("tuned", "said"),
    [
        (
            (0.01, 0.3, 0.5),
            "costs loss, and the fine-tune does not take back all of it: ",
        ),
        ((0.0, 0.3, 0.5), "+0.300 [+0.000 … +0.500] nats per byte after both were trained on"),
        ((-0.5, -0.3, 0.0), "costs loss, and after a fine-tune these seeds show no difference: "),
        ((-0.5, -0.3, -0.01), "costs loss, and after a fine-tune it is lower than dense: "),
        (None, "removes 90%, costs loss: "),
    ],
)
def test_what_a_pattern_costs_after_training_on_is_held_against_zero(say, tuned, said):
    def case(target, replaced):
        found = [exact("sparsity", target, method="mask"), Measurement("loss", 2.0, 1.9, 2.1, 0.95, 5, scope="dense")]
        found.append(
            Measurement("loss_difference", replaced, replaced - 0.1, replaced + 0.2, 0.95, 5, scope="replaced")
        )
        if tuned:
            ends = dict(zip(("low", "estimate", "high"), tuned, strict=True))
            found.append(Measurement("loss_difference", **ends, confidence=0.95, n=5, scope="fine_tuned"))
        return SHAPE | {"name": f"w {target}", "pattern": "window", "target": target, "seeds": 5}, found

    lines = say("attention", [case(0.9, 0.6), case(0.5, 0.2), attention_case("dense", 9, 10, 11)])
    (line,) = (line for line in lines if "trained decoder" in line)
    assert (
        "+0.600 [+0.500 … +0.800] nats per byte on a loss of 2.00" in line
        and said in line
        and line.endswith("; 5 seeds.")
    )


@pytest.mark.parametrize(
    ("between", "said"),
    [
        (60, "most of the time goes to gaps between operations 60%, gate 20%, up 15%: much lies between operations. "
             "Next: larger batches or compiling would help, more than faster kernels."),
        (40, "most of the time goes to gaps between operations 40%, gate 30%, up 22%: much lies between operations. "
             "Next: larger batches or compiling would help."),
        (20, "most of the time goes to gate 40%, up 30%, gaps between operations 20%."),
    ],
)  # fmt: skip
def test_advice_on_what_lies_between_operations_goes_no_further_than_its_share(say, between, said):
    rest = 100 - between
    operations = {"between": between, "gate": rest / 2, "up": rest * 3 / 8, "down": rest / 8}
    assert f"decode, n = 64: {said}" in say("energy", [layer_case("blocks.0", operations)])


@pytest.mark.parametrize(("others", "named"), [(5, 3), (6, 4), (7, 4)])
def test_most_of_the_time_is_more_than_half_of_it(say, others, named):
    operations = {"gate": 2.5} | dict.fromkeys(("up", "down", "qk", "av", "norm", "head", "rope")[:others], 2.0)
    (line,) = (
        line for line in say("energy", [layer_case("blocks.0", operations)]) if "most of the time goes to" in line
    )
    assert line.count("%") == named


def test_a_model_without_numbered_blocks_has_no_depth(measured):
    factors, (row,) = layer_case("body", {"up": 1.0})
    row.details.update(activations={"mean": 0.1, "std": 1.0})
    chart = CHARTS["activation_profile"](measured("energy", [(factors, [ended(), row])])).to_dict()
    assert "the model's layers are no numbered blocks" in str(chart)


def test_a_question_ends_in_one_mark():
    assert str(Claim("It grows.", advice="how far?")) == "It grows. Next: how far?"


def layer_case(layer, operations):
    details = {"layer": layer, "share": 1.0, "operations_ms": operations, "deep_passes": 3}
    row = Measurement("layer_time", sum(operations.values()), 1.0, 200.0, 0.95, 7, scope=layer, details=details)
    return {"name": "tiny", "phase": "decode", "seq_len": 64, "batch_size": 3}, [row]
