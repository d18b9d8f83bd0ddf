"""Our Transformer against `LlamaForCausalLM` of the same configuration and weights: forward, training step, decode."""

from collections.abc import Iterator

import torch

from nanolib import NanoConfig, create_model, generate_random_batch
from nanolib.experiments.model.steps import Generating, Inferring, Training
from nanolib.models.user import logits_of
from parts.rounds import ratio, rounds, text
from tests.models.llama import llama_like

PRESET, LENGTH, PROMPT, NEW_TOKENS = "small", 128, 64, 64


def against_hugging_face(budget: float) -> Iterator[str]:
    """A line per mode: how many times as fast ours is, both in float32 with the same threads."""
    config = NanoConfig.from_preset(PRESET)
    ours = create_model(config, seed=0)
    theirs = llama_like(ours)
    ids = generate_random_batch(1, LENGTH + 1, config.vocab_size, seed=0)
    with torch.no_grad():
        apart = (logits_of(ours.eval())(ids) - logits_of(theirs.eval())(ids)).abs().max()
    yield f"{PRESET} against Hugging Face's Llama of the same weights, float32, batch 1: logits at most {apart:.1e} apart"
    steps = [Inferring(model, ids[:, :-1], "eager") for model in (ours, theirs)]
    yield _line(f"forward, n={LENGTH}", [step for step in steps], budget)
    steps = [Generating(model, ids[:, :PROMPT], NEW_TOKENS) for model in (ours, theirs)]
    for step in steps:
        step.generation.prefill()
    decode = f"decode after {PROMPT} to {PROMPT + NEW_TOKENS} tokens"
    yield _line(decode, [step.generation.decode for step in steps], budget)
    yield _line(
        f"training step, n={LENGTH}",
        [Training(model, ids, "eager", 1e-5) for model in (ours, theirs)],
        budget,
    )


def _line(what: str, calls: list, budget: float) -> str:
    rows = rounds(dict(zip(("ours", "theirs"), calls, strict=True)), budget)
    times = ", ".join(
        f"{name} {row.estimate:.1f} ms" for name, row in rows.items() if name != "total"
    )
    return f"  {what:42} ours is {text(ratio(rows, 'theirs', 'ours'))} as fast ({times})"
