"""Our model against Hugging Face's Llama of the same weights: `make bench`.

Each round times both, so that drift hits them alike; the ratio of a round is the datum, and the interval is that of the median
ratio. Sparse attention is timed in turns with dense and FlexAttention, next to its bound, by `nano run attention`.
"""

import sys
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from nanolib import NanoConfig, create_model, generate_random_batch
from nanolib.experiments.model.steps import Generating, Inferring, Training
from nanolib.meters import Timing, measure_phases
from nanolib.models.user import logits_of
from nanolib.stats.intervals import median_interval
from tests.models.llama import llama_like

BUDGET_S = 20.0  # seconds per line
PRESET, LENGTH, PROMPT, NEW_TOKENS = "small", 128, 64, 64


def main():
    """Print how many times as fast as `LlamaForCausalLM` our model of the same weights is."""
    config = NanoConfig.from_preset(PRESET)
    ours = create_model(config, seed=0)
    models = {"ours": ours.eval(), "theirs": llama_like(ours).eval()}
    ids = generate_random_batch(1, LENGTH + 1, config.vocab_size, seed=0)
    with torch.no_grad():
        logits = [logits_of(model)(ids) for model in models.values()]
    apart = (logits[0] - logits[1]).abs().max()
    print(f"{PRESET}, float32, batch 1: logits at most {apart:.1e} from Hugging Face's Llama")
    calls = {name: _model_calls(model, ids) for name, model in models.items()}
    for what in calls["ours"]:
        both = {name: by_name[what] for name, by_name in calls.items()}
        rows = measure_phases(Timing(both, budget_s=BUDGET_S))
        ours, theirs = (np.array(rows[name].samples) for name in models)
        low, ratio, high = median_interval(theirs / ours)
        print(f"  {what:42} ours is {ratio:.2f}× [{low:.2f} … {high:.2f}] as fast", flush=True)


def _model_calls(model, ids):
    generating = Generating(model, ids[:, :PROMPT], NEW_TOKENS)
    generating.generation.prefill()
    return {
        f"forward, n={LENGTH}": Inferring(model, ids[:, :-1], "eager"),
        f"decode after {PROMPT} to {PROMPT + NEW_TOKENS} tokens": generating.generation.decode,
        f"training step, n={LENGTH}": Training(model, ids, "eager"),
    }


if __name__ == "__main__":
    main()
