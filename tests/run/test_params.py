"""Parameters are checked before a run, and survive files, the command line and the database."""

import datetime
import json

import pytest
import yaml

from nanolib import NanoConfig
from nanolib.experiments import ALL
from nanolib.experiments.model.cases import check_preset
from nanolib.measurement import BadInput
from nanolib.params import read_yaml


def _params(name):
    return ALL[name]().Params


@pytest.mark.parametrize(
    ("field", "value", "parsed"),
    [
        ("seq_lens", "64", [64]),
        ("attention_types", "dense", [{"kind": "dense"}]),
        ("label", 20261128, "20261128"),
        ("num_heads", 4.0, 4),
    ],
)
def test_what_papermill_hands_over_as_text_is_parsed(field, value, parsed):
    assert getattr(_params("attention")(**{field: value}), field) == parsed


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("seq_lens: " + "[" * 1000, "is not valid YAML"),
        ("- 1\n- 2", r"contains \[1, 2\], not `name: value` pairs"),
        ("on: 1", "contains {True: 1}, not"),
        ("!!python/object/apply:os.system ['true']", "is not valid YAML"),
        ("label: 2024-13-45", r"is not valid YAML \(month must be in"),
        (b"label: \xe9", "cannot be read"),
    ],
)
def test_a_broken_params_file_is_one_line(tmp_path, content, said):
    (tmp_path / "p.yml").write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(BadInput, match=said):
        read_yaml(tmp_path / "p.yml")


_ODD = [
    *("", "0", "no such", None, True, -1, 0, 10**30, 1.5, float("nan"), 10**4000),
    [*range(1, 5000)],
    [],
    ["0"],
    [-1],
    [[]],
    [[{"a": 1}, None]],
    {},
    {"0": 0},
    {1: 2},
    {"a": {"b": [1e400]}},
    *(datetime.date(2024, 1, 2), b"\xff", "x" * 10_000, "\x1b[31m", "\udc80"),
    *("1e400", "~", "[{a: 1}]", "{a: 1, a: 2}", "2024-13-45", "&a [*a]"),
]


@pytest.mark.parametrize("name", [*ALL])
def test_whatever_a_field_is_given_it_is_taken_or_refused_in_one_line_that_names_it(name):
    for field in _params(name).model_fields:
        for value in _ODD:
            assert _is_taken_or_refused(name, field, value), (field, value)


def _is_taken_or_refused(name, field, value):
    try:
        taken = _params(name)(**{field: value})
    except BadInput as error:
        is_whole = all(line.startswith(f"{name}.") and len(line) < 800 for line in error.lines)
        return is_whole and "\n" not in "".join(error.lines) and field in str(error)
    return bool(taken.model_dump_json())


@pytest.mark.parametrize("value", [True, "true", [2, False]])
def test_true_is_no_number(value):
    for kind, fields in ((_params("attention"), "num_heads budget_s"), (NanoConfig, "d_ff")):
        for field in fields.split():
            with pytest.raises(
                BadInput, match=rf"^\w+\.{field}: must be a number, got .*(True|Fal)"
            ):
                kind(**{field: value})


def test_parameters_survive_a_file_the_command_line_and_the_store():
    made = _params("attention")(
        seq_lens=[1, 2**20],
        attention_types=[{"kind": "dense", "backend": "math"}],
        budget_s=1e-3,
        causal=False,
        label="~ {a: [é 漢]} # 'x\": 1e-3",
        case_timeout_s=1e3,
    )
    dumped = made.model_dump(mode="json")
    as_text = {
        name: value if isinstance(value, str) else yaml.safe_dump(value, default_flow_style=True)
        for name, value in dumped.items()
    }
    for stored in (yaml.safe_load(yaml.safe_dump(dumped)), json.loads(json.dumps(dumped)), as_text):
        assert _params("attention")(**stored) == made
    assert made.replace(label="another", suite="other").defining() == made.defining()


def test_a_repeated_value_is_measured_once():
    params = _params("attention")(seq_lens=[8, 16, 8], attention_types=["dense", {"kind": "dense"}])
    assert params.seq_lens == [8, 16] and params.attention_types == [{"kind": "dense"}]


def test_a_sequence_may_be_as_long_as_the_context():
    longest = NanoConfig.from_preset("decoder_tiny").context_length
    check_preset("decoder_tiny", {"vocab_size": 256}, ("a", longest))
    with pytest.raises(ValueError, match=f"a: {longest + 1} exceeds the context_length {longest}"):
        check_preset("decoder_tiny", {}, ("a", longest + 1))


def test_what_papermill_sets_must_be_a_parameter():
    """papermill puts what it is given into a cell, whose text is among the inputs of IPython."""
    values = {"seq_lens": [32], "heads": 16, "PAPERMILL_INPUT_PATH": "attention.ipynb"}
    cell = "".join(f"{each} = {value!r}\n" for each, value in values.items())
    declared = {"own": 1, "seq_len": 512, **values, "In": ["", "own = 1", f"# Parameters\n{cell}"]}
    with pytest.raises(BadInput, match=r"^attention\.heads: unknown name; .*use one of device"):
        _params("attention").collect(declared)
    declared["In"][-1] = "# Parameters\nseq_lens = [32]\n"
    assert _params("attention").collect(declared) == _params("attention")(seq_lens=[32])
