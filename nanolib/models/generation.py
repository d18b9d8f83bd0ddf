"""Generate token by token over a KV cache that goes back to the prompt, for models of any source."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from nanolib.measurement import Unsupported
from nanolib.models import optimize
from nanolib.models.cache import StaticCache
from nanolib.models.transformer import Transformer

WITHOUT_DECODING = "new_tokens: 0 in model, phases: [training_step] in energy"


class Generation:
    """A prompt, and the cache of a model that continues it.

    Args:
        model: Has `new_cache`, `prefill` and `decode`, as `Transformer`.
        prompt: int64 ids, shape [batch, length].
        new_tokens: Number of tokens after which the cache goes back to the end of the prompt.
    """

    def __init__(self, model: Any, prompt: Tensor, new_tokens: int) -> None:
        self.model, self.prompt, self.new_tokens = model, prompt, new_tokens
        self.cache = model.new_cache(*prompt.shape, new_tokens)
        self.token = prompt[:, -1]
        self._start = 0

    @torch.inference_mode()
    def prefill(self) -> None:
        """Read the prompt from the beginning, and choose the first token."""
        self.cache.length = 0
        self.token = self.model.prefill(self.prompt, self.cache).argmax(dim=-1)
        self._start = self.cache.length

    @torch.inference_mode()
    def decode(self) -> None:
        """Read the last token and choose the next."""
        if self.cache.length == self._start + self.new_tokens:
            self.cache.length = self._start
        self.token = self.model.decode(self.token, self.cache).argmax(dim=-1)

    def all_tokens(self) -> None:
        """Read the prompt, and choose all tokens after it.

        A library may plan its kernel for each new length of the cache: on an H200 a token at a new
        length took 83 ms, with the GPU at idle power.
        """
        self.prefill()
        for _ in range(self.new_tokens):
            self.decode()

    def forget(self) -> None:
        """Empty the cache, as before the first prompt."""
        self.cache.length = 0

    @property
    def tensors(self) -> list[Tensor]:
        """The cache's buffers, the prompt and the last token."""
        return [*self.cache.tensors, self.prompt, self.token]


class CapturedGeneration(Generation):
    """Generation with dense attention, whose tokens replay one CUDA graph, captured at the first token.

    The graph reads the whole cache under a mask of the position, which is a tensor.
    """

    def __init__(self, model: Any, prompt: Tensor, new_tokens: int) -> None:
        super().__init__(model, prompt, new_tokens)
        self.token = self.token.clone()  # the graph reads and writes it in place
        self._static = StaticCache(self.cache)
        self._graph: torch.cuda.CUDAGraph | None = None

    @torch.no_grad()
    def prefill(self) -> None:
        """Read the prompt from the beginning and choose the first token."""
        token = self.token
        super().prefill()
        self.token = token.copy_(self.token)

    @torch.no_grad()
    def decode(self) -> None:
        """Read the last token and choose the next."""
        if self.cache.length == self._start + self.new_tokens:
            self.cache.length = self._start
        self._static.start.fill_(self.cache.length)
        if self._graph is None:
            token = self.token.clone()
            self._graph, _ = optimize.captured(self._step)
            self.token.copy_(token)  # warm-up calls have replaced it
        self._graph.replay()
        self.cache.length += 1

    def _step(self) -> Tensor:
        return self.token.copy_(self.model.decode(self.token, self._static).argmax(dim=-1))


class HuggingFaceGeneration(Generation):
    """Generation of a model of transformers, whose cache grows."""

    def __init__(self, model: nn.Module, prompt: Tensor, new_tokens: int) -> None:
        self.model, self.prompt, self.new_tokens = model, prompt, new_tokens
        self.token, self.cache = prompt[:, -1], None

    @torch.inference_mode()
    def prefill(self) -> None:
        """Read the prompt from the beginning and choose the first token."""
        self.forget()
        out = self.model(self.prompt, use_cache=True, logits_to_keep=1)
        self.cache, self.token = out.past_key_values, out.logits[:, -1].argmax(dim=-1)
        for layer in self.cache.layers:
            # going back to the prompt needs the keys that have left the window
            if getattr(layer, "is_sliding", False) and getattr(layer, "is_croppable", False):
                layer.activate_past_recording()

    def forget(self) -> None:
        """Drop the cache, before the model makes another one."""
        self.cache = None

    @torch.inference_mode()
    def decode(self) -> None:
        """Read the last token and choose the next."""
        if self.cache.get_seq_length() == self.prompt.shape[1] + self.new_tokens:
            try:
                self.cache.crop(-self.new_tokens)
            except RuntimeError:
                raise Unsupported(
                    f"the cache of {type(self.model).__name__} cannot go back to the prompt; leave decoding out: {WITHOUT_DECODING}"
                ) from None
        out = self.model(self.token[:, None], past_key_values=self.cache, use_cache=True)
        self.token = out.logits[:, -1].argmax(dim=-1)

    @property
    def tensors(self) -> list[Tensor]:
        """The cache, the prompt and the last token."""
        # keys, values and the states of other layers, but not whole numbers such as a window's size
        kept = tree_leaves([vars(layer) for layer in self.cache.layers]) if self.cache else []
        cached = [x for x in kept if isinstance(x, Tensor) and x.is_floating_point()]
        return [*cached, self.prompt, self.token]


def _generates(model: Any) -> bool:
    """Return whether a model of transformers generates over a cache that it takes and returns."""
    takes = inspect.signature(model.forward).parameters
    if not {"past_key_values", "use_cache", "logits_to_keep"} <= {*takes}:
        return False
    return hasattr(model, "can_generate") and model.can_generate()


def _has_static_step(model: nn.Module) -> bool:
    """Return whether a token's step can read a `StaticCache`."""
    if not isinstance(model, Transformer) or model.config.attention_type != "dense":
        return False
    return model.config.attention_options.get("backend", "auto") == "auto"


def generation_of(
    model: nn.Module, prompt: Tensor, new_tokens: int, captured: bool = False
) -> Generation:
    """Return the generation for a model. If `captured`, in a CUDA graph.

    Raises:
        Unsupported: The model has no known cache, or no graph can read it.
    """
    if captured and not _has_static_step(model):
        raise Unsupported(
            f"a CUDA graph decodes presets with dense attention and backend auto; {type(model).__name__} is another model, "
            "or has another attention"
        )
    if all(hasattr(model, name) for name in ("new_cache", "prefill", "decode")):
        return (CapturedGeneration if captured else Generation)(model, prompt, new_tokens)
    if hasattr(getattr(model, "config", None), "use_cache") and _generates(model):
        return HuggingFaceGeneration(model, prompt, new_tokens)
    raise Unsupported(
        f"{type(model).__name__} has neither new_cache, prefill and decode nor the cache of transformers; "
        f"leave decoding out: {WITHOUT_DECODING}"
    )
