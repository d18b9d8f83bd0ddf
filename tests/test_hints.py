"""What users of other suites type at `nano run`, and the line that shows what to type here."""

import re
import shlex

import pytest

from nanolib.cli import main
from nanolib.experiments import ALL


def _said(capsys, arguments):
    with pytest.raises(SystemExit) as ended:
        main(["run", *arguments], prog_name="nano")
    lines = capsys.readouterr().err.splitlines()
    assert ended.value.code == 2 and len(lines) == 1
    return lines[0]


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("--quick", "nano run quick"),
        ("--full", "nano run full"),
        ("model --full", "nano run full model"),
        ("--quick attention model", "nano run quick attention model"),
        ("--seq_lens 128 model", "nano run model -p seq_lens='[128]'"),
        ("-f attention/model.yml", "papermill notebooks/model.ipynb model.ipynb -f attention/model.yml"),
        ("model -f 'my params.yml'", "papermill notebooks/model.ipynb model.ipynb -f 'my params.yml'"),
        ("attention --seq_lens 1024", "nano run attention -p seq_lens='[1024]'"),
        ("attention --seq-lens=1024,2048", "nano run attention -p seq_lens='[1024,2048]'"),
        ("attention --seq_lens 1024 2048", "nano run attention -p seq_lens='[1024,2048]'"),
        ("--head_dim 64", "nano run attention -p head_dim='64' (or of distributed)"),
        ("model --seq_lens '[1024]'", "nano run model -p seq_lens='[1024]'"),
        ("--presets small", "nano run model -p presets='[small]' (or of energy, fp8)"),
        ("--attention_types dense", "nano run attention -p attention_types='[dense]' (or of model)"),
        ("--new_tokens 4", "nano run model -p new_tokens='4' (or of energy)"),
        ("-f my-fp8.yml", "papermill notebooks/fp8.ipynb fp8.ipynb -f my-fp8.yml"),
    ],
)
def test_a_habit_gets_a_line_that_shows_the_command(capsys, typed, meant):
    said = _said(capsys, shlex.split(typed))
    assert said.startswith("nano: No such option ") and said.endswith(f"Write: {meant}")
    if meant.startswith("nano run") and "-p" in meant:  # what is shown is taken
        *_, notebook, _, given = shlex.split(meant.partition(" (or of")[0])
        name, _, value = given.partition("=")
        import yaml

        ALL[notebook]().Params(**{name: yaml.safe_load(value)})


def test_other_mistakes_are_told_as_ever(capsys):
    assert re.search(r"No such option '--nonsense'\. See: nano run --help$", _said(capsys, ["--nonsense"]))
    assert "is a params file; write: papermill" in _said(capsys, ["mine.yml"])
    assert "write: nano run NOTEBOOK -p 'seq_lens=3'" in _said(capsys, ["seq_lens=3"])
    with pytest.raises(SystemExit):
        main(["runs", "--quick"], prog_name="nano")
    assert "See: nano runs --help" in capsys.readouterr().err
