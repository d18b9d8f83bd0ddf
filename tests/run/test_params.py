import datetime
import json

import pytest
import yaml

from nanolib.experiments import ALL
from nanolib.measurement import BadInput
from nanolib.params import read_yaml
from nanolib.run.params import MAX_CASES

BAD = [
    (
        "attention",
        {"seq_lens": []},
        "attention.seq_lens: List should have at least 1 item after validation, not 0, got []",
    ),
    (
        "attention",
        {"num_heads": 8, "num_kv_heads": 3},
        "attention.num_kv_heads: 3 does not divide num_heads 8",
    ),
    (
        "model",
        {"overrides": {"vocab_size": 100}},
        "model.overrides: vocab_size 100 is less than the 256 values",
    ),
    (
        "model",
        {"seq_lens": [2048]},
        "model.seq_lens: 2048 exceeds the context_length 1024 of decoder_nano",
    ),
    (
        "energy",
        {"seq_lens": [2000]},
        "energy.seq_lens and new_tokens: 2032 exceeds the context_length 1024 of decoder_nano",
    ),
    (
        "attention",
        {"seq_lens": list(range(1, 100_000))},
        "attention.seq_lens: List should have at most 64 items after validation, not 99999, got [1, 2, 3, 4, ",
    ),
    (
        "attention",
        {"attention_types": [{"kind": ["dense"]}]},
        "attention.attention_types: attention_type: ['dense'] is not a known attention kind",
    ),
    (
        "fp8",
        {"presets": [], "overrides": {"d_ff": 8}},
        "fp8.overrides: there is no preset to change",
    ),
]


def _params(name):
    return ALL[name]().Params


@pytest.mark.parametrize(("name", "values", "said"), BAD)
def test_bad_input_is_one_line_that_names_the_field(name, values, said):
    with pytest.raises(BadInput) as caught:
        _params(name)(**values)
    assert len(caught.value.lines) == 1
    assert caught.value.lines[0].startswith(said)


@pytest.mark.parametrize(
    ("values", "field", "parsed"),
    [
        ({"budget_s": "1e-3"}, "budget_s", 1e-3),
        ({"seq_lens": "[16, 32]"}, "seq_lens", [16, 32]),
        ({"seq_lens": 64}, "seq_lens", [64]),
        ({"seq_lens": "64"}, "seq_lens", [64]),
        ({"attention_types": "dense"}, "attention_types", [{"kind": "dense"}]),
        (
            {"attention_types": "[{kind: dense, backend: math}]"},
            "attention_types",
            [{"kind": "dense", "backend": "math"}],
        ),
        ({"causal": "false"}, "causal", False),
        ({"label": "123"}, "label", "123"),
        ({"num_heads": 4.0}, "num_heads", 4),
    ],
)
def test_what_papermill_hands_over_as_text_is_parsed(values, field, parsed):
    assert getattr(_params("attention")(**values), field) == parsed


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"seq_lens: [1", "is not valid YAML"),
        (b"seq_lens: " + b"[" * 3000, "is not valid YAML"),
        (b"- 1\n- 2", r"contains \[1, 2\], not `name: value` lines"),
        (b"on: 1", "contains {True: 1}, not"),
        (b"!!python/object/apply:os.system ['true']", "is not valid YAML"),
    ],
)
def test_a_broken_params_file_is_told(tmp_path, content, said):
    (tmp_path / "p.yml").write_bytes(content)
    with pytest.raises(BadInput, match=said):
        read_yaml(tmp_path / "p.yml")


def test_a_params_file_is_read_however_an_editor_saves_it(tmp_path):
    meant = {
        "seq_lens": [16, 32],
        "batch_sizes": [16, 32],
        "budget_s": "1e-2",
        "seed": 16,
        "head_dim": 1000,
    }
    text = "seq_lens: &a [16, 32]\nbatch_sizes: *a\nbudget_s: 1e-2\nseed: 0x10\nhead_dim: 1_000\n"
    for content in (
        text,
        text.replace("\n", "\r\n"),
        "\ufeff" + text,
        "---\n" + text + "...\n",
        "# x\n\n" + text,
    ):
        (tmp_path / "p.yml").write_bytes(content.encode())
        assert read_yaml(tmp_path / "p.yml") == meant


def test_case_ids_depend_on_the_factors_alone():
    attention = ALL["attention"]()
    a, b = (attention.cases(attention.Params(seq_lens=lens)) for lens in ([16, 32], [32, 16]))
    ids = {case.case_id for case in a}
    assert ids == {case.case_id for case in b} and len(ids) == len(a)


_ODD = ["", "0", "no such", None, True, -1, 0, 10**30, 1.5, float("nan"), 10**4000]
_ODD += [[], ["0"], [-1], [[]], [[{"a": 1}, None]], {}, {"0": 0}, {1: 2}, {"a": {"b": [1e400]}}]
_ODD += [datetime.date(2024, 1, 2), b"\xff", "x" * 10_000, "\x1b[31m", "\udc80"]
_ODD += ["1e400", "~", "[{a: 1}]", "{a: 1, a: 2}", "2024-13-45", "&a [*a]"]


@pytest.mark.parametrize("name", [*ALL])
def test_whatever_a_field_is_given_it_is_taken_or_told_in_one_line_that_names_it(name):
    for field in _params(name).model_fields:
        for value in _ODD:
            assert _is_taken_or_told(name, field, value), (field, value)


def _is_taken_or_told(name, field, value):
    try:
        taken = _params(name)(**{field: value})
    except BadInput as error:
        is_whole = all(line.startswith(f"{name}.") and len(line) < 800 for line in error.lines)
        return is_whole and "\n" not in "".join(error.lines) and field in str(error)
    assert name in ("model", "summary") or len(ALL[name]().cases(taken)) <= 2 * MAX_CASES
    return bool(json.dumps(taken.model_dump(mode="json"), allow_nan=False))  # the store can hold it


_KINDS = [{"kind": "dense", "backend": "math"}, {"kind": "sparse", "pattern": "window"}]


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"seq_lens": [1, 2**20], "attention_types": _KINDS, "budget_s": 1e-3, "causal": False},
        {"label": "123", "budget_s": 1e3},
        {"label": "~ {a: [é 漢]} # 'x\": 1e-3", "attention_types": _KINDS[1:]},
    ],
)
def test_parameters_survive_a_file_the_command_line_and_the_store(values):
    made = _params("attention")(**values)
    dumped = made.model_dump(mode="json")
    assert _params("attention")(**yaml.safe_load(yaml.safe_dump(dumped))) == made
    assert _params("attention")(**json.loads(json.dumps(dumped))) == made
    as_text = {
        name: value if isinstance(value, str) else yaml.safe_dump(value, default_flow_style=True)
        for name, value in dumped.items()
    }
    assert _params("attention")(**as_text) == made
    again = _params("attention")(**{**dumped, "label": "another", "suite": "other"})
    assert again.defining() == made.defining()  # a run is continued under another label
