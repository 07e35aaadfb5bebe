"""The layers of the Transformer with torch.nn's arguments, parameters and results."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from unrolled.nn._forms import Batch
from unrolled.nn._hooks import hooked
from unrolled.nn._layer import Activation, Layer, Noise, activation_function, enter_self
from unrolled.nn._masks import Masks
from unrolled.nn._tokens import Tokens, enter, padded_weights
from unrolled.nn.attention import Cache, Memory, MultiheadAttention
from unrolled.ragged import Lengths


class TransformerEncoderLayer(Layer):
    """torch.nn.TransformerEncoderLayer with the gradient in closed form, for sequences of any lengths, 0 included.

    Arguments, parameter names, initial values, `state_dict` and results are torch's. Keyword only:

    - `gated`: half of the hidden units multiply the others, `activation(gate(x)) * linear1(x)`; a parameter `gate`.
      Shazeer 2020.
    - `norm`: "layer", or "rms" without mean and bias. Zhang 2019.
    - `positions`: "rotary" (Su 2021), "alibi" (Press 2021), None; of the self-attention.
    - `activation` may be "gelu_tanh" and "silu" too.

    Source: `equations.attention`, `equations.residual_norm`, `equations.feed_forward`. half and bfloat16 are computed
    as such; under autocast the arithmetic is float32. Training, evaluation and no_grad do the same arithmetic.
    A Linear, a norm or a dropout of another class than torch's or ours, or with hooks, is called with the rows of the
    tokens, (N, D).
    Errors: ValueError for an argument outside what is said here.
    """

    _parts = (["dropout", "dropout1", "dropout2"], ["self_attn"])

    def __init__(
        self,
        d_model: int,
        nhead: int,
        dim_feedforward: int = 2048,
        dropout: float = 0.1,
        activation: str | Activation = nn.functional.relu,
        layer_norm_eps: float = 1e-5,
        batch_first: bool = False,
        norm_first: bool = False,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        gated: bool = False,
        norm: str = "layer",
        positions: str | None = None,
    ) -> None:
        super().__init__()
        new: Any = {"device": device, "dtype": dtype}
        self.self_attn = MultiheadAttention(
            d_model, nhead, dropout, bias, batch_first=batch_first, positions=positions, **new
        )
        self._add_feed_forward(d_model, dim_feedforward, dropout, bias, gated, new)
        self.norm_first = norm_first
        self._add_norms(2, d_model, layer_norm_eps, bias, norm, dropout, new)
        self.activation = activation_function(activation)

    def forward(
        self,
        src: Batch,
        src_mask: Tensor | Masks | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool = False,
        *,
        causal: bool = False,
        lengths: Lengths | None = None,
        keys: Lengths | None = None,
        return_attention: bool = False,
    ) -> Any:
        """The layer's values, in the form of `src`; with `return_attention` the weights (B, A, T, T) too.

        Shapes, masks, `causal`, `lengths`, `keys`: as in `TransformerEncoder`.
        """
        x, masks = enter_self(self.self_attn, src, src_mask, src_key_padding_mask, causal or is_causal, lengths, keys)
        y, weights = self.run(x, masks, return_attention)
        return (x.restore(y), padded_weights(weights, x, x)) if weights is not None else x.restore(y)

    def run(
        self, x: Tokens, masks: Masks, need_weights: bool = False, cache: Cache | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """On rows."""
        heads, noise = self.self_attn.num_heads, self._noise(x)
        weights = None

        def attend(y: Tensor) -> Tensor:
            nonlocal weights
            s, weights = self._attend(x._replace(values=y), masks, noise, need_weights, cache)
            return s

        def feed_forward(y: Tensor) -> Tensor:
            return self._feed_forward(y, self._dropping(noise, heads + 1, self.dropout))

        y = self._around(x.values, [attend, feed_forward], noise, [heads, heads + 2])
        return y, weights


class TransformerDecoderLayer(Layer):
    """torch.nn.TransformerDecoderLayer likewise; the options are those of `TransformerEncoderLayer`."""

    _parts = (["dropout", "dropout1", "dropout2", "dropout3"], ["self_attn", "multihead_attn"])

    def __init__(
        self,
        d_model: int,
        nhead: int,
        dim_feedforward: int = 2048,
        dropout: float = 0.1,
        activation: str | Activation = nn.functional.relu,
        layer_norm_eps: float = 1e-5,
        batch_first: bool = False,
        norm_first: bool = False,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        gated: bool = False,
        norm: str = "layer",
        positions: str | None = None,
    ) -> None:
        super().__init__()
        new: Any = {"device": device, "dtype": dtype}
        attention: Any = {"dropout": dropout, "bias": bias, "batch_first": batch_first, **new}
        self.self_attn = MultiheadAttention(d_model, nhead, positions=positions, **attention)
        self.multihead_attn = MultiheadAttention(d_model, nhead, **attention)
        self._add_feed_forward(d_model, dim_feedforward, dropout, bias, gated, new)
        self.norm_first = norm_first
        self._add_norms(3, d_model, layer_norm_eps, bias, norm, dropout, new)
        self.activation = activation_function(activation)

    def forward(
        self,
        tgt: Batch,
        memory: Batch,
        tgt_mask: Tensor | Masks | None = None,
        memory_mask: Tensor | Masks | None = None,
        tgt_key_padding_mask: Tensor | None = None,
        memory_key_padding_mask: Tensor | None = None,
        tgt_is_causal: bool = False,
        memory_is_causal: bool = False,
        *,
        causal: bool = False,
        lengths: Lengths | None = None,
        memory_lengths: Lengths | None = None,
        keys: Lengths | None = None,
        return_attention: bool = False,
    ) -> Any:
        """The layer's values, in the form of `tgt`; with `return_attention` the weights of self-attention
        (B, A, T, T) and those over the memory (B, A, T, S) too.

        Shapes, masks, `causal`, lengths, `keys`: as in `TransformerDecoder`.
        """
        own, over = self.self_attn, self.multihead_attn
        causal = causal or tgt_is_causal
        x, masks = enter_self(own, tgt, tgt_mask, tgt_key_padding_mask, causal, lengths, keys)
        m = enter(memory, over.batch_first, over.kdim, memory_lengths, memory_key_padding_mask)
        y, weights = self.run(x, m, masks, over.masks_over(x, m, memory_mask, memory_is_causal), return_attention)
        if not return_attention:
            return x.restore(y)
        return x.restore(y), padded_weights(weights[0], x, x), padded_weights(weights[1], x, m)

    def run(
        self,
        x: Tokens,
        memory: Tokens | Memory,
        masks: Masks,
        memory_masks: Masks,
        need_weights: bool = False,
        cache: Cache | None = None,
    ) -> tuple[Tensor, list[Any]]:
        """On rows."""
        heads, noise = self.self_attn.num_heads, self._noise(x)
        weights: list[Any] = [None, None]

        def attend(y: Tensor) -> Tensor:
            s, weights[0] = self._attend(x._replace(values=y), masks, noise, need_weights, cache)
            return s

        def read(y: Tensor) -> Tensor:
            s, weights[1] = self._read(x._replace(values=y), memory, memory_masks, noise, need_weights)
            return s

        def feed_forward(y: Tensor) -> Tensor:
            return self._feed_forward(y, self._dropping(noise, 2 * heads + 2, self.dropout))

        sites = [heads, 2 * heads + 1, 2 * heads + 3]
        y = self._around(x.values, [attend, read, feed_forward], noise, sites)
        return y, weights

    def _read(
        self, x: Tokens, memory: Tokens | Memory, masks: Masks, noise: Noise | None, need_weights: bool
    ) -> tuple[Tensor, Tensor | None]:
        attn = self.multihead_attn
        if isinstance(memory, Tokens) and (type(attn) is not MultiheadAttention or hooked(attn)):
            whole = memory.restore(memory.values)
            more: Any = {"lengths": x.lengths, "key_lengths": memory.lengths, "keys": x.keys}
            o, weights = attn(x.restore(x.values), whole, whole, None, need_weights, masks, False, **more)
            return x.back(o), weights
        given = attn.memory(memory) if isinstance(memory, Tokens) else memory
        return attn.read(x, given, masks, self._weights_dropping(noise, attn.num_heads + 1, attn), need_weights)
