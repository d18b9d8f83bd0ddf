"""Token by token over a KV cache that is started over and over, for models of any source."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from nanolib.measurement import Unsupported
from nanolib.models import optimize
from nanolib.models.cache import StaticCache
from nanolib.models.transformer import Transformer

WITHOUT_DECODING = "new_tokens: 0 in model, phases: [training_step] in energy"


class Generation:
    """A prompt, and the cache of a model that goes on from it.

    Args:
        model: Has `new_cache`, `prefill` and `decode` as `Transformer` has them.
        prompt: int64 ids, shape [batch, length].
        new_tokens: After so many the cache is taken back to the end of the prompt.
    """

    def __init__(self, model: Any, prompt: torch.Tensor, new_tokens: int) -> None:
        self.model, self.prompt, self.new_tokens = model, prompt, new_tokens
        self.cache = model.new_cache(*prompt.shape, new_tokens)
        self.token = prompt[:, -1]
        self._start = 0

    @torch.inference_mode()
    def prefill(self) -> None:
        """Read the prompt from the beginning and choose the first token."""
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
        """Read the prompt and choose all tokens after it.

        A library may plan its kernel anew for each length of the cache: on an H200 a token took 83 ms, with the GPU at idle power,
        as long as every length was new.
        """
        self.prefill()
        for _ in range(self.new_tokens):
            self.decode()

    def forget(self) -> None:
        """Hold nothing of a prompt, as before the first one."""
        self.cache.length = 0

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The cache's buffers, the prompt and the last token."""
        return [*self.cache.tensors, self.prompt, self.token]


class CapturedGeneration(Generation):
    """The same with dense attention, each decoded token a replay of one CUDA graph, captured at the first of them.

    The graph reads the cache in whole, masked by the position, which a tensor holds.
    """

    def __init__(self, model: Any, prompt: torch.Tensor, new_tokens: int) -> None:
        super().__init__(model, prompt, new_tokens)
        self.token = self.token.clone()  # which the graph reads and writes in place
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
            self.token.copy_(token)  # warming up has gone on from what it chose itself
        self._graph.replay()
        self.cache.length += 1

    def _step(self) -> torch.Tensor:
        return self.token.copy_(self.model.decode(self.token, self._static).argmax(dim=-1))


class HuggingFaceGeneration(Generation):
    """The same for a model of transformers, whose cache grows."""

    def __init__(self, model: nn.Module, prompt: torch.Tensor, new_tokens: int) -> None:
        self.model, self.prompt, self.new_tokens = model, prompt, new_tokens
        self.token, self.cache = prompt[:, -1], None

    @torch.inference_mode()
    def prefill(self) -> None:
        """Read the prompt from the beginning and choose the first token."""
        self.forget()
        out = self.model(self.prompt, use_cache=True, logits_to_keep=1)
        self.cache, self.token = out.past_key_values, out.logits[:, -1].argmax(dim=-1)
        for layer in self.cache.layers:
            # a window's keys can be taken back to the prompt only where those that have left it are still there
            if getattr(layer, "is_sliding", False) and getattr(layer, "is_croppable", False):
                layer.activate_past_recording()

    def forget(self) -> None:
        """Drop the cache, before another is made beside it."""
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
    def tensors(self) -> list[torch.Tensor]:
        """The cache, the prompt and the last token."""
        # keys and values of attention, states of other layers; not whole numbers such as a window's size
        kept = tree_leaves([vars(layer) for layer in self.cache.layers]) if self.cache else []
        cached = [x for x in kept if isinstance(x, torch.Tensor) and x.is_floating_point()]
        return [*cached, self.prompt, self.token]


def _generates(model: Any) -> bool:
    """Whether a model of transformers generates, over a cache that it takes and gives back."""
    takes = inspect.signature(model.forward).parameters
    return (
        hasattr(model, "can_generate")
        and model.can_generate()
        and all(name in takes for name in ("past_key_values", "use_cache", "logits_to_keep"))
    )


def _has_static_step(model: nn.Module) -> bool:
    """Whether a token's step of the model can read a `StaticCache`."""
    if not isinstance(model, Transformer):
        return False
    config = model.config
    return (
        config.attention_type == "dense"
        and config.attention_options.get("backend", "auto") == "auto"
    )


def generation_of(
    model: nn.Module, prompt: torch.Tensor, new_tokens: int, captured: bool = False
) -> Generation:
    """The generation that fits a model; `captured` in a CUDA graph.

    Raises:
        Unsupported: The model has no cache that is known here, or no graph can read it.
    """
    if captured and not _has_static_step(model):
        raise Unsupported(
            f"a CUDA graph decodes presets with dense attention and backend auto; {type(model).__name__} is another model, "
            "or attends otherwise"
        )
    if all(hasattr(model, name) for name in ("new_cache", "prefill", "decode")):
        return (CapturedGeneration if captured else Generation)(model, prompt, new_tokens)
    if hasattr(getattr(model, "config", None), "use_cache") and _generates(model):
        return HuggingFaceGeneration(model, prompt, new_tokens)
    raise Unsupported(
        f"{type(model).__name__} has neither new_cache, prefill and decode nor the cache of transformers; "
        f"measure what it can do: {WITHOUT_DECODING}"
    )
