"""The command `nano plan`: what it prints, and what it refuses."""

import json

import pytest
from click.testing import CliRunner

from nanolib.cli import main
from nanolib.experiments.model.planner import USES
from nanolib.experiments.model.planning import Request

SMALL = "-p num_layers=4 -p d_model=64 -p num_heads=4 -p vocab_size=128"
LLAMA, TINY = "hf:LlamaForCausalLM", "decoder_tiny"
FAILS = """
import torch
class fails(torch.nn.Linear):
    def __init__(self):
        super().__init__(2, 2)
    def forward(self, ids):
        assert not self.weight.numel(), "never"
"""
BAD = {
    "nope": "model: 'nope' is not a known preset",
    "hf:Nope": "transformers has no model class 'Nope'",
    "mymodule:build": "there is no module 'mymodule'",
    "failing:fails": "model: 'failing:fails' cannot be planned: AssertionError: never",
    "nowhere.json": "model: 'nowhere.json' is not a config file of transformers (FileNotFound",
    f"{TINY} --memory 5parsec": "memory: '5parsec' is not an amount",
    f"{TINY} --memory {'9' * 400}GiB": "is not an amount; use one such as 80GiB",
    f"{TINY} --ranks 3 --batch-size 4": "ranks: 3 does not divide batch_size 4",
    f"{TINY} --dtype int3": "dtype: 'int3' is not a known dtype",
    f"{TINY} --precision half": "precision: Input should be 'mixed' or 'pure', got 'half'",
    f"{TINY} --kv-dtype int3": "kv_dtype: Input should be 'float32', 'bfloat16', 'float16' or",
    f"{TINY} --seq-len 0": "seq_len: Input should be greater than 0, got 0",
    f"{TINY} --seq-len {'9' * 20}": "nano: seq_len: ",
    f"{TINY} --seq-len 200000 --attention-type sparse": "200000 is planned with dense",
    f"{TINY} -p context_length=64 --seq-len 128": "seq_len: 128 exceeds the context_length 64",
    f"{TINY} --optimizer lion": "Input should be 'adamw', 'sgd' or 'momentum', got 'lion'",
    f"{TINY} --attention-type flex": "cannot be planned: a compiled kernel allocates out of",
    f"{TINY} --attention-type odd": "attention_type: 'odd' is not a known attention kind",
    f"{TINY} -p d_model=x": "d_model: Input should be a valid integer",
    f"{TINY} -p dtype=bfloat16": "options: dtype is not one of them; use --dtype",
    f"{TINY} -p name=x": "name: unknown name",
    f"{TINY} --json nowhere/f.json": "nowhere is not a folder",
    f"{LLAMA} -p attention_type=x": "attention_type is not one of them; use --attention-type",
    f"{LLAMA} --attention-type sparse": f"attention_type: {LLAMA} has its own; leave it out",
    f"{LLAMA} --seq-len 9999": "shorten it or raise max_position_embeddings to 9999",
    f"{LLAMA} -p num_hidden_layers=-1": "makes no model; give 1 or more",
    f"{LLAMA} -p attn_implementation=flex_attention": "cannot be planned; use sdpa or eager",
    f"{LLAMA} -p foo=1": "'foo' is not a field of LlamaConfig",
    "hf:Gemma2ForCausalLM --ranks 2 --batch-size 2": "equal blocks, which hf:Gemma2ForCausalLM",
}


def _plan(words):
    given_memory = "" if "--memory" in words else " --memory 1GiB"
    return CliRunner().invoke(main, f"plan {words}{given_memory}")


@pytest.mark.parametrize("words", BAD)
def test_bad_input_is_one_line(words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "failing.py").write_text(FAILS)
    ended = _plan(words)
    assert ended.exit_code == 2 and BAD[words] in ended.output, ended.output
    assert len(ended.output.strip().splitlines()) == 1


def test_the_command_shows_what_fits_what_would_and_what_uses_the_memory(tmp_path):
    asked = f"{TINY} --memory 3MiB --seq-len 64 {SMALL} --precision pure"
    ended = _plan(f"{asked} --json {tmp_path / 'f.json'}")
    assert ended.exit_code == 0, ended.output
    assert "fits: inference; decoding" in ended.output and "training needs " in ended.output
    assert "training: the largest parts of the peak" in ended.output and "blocks.*" in ended.output
    _, _, batches = ended.output.partition("The largest batch that fits")
    rows = {line.split()[0]: line.split()[1:] for line in batches.splitlines()[2:5]}
    assert list(rows) == ["64", "256", "1024"] and rows["1024"][2:] == ["—", "—"]
    found = json.loads((tmp_path / "f.json").read_text())
    assert [use["use"] for use in found["uses"]] == list(USES)
    for use in found["uses"]:
        assert sum(use["kinds"].values()) == sum(p["bytes"] for p in use["parts"]) == use["bytes"]
    ended = _plan(f"{TINY} --memory 1KiB {SMALL}")
    assert ended.exit_code == 1 and "nothing fits as it is" in ended.output


@pytest.mark.parametrize(
    ("given", "title"),
    [
        ({}, "float32, training in mixed precision"),
        ({"dtype": "bfloat16", "precision": "mixed"}, "bfloat16, training in mixed precision"),
        ({"dtype": "bfloat16"}, "bfloat16"),
        ({"precision": "pure"}, "float32"),
        ({"precision": "pure", "kv_dtype": "float16"}, "float32, keys and values in float16"),
    ],
)
def test_training_is_mixed_unless_a_dtype_is_given(given, title):
    request = Request(model=TINY, memory="1GiB", **given)
    assert request.title.partition(", 1 × ")[0] == title
