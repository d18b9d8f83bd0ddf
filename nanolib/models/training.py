"""Optimize a model's forward pass, read text as bytes, compute the loss, and train a model.

`experiments.model.steps` contains the timed steps.
"""

import functools
import itertools
import sysconfig
import types
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanolib.measurement import BadInput, Unsupported, quote
from nanolib.models.user import logits_of
from nanolib.paths import expand_home

TEXT_VOCAB_SIZE = 256
Forward = Callable[[Tensor], Tensor]
_COPIES = itertools.count()
_STEPS = ("inference", "training")
# Modes to which each optimization applies.
OPTIMIZATIONS = {
    "eager": (*_STEPS, "generation"),
    "compile": _STEPS,
    "compile_reduce_overhead": _STEPS,
    "compile_max_autotune": _STEPS,
    "cuda_graph": ("generation",),
    "checkpoint": ("training",),
    "autocast_bfloat16": _STEPS,
    "autocast_bfloat16_checkpoint": ("training",),
}


def is_compiled(name: str) -> bool:
    """Return whether an optimization compiles the model, in any mode of `torch.compile`."""
    return name.startswith("compile")


def applies(name: str, mode: str, dtype: str) -> bool:
    """Return whether an optimization applies to a mode and to weights of a dtype."""
    return mode in OPTIMIZATIONS[name] and (dtype == "float32" or not name.startswith("autocast"))


def unsupported_reason(name: str, device: str) -> str:
    """Return why a device does not support an optimization, or an empty string."""
    kind = torch.device(device).type
    if kind == "cuda" or name not in ("cuda_graph", "compile_reduce_overhead"):
        return ""
    return f"{name} needs a CUDA device, and the device is {kind}; leave it out"


def optimize(name: str, model: nn.Module, forward: Forward, ids: Tensor) -> Forward:
    """Return the optimized forward function of a model.

    Args:
        name: Name of the optimization, a key of `OPTIMIZATIONS` for inference or training.
        model: Model whose weights `forward` uses.
        forward: Function from ids to logits.
        ids: Example ids, with the shape and the device of all calls.

    Raises:
        Unsupported: This machine or this model does not support the optimization.
    """
    if reason := unsupported_reason(name, ids.device.type):
        raise Unsupported(reason)
    if is_compiled(name):
        # An error is better than a model of which dynamo silently leaves a part uncompiled.
        torch._dynamo.config.fail_on_recompile_limit_hit = True
        mode = name.removeprefix("compile").removeprefix("_").replace("_", "-") or "default"
        # Dynamo never compiles a function that has once run under a FLOP counter.
        return torch.compile(copy_function(lambda ids: forward(ids)), mode=mode, dynamic=False)
    if name.endswith("checkpoint"):
        _checkpoint(model)
    if name.startswith("autocast"):
        return torch.autocast(ids.device.type, torch.bfloat16)(forward)
    return forward


def copy_function(function: types.FunctionType) -> types.FunctionType:
    """Copy a function, so that torch.compile caches the graphs of the copy separately.

    Dynamo caches graphs by the code of a function. Each call searches all graphs of the code, and
    after eight graphs dynamo stops compiling. Calls that nanolib times in turns must not share a
    cache.

    Args:
        function: A Python function that is not a method.
    """
    code = function.__code__.replace(co_name=f"{function.__code__.co_name}_{next(_COPIES)}")
    own = types.FunctionType(
        code, function.__globals__, function.__name__, function.__defaults__, function.__closure__
    )
    own.__kwdefaults__ = function.__kwdefaults__
    return own


def _checkpoint(model: nn.Module):
    """Make the backward pass compute the activations of blocks again."""
    if hasattr(model, "checkpointing"):
        model.checkpointing = True
    elif hasattr(model, "activation_checkpointing_enable"):
        model.activation_checkpointing_enable({"use_reentrant": False})
    else:
        raise Unsupported(
            f"{type(model).__name__} has no activation_checkpointing_enable; "
            "remove checkpoint from optimizations"
        )


@functools.lru_cache(maxsize=4)
def load_text(corpus: str = "", max_bytes: int = 4_000_000) -> Tensor:
    """Read a corpus as bytes.

    Args:
        corpus: Path of a text file, or of a folder whose files are read in the order of their
            names. If empty, nanolib reads the Python files of Python's standard library.
        max_bytes: Largest number of bytes to read.

    Returns:
        Bytes of the corpus, uint8, shape [bytes].

    Raises:
        BadInput: The corpus has fewer than two bytes, or cannot be read.
    """
    root = expand_home(corpus) if corpus else Path(sysconfig.get_path("stdlib"))
    # Files of other types differ between machines. The limit comes before site-packages.
    files = sorted(root.rglob("*" if corpus else "*.py"))
    data = bytearray()
    try:
        for path in filter(Path.is_file, [root, *files]):
            with path.open("rb") as file:
                data += file.read(max_bytes - len(data))
            if len(data) >= max_bytes:
                break
    except OSError as error:
        raise BadInput(
            f"corpus: {quote(corpus)} cannot be read ({error.strerror}); give another text"
        ) from None
    if len(data) < 2:
        raise BadInput(
            f"corpus: {quote(corpus)} has {len(data)} bytes; give a text file or a folder with "
            "at least two"
        )
    return torch.frombuffer(data, dtype=torch.uint8)


def text_batches(
    data: Tensor, count: int, batch_size: int, length: int, generator: torch.Generator, device: str
) -> Iterator[Tensor]:
    """Draw batches of random sequences from a text, one batch at a time.

    Args:
        data: Bytes of a text, from `load_text`.
        count: Number of batches.
        batch_size: Number of sequences per batch.
        length: Bytes per sequence. A loss over n predictions needs n + 1 bytes.
        generator: Generator of the random positions.
        device: Device of the batches.

    Yields:
        Token ids in [0, 256), int64, shape [batch_size, length].

    Raises:
        BadInput: The text is shorter than `length`.
    """
    if len(data) < length:
        raise BadInput(
            f"corpus: the text has {len(data)} bytes, and a sequence needs {length}; "
            "give a longer text"
        )
    sequences = data.unfold(0, length, 1)  # A view of all sequences in the text.
    for _ in range(count):
        drawn = torch.randint(len(sequences), (batch_size,), generator=generator)
        yield sequences[drawn].long().to(device)


def next_token_loss(model: Callable[[Tensor], Tensor], ids: Tensor) -> Tensor:
    """Compute the mean cross-entropy of predicting each token from the earlier tokens, in nats.

    Args:
        model: Function from ids to the logits of all positions.
        ids: Token ids, int64, shape [batch, length + 1].

    Raises:
        Unsupported: The model returns something other than logits of all positions.
    """
    logits, wanted = model(ids[:, :-1]), ids[:, 1:]
    shape = logits.shape if isinstance(logits, Tensor) else ()
    if len(shape) != 3 or shape[:2] != wanted.shape:
        # A plan has a batch size of its own, which a reader would not understand.
        each = f"logits of shape {[*shape[1:]]} for each sequence"
        raise Unsupported(
            f"the model returns {each if shape else type(logits).__name__}, and a loss needs "
            f"{[wanted.shape[1], 'vocab']}; return them, or an object with .logits, or leave the "
            "loss out with train: false in notebook model, directions: [forward] in warmup, "
            "phases: [prefill] in energy, or modes: [forward] in fp8"
        )
    return F.cross_entropy(logits.flatten(0, 1).float(), wanted.flatten())


def train(
    model: nn.Module,
    batches: Iterable[Tensor],
    rate: float | Callable[[int], float],
    *,
    autocast: torch.dtype | None = None,
    clip: float | None = None,
) -> Tensor:
    """Train a model with AdamW to predict the next token.

    Args:
        model: Model that maps ids to logits. The training changes the model's weights.
        batches: A batch of ids for each step, int64 [batch, length + 1], on the model's device.
        rate: Learning rate, or a function that maps the number of a step to a learning rate.
        autocast: Dtype of the matrix products, or None for the dtype of the weights. The loss is
            not scaled, so float16 is too narrow.
        clip: Largest norm of all gradients together, or None for no limit.

    Returns:
        Loss before each step, in nats per token, float32, shape [steps].
    """
    weights = [*model.parameters()]
    optimizer = torch.optim.AdamW(weights, fused=True)
    forward, losses = logits_of(model), []
    for step, ids in enumerate(batches):
        optimizer.param_groups[0]["lr"] = rate(step) if callable(rate) else rate
        with torch.autocast(weights[0].device.type, autocast, enabled=autocast is not None):
            loss = next_token_loss(forward, ids)
        losses.append(loss.detach().float())
        loss.backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(weights, clip)
        optimizer.step()
        optimizer.zero_grad()
    return torch.stack(losses)
