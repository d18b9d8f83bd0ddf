"""Bad input gets one line with field, value and remedy, exit code 2, and nothing is written."""

import contextlib
import shlex
import shutil
import sqlite3

import pytest

from nanolib.store import Store
from tests.processes import invoked
from tests.store.rows import make_run

# `OUT` is the output folder, `HERE` a folder with files: text.txt, cut.sqlite, foreign.sqlite.
WITHOUT_DATABASE = {
    "": "Usage",
    "nope": "No such command 'nope'",
    "run atention": "; did you mean attention?",
    "run attention -p seq_lens": "'seq_lens' is not a NAME=VALUE pair",
    "run attention -p seq_len=[8]": "attention.seq_len: unknown name; did you mean seq_lens?",
    "run attention -p num_heads=true": "attention.num_heads: must be a number, got True",
    "run attention -p 'budget_s=[2, false]'": "budget_s: must be a number, got [2, False]",
    "run model -p 'overrides={d_ff: true}'": "config.d_ff: must be a number, got True",
    "run attention -p seq_lens=[0]": "attention.seq_lens[0]: Input should be greater than 0, got 0",
    "run attention -p seq_lens=[16777217]": "less than or equal to 16777216, got 16777217",
    "run attention -p seq_lens=[1": (
        "attention.seq_lens: '[1' is not valid YAML (while parsing a flow sequence in "
    ),
    "run attention -p 'attention_types=[{kind: [dense]}]'": (
        "attention.attention_types: attention_type: ['d"
    ),
    "run model -p seq_lens=[1025]": (
        "seq_lens: 1025 exceeds the context_length 1024 of decoder_nano"
    ),
    "run attention -p device=tpu": "device: 'tpu' is not available; use auto or one of cpu",
    "run model -p presets=[tiny]": "model.presets[0]: Input should be 'decoder_nano', ",
    "run model -p model=no.such:thing": (
        "'no.such:thing' cannot be imported (ModuleNotFoundError: No module named 'no'); correct"
    ),
    "run model -p model=hf:Nope": "transformers has no model class 'Nope'",
    "run model -p 'overrides={d_modl: 8}'": "config.d_modl: unknown name; did you mean d_model?",
    "run quick -p seed=1": "parameters belong to one notebook; name one of attention, dist",
    "run quick full": "which-algorithm); name one suite (",
    "run attention -p 'attention_types=[{a: 1}]'": "None is not a known attention kind; use",
    "run attention -p 'attention_types=[{1: dense}]'": (
        "attention_types[0][1].[key]: Input should be a valid string, got 1"
    ),
    "run attention -p 'quality_attentions=[{pattern: spiral}]'": (
        "pattern: Input should be 'window', 'local_global', "
    ),
    "run attention -p 'attention_types=[{pattern: threshold, sparsity: 0.5, kind: sparse}]'": (
        "attention_options.sparsity: threshold has no sparsity to set; set mass"
    ),
    "run attention -p 'attention_types=[{kind: flex, pattern: document}]'": (
        "attention_options.document_lengths: pattern document needs either"
    ),
    "run attention -p 'attention_types=[{kind: sparse, pattern: document, document_lengths: [3], "
    "document_starts: [3]}]'": "attention_options.document_lengths: pattern document needs either",
    "run attention -p 'attention_types=[{kind: sparse, pattern: own}]'": (
        "attention_options.mask_mod: '' does not name a function; write package.module:function"
    ),
    "run attention -p 'attention_types=[{kind: sparse, mask_mod: \"module:function\"}]'": (
        "attention_options.mask_mod: local_global has its own mask; set pattern: own, or remove"
    ),
    "run attention -p 'attention_types=[{kind: dense, impl: FA3}]'": (
        "attention_options.impl: FA3 does not work with backend auto; set backend: flash"
    ),
    "run attention --label latest": "attention.label: 'latest' cannot name a run; use",
    "run attention --label latest~1": "attention.label: 'latest~1' cannot name a run; use",
    "run attention --label 'a\nb'": r"attention.label: 'a\nb' cannot name a run; use",
    "run attention --output HERE/text.txt": "text.txt is not a folder; name a folder",
    "runs --output /dev/null": "/dev/null is not a folder; name a folder",
    "run model -p 'overrides={num_layers: 1001}'": "num_layers: Input should be less than or equal",
    "run model -p 'overrides={attention_options: {windo: 3}}'": (
        "attention_options.windo: is not an option of any attention kind"
    ),
    "run fp8 -p corpus=HERE/empty.txt": "empty.txt' has 0 bytes; give a text file or a folder",
    "run energy -p power_trace=HERE/none.csv": "read (No such file or directory); give a CSV file",
    "run energy -p power_trace=HERE/other.csv": "not found: ['power_w']); give a CSV file with",
    "run energy -p power_trace=HERE/words.csv": "could not convert string to float: 'x'); give a",
    "run energy -p power_trace=HERE/unsorted.csv": "'unsorted.csv' is not a recording; give",
    "run fp8 -p 'overrides={dtype: float32}'": (
        "fp8.overrides: the parameter precisions sets dtype; remove dtype from overrides"
    ),
    "run model -p 'overrides={attention_type: sparse}'": (
        "model.overrides: the parameter attention_types sets attention_type"
    ),
    "run fp8 -p excluded_modules=[haed]": "fp8.excluded_modules: 'haed' matches no linear layer",
    "run fp8 -p 'excluded_modules=[\"*\"]'": "['*'] leaves no linear layer to convert",
    "run fp8 -p 'overrides={d_ff: 100}'": (
        "fp8.excluded_modules: blocks.0.mlp.gate is 100 x 256, not a multiple of 16"
    ),
    "run distributed -p trace=true": (
        "distributed.trace: calls in the processes of ranks are not traced"
    ),
    "run distributed -p num_kv_heads=3": (
        "distributed.num_kv_heads: 3 does not divide num_heads 8; choose a divisor"
    ),
    "run energy -p 'model_options={width: 3}'": "model_options: needs a model",
    "run energy -p model=hf:LlamaForCausalLM -p seq_lens=[9999]": (
        "exceeds the max_position_embeddings 2048"
    ),
    "run attention -p 'attention_types=[{kind: own}]'": (
        "attention_options.call: is missing; give a value"
    ),
    "run attention -p 'attention_types=[{kind: own, call: \"tests.models.inputs:f\"}]'": (
        "has no function 'f'; name one"
    ),
    "ab --python /bin/true --python /bin/true --call a:b": (
        "'/bin/true' does not run Python 3.11 or newer; name an"
    ),
    "ab --python a --python b --python c --call a:b": "--python: must be given twice, got 3",
    "ab . . --call a:b --json /": "/: is a folder; name a file",
    "ab . . --call json:dumps --threshold nan": (
        "Invalid value for '--threshold': nan is not a number"
    ),
    "run summary -p runs=[before]": "does not exist; run `nano run quick` first",
    "run --on mars": "'mars' is not one of 'here', 'ray'",
    "run --on ray --resume": "--resume: a Ray task returns all of its results or none",
    "plan nope --memory 1GiB": "model: preset: 'nope' is not known; use one of decoder_nano",
    "plan nowhere.json --memory 1GiB": (
        "model: 'nowhere.json' is not a config file of a Hugging Face model (FileNotFound"
    ),
    "plan decoder_tiny --memory 5parsec": (
        "memory: could not interpret byte unit: parsec, got '5parsec'"
    ),
    "plan decoder_tiny --memory 80": "memory: '80' is not an amount with a unit, such as 80GiB",
    "plan hf:T5Model --memory 80GB": "model: hf:T5Model does not read one sequence of tokens",
    "plan hf:ViTModel --memory 80GB": "model: hf:ViTModel does not read one sequence of tokens",
    "plan decoder_tiny --memory 80,5GB": "memory: '80,5GB' is not an amount with a unit",
    "plan decoder_tiny --memory 0GiB": "memory: Input should be greater than 0, got '0GiB'",
    "plan decoder_tiny --ranks 2 --memory 1GiB": "ranks: must divide batch_size 1, got 2",
    "plan decoder_tiny --seq-len 0 --memory 1GiB": "seq_len: Input should be greater than 0, got 0",
    "plan decoder_tiny -p context_length=64 --seq-len 128 --memory 1GiB": (
        "'decoder_tiny' cannot be planned, because"
    ),
    "plan decoder_tiny -p attention_type=flex --memory 1GiB": (
        "flex has no plan (the memory counter cannot track"
    ),
    "plan decoder_tiny -p dtype=bfloat16 --memory 1GiB": (
        "options: dtype is not an option of the model; use --dtype"
    ),
    "plan hf:LlamaForCausalLM --seq-len 9999 --memory 1GiB": (
        "shorten the sequence, or raise max_position_embeddings to 9999"
    ),
    "plan hf:LlamaForCausalLM -p attn_implementation=flex_attention --memory 1GiB": (
        "cannot be planned; use sdpa or eager"
    ),
    "plan hf:Gemma3ForConditionalGeneration --memory 1GiB --seq-len 16 -p 'text_config={"
    "hidden_size: 32, intermediate_size: 64, num_hidden_layers: 1, num_attention_heads: 2, "
    "num_key_value_heads: 1, head_dim: 16, vocab_size: 300}' -p 'vision_config={hidden_size: 32, "
    "intermediate_size: 64, num_hidden_layers: 1, num_attention_heads: 2, image_size: 28, "
    "patch_size: 14}'": ("to plan only its text model, use a config"),
    "runs": "does not exist; run `nano run quick` first",
    "init HERE/text.txt": "is not an empty folder",
    "clean": "no run is chosen; name the runs to delete",
    "clean --older-than -3d": "Invalid value for '--older-than': -3.0 is not in the range",
    "merge HERE/text.txt": "text.txt cannot be used (file is not a database)",
    "merge HERE/foreign.sqlite": (
        "foreign.sqlite has schema 0, but nanolib needs schema 6; name another file, or move the"
    ),
    "merge HERE/cut.sqlite": "cut.sqlite",
    "ab one": "revision: 'one' is given; give two",
}
FILES = {
    "empty.txt": b"",
    "other.csv": b"t_s\n0\n",
    "unsorted.csv": b"t_s,power_w\n0,5\n2,5\n1,5\n",
    "words.csv": b"t_s,power_w\n0,x\n1,5\n",
}
WITH_DATABASE = {
    "run summary -p runs=[befor]": "'befor' is not in the database; did you mean before?",
    "report latest~9 --to HERE/report": "'latest~9'",
    "compare befor latest": "did you mean before? `nano runs` lists all runs",
    "compare latest HERE/text.txt": "text.txt cannot be used",
    "export HERE/x.md": "'x.md' has no known ending; use .sqlite or .json",
    "compare latest latest --json HERE/ok.json --markdown HERE/none/x.md": (
        "none is not a folder; create it, or name"
    ),
    "history nowhere": "'nowhere' is not one of 'attention', 'model', ",
    "report --to HERE/text.txt": "text.txt",
    "merge OUT/results.sqlite": "is this database itself; name another",
}


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    path = tmp_path_factory.mktemp("good") / "results.sqlite"
    with Store(path) as store:
        store.add(make_run(label="before"))
    return path


@pytest.fixture
def here(tmp_path, measured):
    folder = tmp_path / "here"
    folder.mkdir()
    (folder / "text.txt").write_text("no database\n" * 100)
    for name, content in FILES.items():
        (folder / name).write_bytes(content)
    content = measured.read_bytes()
    (folder / "cut.sqlite").write_bytes(content[:5000])
    with contextlib.closing(sqlite3.connect(folder / "foreign.sqlite")) as db:
        db.execute("CREATE TABLE t (x)")
    return folder


def _files(folder):
    return {
        path: path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and not path.name.endswith(("-wal", "-shm"))
    }


@pytest.mark.parametrize(("arguments", "said"), (WITHOUT_DATABASE | WITH_DATABASE).items())
def test_it_is_one_line_and_nothing_is_written(tmp_path, here, measured, arguments, said):
    has_database = arguments in WITH_DATABASE
    out = tmp_path / "out"
    if has_database:
        out.mkdir()
        shutil.copy(measured, out / "results.sqlite")
    before = _files(tmp_path)
    words = shlex.split(arguments.replace("HERE", str(here)).replace("OUT", str(out)))
    ended = invoked(*words, env={"NANOLIB_OUTPUT": str(out)})
    assert ended.exit_code == 2, ended.output
    assert said in ended.output, ended.output
    assert not arguments or len(ended.output.strip().splitlines()) == 1
    assert _files(tmp_path) == before and out.exists() == has_database
