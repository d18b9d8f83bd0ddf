"""Generate tokens one by one with a KV cache, for models of any source."""

import copy
import inspect
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from nanolib.measurement import Unsupported
from nanolib.models.transformer import Transformer
from nanolib.torch_internals import tree_leaves

# Models of the package `transformers` take and return their cache under one of these names.
_CACHES = ("past_key_values", "cache_params")


class Generation:
    """Generate tokens after a prompt, with a cache.

    Args:
        model: Model with the methods `new_cache`, `prefill` and `decode` of `Transformer`.
        prompt: Token ids of the prompt, int64, shape [batch, length].
        new_tokens: Number of tokens after which generation starts again at the end of the prompt.
    """

    def __init__(self, model, prompt: Tensor, new_tokens: int):
        self.model, self.prompt, self.new_tokens = model, prompt, new_tokens
        self.cache = model.new_cache(*prompt.shape, new_tokens)
        self.token = prompt[:, -1]
        self._start = prompt.shape[1]

    @torch.inference_mode()
    def prefill(self) -> None:
        """Read the prompt from the beginning, and choose the first token after the prompt."""
        self.forget()
        self.token = self.model.prefill(self.prompt, self.cache).argmax(dim=-1)

    @torch.inference_mode()
    def next_logits(self) -> Tensor:
        """Read the last token, and return the next token's logits, shape [batch, vocab_size]."""
        self._restart_at_end()
        return self.model.decode(self.token, self.cache)

    def _restart_at_end(self):
        if self.cache.length == self._start + self.new_tokens:
            self.cache.length = self._start

    @torch.inference_mode()
    def decode(self) -> None:
        """Read the last token, and choose the next token."""
        self.token = self.next_logits().argmax(dim=-1)

    def all_tokens(self) -> None:
        """Read the prompt, and choose all tokens after the prompt.

        A call also warms up the model, because a library may prepare a kernel for each new length
        of the cache. On an H200, the first token at a new length took 83 ms, and the GPU was at
        idle power during this time.
        """
        self.prefill()
        for _ in range(self.new_tokens):
            self.decode()

    def forget(self) -> None:
        """Empty the cache."""
        self.cache.length = 0

    @property
    def tensors(self) -> list[Tensor]:
        """The cache's buffers, the prompt and the last token."""
        return [*self.cache.tensors, self.prompt, self.token]


class CapturedGeneration(Generation):
    """Generate tokens with dense attention by replaying a CUDA graph.

    The first call of `decode` captures the graph. The graph reads the whole cache under a mask that
    depends on the position of the token.
    """

    def __init__(self, model, prompt: Tensor, new_tokens: int):
        super().__init__(model, prompt, new_tokens)
        for buffer in self.cache.tensors:
            buffer.zero_()  # Masked values get weight 0, but NaN · 0 is NaN.
        self._positions = torch.arange(self.cache.keys[0].shape[2], device=prompt.device)
        self._position, self._token = self._positions[:1].clone(), self.token.clone()
        self._graph = None

    @torch.no_grad()
    def decode(self) -> None:
        """Read the last token, and choose the next token."""
        self._restart_at_end()
        self._position.fill_(self.cache.length)
        if self._graph is None:
            self._graph = capture_graph(self._step)
        if self.token is not self._token:  # The graph reads and writes the token in place.
            self.token = self._token.copy_(self.token)
        self._graph.replay()
        self.cache.length += 1

    def _step(self):
        self.cache.position = self._position
        self.cache.seen = (self._positions <= self._position)[None]
        logits = self.model.decode(self._token, self.cache)
        self.cache.position = self.cache.seen = None  # The prompt has another number of tokens.
        self._token.copy_(logits.argmax(dim=-1))


def capture_graph(call: Callable[[], None]) -> torch.cuda.CUDAGraph:
    """Capture a call in a CUDA graph, after a few warm-up calls."""
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # Libraries allocate memory here, outside the graph.
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    with torch.cuda.graph(graph):
        call()
    return graph


class HuggingFaceGeneration(Generation):
    """Generate tokens with a model of the package `transformers`.

    The cache of the model may contain keys and values, sliding windows or states.
    """

    def __init__(self, model: nn.Module, prompt: Tensor, new_tokens: int):
        self.model, self.prompt, self.new_tokens = model, prompt, new_tokens
        self.token, self._cache_name = prompt[:, -1], _cache_name(model)
        self.forget()

    def forget(self) -> None:
        """Delete the cache, so that two caches never exist at the same time."""
        self.cache = self._prompt_cache = None
        self._tokens = 0

    @torch.inference_mode()
    def prefill(self) -> None:
        """Read the prompt from the beginning, and choose the first token after the prompt."""
        self.forget()
        out = self.model(self.prompt, use_cache=True, logits_to_keep=1)
        self.cache = getattr(out, self._cache_name)
        self.token = out.logits[:, -1].argmax(dim=-1)

    def all_tokens(self) -> None:
        """Read the prompt, choose all tokens after the prompt, and return to the prompt's end."""
        super().all_tokens()
        self._restart()  # No later token includes a prefill, because the prompt's cache exists now.

    @torch.inference_mode()
    def next_logits(self) -> Tensor:
        """Read the last token, and return the next token's logits, shape [batch, vocab_size]."""
        if self._tokens == self.new_tokens:
            self._restart()
        self._tokens += 1
        cache = {self._cache_name: self.cache}
        return self.model(self.token[:, None], use_cache=True, **cache).logits[:, -1]

    def _restart(self):
        """Restart from the prompt's cache, because windows and states cannot drop single tokens."""
        if self._prompt_cache is None:
            self.prefill()
            self._prompt_cache = self.cache
        self.cache, self._tokens = self._prompt_cache, 0
        # Decoding writes into states but replaces keys and values, so only states are copied.
        kept = [getattr(x, name, None) for x in self.cache.layers for name in ("keys", "values")]
        self.cache = copy.deepcopy(self.cache, {id(x): x for x in kept})

    @property
    def tensors(self) -> list[Tensor]:
        """The cache, the prompt and the last token."""
        found = () if self.cache is None else _tensors_of(self.cache)
        # Integer tensors, such as the size of a window, are not part of the state.
        return [*(x for x in found if x.is_floating_point()), self.prompt, self.token]


def _tensors_of(holder) -> Iterator[Tensor]:
    """Yield the tensors in the attributes of an object and of nested objects."""
    for leaf in tree_leaves(vars(holder)):
        if isinstance(leaf, Tensor):
            yield leaf
        elif hasattr(leaf, "__dict__") and not isinstance(leaf, type):
            yield from _tensors_of(leaf)


def _cache_name(model) -> str:
    """Return the name of a model's cache argument, or "" if the model cannot generate tokens."""
    takes = inspect.signature(model.forward).parameters
    generates = hasattr(model, "can_generate") and model.can_generate()
    if not generates or not {"use_cache", "logits_to_keep"} <= set(takes):
        return ""
    return next((name for name in _CACHES if name in takes), "")


def generation_of(
    model: nn.Module, prompt: Tensor, new_tokens: int, captured: bool = False
) -> Generation:
    """Return the `Generation` for a model, with a CUDA graph if `captured` is true.

    Raises:
        Unsupported: The model has no known cache, or a CUDA graph was requested and cannot read the
            cache.
    """
    static = (
        isinstance(model, Transformer)
        and model.config.attention_type == "dense"
        and model.config.attention_options.get("backend", "auto") == "auto"
    )
    if captured and not static:
        raise Unsupported(
            f"{type(model).__name__} cannot decode in a CUDA graph; use a preset with dense "
            "attention and backend auto, or remove cuda_graph from optimizations"
        )
    if all(hasattr(model, name) for name in ("new_cache", "prefill", "decode")):
        return (CapturedGeneration if captured else Generation)(model, prompt, new_tokens)
    if _cache_name(model):
        return HuggingFaceGeneration(model, prompt, new_tokens)
    raise Unsupported(
        f"{type(model).__name__} has neither the methods new_cache, prefill and decode nor a cache "
        "of the package transformers; to leave decoding out, set new_tokens: 0 in notebook model, "
        "or phases: [training_step] in notebook energy"
    )
