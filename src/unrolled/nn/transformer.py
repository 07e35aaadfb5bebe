"""The Transformer with torch.nn's arguments, parameters and results: its encoder, its decoder, the whole."""

from __future__ import annotations

from copy import deepcopy
from typing import Any, cast

import torch
from torch import Tensor, nn

from unrolled.nn._forms import Batch
from unrolled.nn._hooks import hooked
from unrolled.nn._layer import Activation, enter_self, normalise
from unrolled.nn._masks import Masks
from unrolled.nn._one_token import one_token
from unrolled.nn._tokens import Tokens, enter, padded_weights
from unrolled.nn.attention import MultiheadAttention
from unrolled.nn.decoding import State
from unrolled.nn.norms import LayerNorm, RMSNorm
from unrolled.nn.transformer_layers import TransformerDecoderLayer, TransformerEncoderLayer
from unrolled.ragged import Lengths


class TransformerEncoder(nn.Module):
    """torch.nn.TransformerEncoder of our layers: `num_layers` copies of `encoder_layer`, with the same first values.

    Arguments, parameter names, `state_dict` and results are torch's. `enable_nested_tensor` and `mask_check` choose a
    code path in torch; here there is one. What differs from torch, on purpose: the output keeps its length and is 0
    where there is no token; a mask, a float padding mask too, is heeded in training, evaluation and no_grad alike;
    `is_causal` is a command.
    Errors: TypeError for another layer than ours; ValueError for fewer than one.
    """

    def __init__(
        self,
        encoder_layer: TransformerEncoderLayer,
        num_layers: int,
        norm: nn.Module | None = None,
        enable_nested_tensor: bool = True,
        mask_check: bool = True,
    ) -> None:
        super().__init__()
        self.layers = _copies(encoder_layer, num_layers, TransformerEncoderLayer)
        self.num_layers = num_layers
        self.norm = _norm(norm)
        self.enable_nested_tensor, self.mask_check = enable_nested_tensor, mask_check

    def forward(
        self,
        src: Batch,
        mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool | None = None,
        *,
        causal: bool = False,
        lengths: Lengths | None = None,
        keys: Lengths | None = None,
        return_attention: bool = False,
    ) -> Any:
        """The last layer's values, in the form of `src`; with `return_attention` the weights of each layer too.

        Shapes: src (T, B, D), with `batch_first` (B, T, D); (T, D) for one sequence; a PackedSequence; a jagged nested
        tensor (B, *, D); a Ragged of (N, D). mask (T, T) or (B * A, T, T), src_key_padding_mask (B, T), True = may not
        attend, or numbers that are added to the scores: a padding mask's -inf says what True says. `lengths` (B,) of a
        padded batch in the place of a padding mask. `causal` and `is_causal`, which mean the same: no token sees a
        later one, whatever the mask. `keys` (B,): whole numbers in the place of a sequence's index in dropout.
        The weights: a tuple of (B, A, T, T), without B for one sequence, 0 beyond the lengths; those applied, after
        dropout.
        Edges: rows that are no token are not read and come out as 0; a length of 0 is legal.
        Errors: ValueError for shapes that do not fit; TypeError for a mask of another dtype.
        """
        x, masks = enter_self(
            *(_first(self).self_attn, src, mask, src_key_padding_mask, causal or bool(is_causal), lengths, keys)
        )
        y, weights = self.run(x, masks, return_attention)
        return (x.restore(y), tuple(padded_weights(w, x, x) for w in weights)) if return_attention else x.restore(y)

    def run(self, x: Tokens, masks: Masks, need_weights: bool = False) -> tuple[Tensor, list[Tensor]]:
        """On rows."""
        weights = []
        for layer in self.layers:
            if type(layer) is TransformerEncoderLayer and not hooked(layer):
                y, own = layer.run(x, masks, need_weights)
            else:
                given: Any = {"lengths": x.lengths, "keys": x.keys, "return_attention": need_weights}
                found = layer(x.restore(x.values), masks, **given)
                y, own = (x.back(found[0]), found[1]) if need_weights else (x.back(found), None)
            x = x._replace(values=y)
            weights.append(own)
        return _normalised(x.values, self.norm), cast(list[Tensor], weights)

    def begin(self, sequences: int = 1, *, capacity: int = 64) -> State:
        """An empty state, for `step`: this encoder as a decoder-only model. It grows beyond `capacity` by itself."""
        first = _cached(self.layers)
        return State(sequences, len(self.layers), first.in_proj_weight, first.embed_dim, capacity)

    @torch.no_grad()
    def step(self, src: Batch, state: State, lengths: Lengths | None = None, *, keys: Lengths | None = None) -> Any:
        """The next tokens of each sequence, any number of them; each sees all that came before and itself.

        Shapes: as in `forward`, of the new tokens alone. Their outputs are those that `forward` with `causal` gives to
        all tokens at once, without a gradient. No hook of a layer is called.
        Errors: ValueError for another number of sequences than the state holds.
        """
        return _step(self, src, state, lengths, keys, 0)


class TransformerDecoder(nn.Module):
    """torch.nn.TransformerDecoder of our layers; what `TransformerEncoder` says holds here too."""

    def __init__(self, decoder_layer: TransformerDecoderLayer, num_layers: int, norm: nn.Module | None = None) -> None:
        super().__init__()
        self.layers = _copies(decoder_layer, num_layers, TransformerDecoderLayer)
        self.num_layers = num_layers
        self.norm = _norm(norm)

    def forward(
        self,
        tgt: Batch,
        memory: Batch,
        tgt_mask: Tensor | None = None,
        memory_mask: Tensor | None = None,
        tgt_key_padding_mask: Tensor | None = None,
        memory_key_padding_mask: Tensor | None = None,
        tgt_is_causal: bool | None = None,
        memory_is_causal: bool = False,
        *,
        causal: bool = False,
        lengths: Lengths | None = None,
        memory_lengths: Lengths | None = None,
        keys: Lengths | None = None,
        return_attention: bool = False,
    ) -> Any:
        """The last layer's values, in the form of `tgt`; with `return_attention` the weights of each layer too, those
        of the self-attention (B, A, T, T) and those over the memory (B, A, T, S), as two tuples.

        Shapes: tgt and memory as `src` in `TransformerEncoder`, each in a form of its own; the masks likewise, those of
        the memory (T, S) and (B, S). `memory_lengths` (B,) of a padded memory. `causal` and `tgt_is_causal` mean the
        same; `memory_is_causal`: token i of T sees the memory up to i + S - T.
        Edges, Errors: as there. A token that may attend to nothing of a memory of length 0 reads 0.
        """
        own, over = _first(self).self_attn, _first(self).multihead_attn
        causal = causal or bool(tgt_is_causal)
        x, masks = enter_self(own, tgt, tgt_mask, tgt_key_padding_mask, causal, lengths, keys)
        m = enter(memory, over.batch_first, over.kdim, memory_lengths, memory_key_padding_mask)
        y, weights = self.run(x, m, masks, over.masks_over(x, m, memory_mask, memory_is_causal), return_attention)
        if not return_attention:
            return x.restore(y)
        pairs = [(padded_weights(w, x, x), padded_weights(v, x, m)) for w, v in weights]
        return x.restore(y), *zip(*pairs, strict=True)

    def run(
        self, x: Tokens, memory: Tokens, masks: Masks, memory_masks: Masks, need_weights: bool = False
    ) -> tuple[Tensor, list[Any]]:
        """On rows."""
        weights = []
        for layer in self.layers:
            if type(layer) is TransformerDecoderLayer and not hooked(layer):
                y, own = layer.run(x, memory, masks, memory_masks, need_weights)
            else:
                given: Any = {"lengths": x.lengths, "memory_lengths": memory.lengths, "keys": x.keys}
                whole = x.restore(x.values), memory.restore(memory.values)
                found = layer(*whole, masks, memory_masks, **given, return_attention=need_weights)
                y, own = (x.back(found[0]), found[1:]) if need_weights else (x.back(found), [])
            x = x._replace(values=y)
            weights.append(own)
        return _normalised(x.values, self.norm), weights

    @torch.no_grad()
    def begin(
        self,
        memory: Batch,
        memory_key_padding_mask: Tensor | None = None,
        *,
        memory_lengths: Lengths | None = None,
        capacity: int = 64,
    ) -> State:
        """A state for `step`, with each layer's keys and values of the memory. It grows beyond `capacity` by itself."""
        first = _first(self).multihead_attn
        m = enter(memory, first.batch_first, first.kdim, memory_lengths, memory_key_padding_mask)
        own = _cached(self.layers)
        like, width = own.in_proj_weight, own.embed_dim
        read = [cast(TransformerDecoderLayer, layer).multihead_attn.memory(m) for layer in self.layers]
        return State(m.sequences, len(read), like, width, capacity, read, Masks(False, m.keep))

    @torch.no_grad()
    def step(self, tgt: Batch, state: State, lengths: Lengths | None = None, *, keys: Lengths | None = None) -> Any:
        """The next tokens of each sequence, as in `TransformerEncoder.step`; each sees all of the memory."""
        return _step(self, tgt, state, lengths, keys, len(self.layers))


class Transformer(nn.Module):
    """torch.nn.Transformer of our encoder and decoder; the options are those of `TransformerEncoderLayer`.

    What differs from torch, on purpose: without a mask or lengths of its own the memory is padded as the source is.
    A `custom_encoder` or `custom_decoder` that is not ours is called as torch calls it.
    """

    def __init__(
        self,
        d_model: int = 512,
        nhead: int = 8,
        num_encoder_layers: int = 6,
        num_decoder_layers: int = 6,
        dim_feedforward: int = 2048,
        dropout: float = 0.1,
        activation: str | Activation = nn.functional.relu,
        custom_encoder: Any | None = None,
        custom_decoder: Any | None = None,
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
        arguments = d_model, nhead, dim_feedforward, dropout, activation, layer_norm_eps, batch_first, norm_first, bias
        options: Any = {"gated": gated, "norm": norm, "positions": positions, **new}

        def last() -> nn.Module:
            if norm == "rms":
                return RMSNorm(d_model, layer_norm_eps, **new)
            return LayerNorm(d_model, layer_norm_eps, bias=bias, **new)

        self.encoder: Any = custom_encoder
        if custom_encoder is None:
            layer = TransformerEncoderLayer(*arguments, **options)
            self.encoder = TransformerEncoder(layer, num_encoder_layers, last())
        self.decoder: Any = custom_decoder
        if custom_decoder is None:
            own = TransformerDecoderLayer(*arguments, **options)
            self.decoder = TransformerDecoder(own, num_decoder_layers, last())
        self._reset_parameters()
        self.d_model, self.nhead, self.batch_first = d_model, nhead, batch_first

    def _reset_parameters(self) -> None:
        """Xavier's uniform distribution for every matrix, in torch's order."""
        for p in self.parameters():
            if p.dim() > 1:
                nn.init.xavier_uniform_(p)

    @staticmethod
    def generate_square_subsequent_mask(
        sz: int, device: torch.device | None = None, dtype: torch.dtype | None = None
    ) -> Tensor:
        """torch's mask (sz, sz): -inf for all later positions, else 0. With `causal=True` there is no need of one."""
        return nn.Transformer.generate_square_subsequent_mask(sz, device=device, dtype=dtype)

    def forward(
        self,
        src: Batch,
        tgt: Batch,
        src_mask: Tensor | None = None,
        tgt_mask: Tensor | None = None,
        memory_mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        tgt_key_padding_mask: Tensor | None = None,
        memory_key_padding_mask: Tensor | None = None,
        src_is_causal: bool | None = None,
        tgt_is_causal: bool | None = None,
        memory_is_causal: bool = False,
        *,
        causal: bool = False,
        src_lengths: Lengths | None = None,
        lengths: Lengths | None = None,
        keys: Lengths | None = None,
        return_attention: bool = False,
    ) -> Any:
        """What the decoder makes of `tgt`, in its form; with `return_attention` the weights of the encoder, of the
        decoder and of the decoder over the memory too, as three tuples.

        Shapes, masks: as in `TransformerEncoder` and `TransformerDecoder`. `lengths` of a padded tgt, `src_lengths` of
        a padded src. `causal` and `tgt_is_causal` mean the same.
        Errors: as there.
        """
        more: dict[str, Any] = {"keys": keys, "return_attention": return_attention}
        own, over = {"lengths": src_lengths, **more}, {"lengths": lengths, **more}
        ours = type(self.encoder) is TransformerEncoder and type(self.decoder) is TransformerDecoder
        if not ours:
            if src_lengths is not None or lengths is not None or keys is not None or return_attention:
                raise ValueError(
                    "src_lengths, lengths, keys and return_attention want an encoder and a decoder of ours"
                )
            own, over = {}, {}
        elif memory_key_padding_mask is None:
            memory_key_padding_mask, over["memory_lengths"] = src_key_padding_mask, src_lengths
        found = self.encoder(src, src_mask, src_key_padding_mask, src_is_causal, **own)
        memory, *weights = found if return_attention else (found,)
        masks = tgt_mask, memory_mask, tgt_key_padding_mask, memory_key_padding_mask
        found = self.decoder(tgt, memory, *masks, causal or bool(tgt_is_causal), memory_is_causal, **over)
        return (found[0], *weights, *found[1:]) if return_attention else found

    @torch.no_grad()
    def begin(
        self,
        src: Batch,
        src_mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        src_is_causal: bool | None = None,
        *,
        src_lengths: Lengths | None = None,
        capacity: int = 64,
    ) -> State:
        """A state for `step`: the source, read by the encoder, and no token of the target yet."""
        memory = self.encoder(src, src_mask, src_key_padding_mask, src_is_causal, lengths=src_lengths)
        options: Any = {"memory_lengths": src_lengths, "capacity": capacity}
        return self.decoder.begin(memory, src_key_padding_mask, **options)  # type: ignore[no-any-return]

    def step(self, tgt: Batch, state: State, lengths: Lengths | None = None, *, keys: Lengths | None = None) -> Any:
        """The next tokens of each target, as in `TransformerDecoder.step`."""
        return self.decoder.step(tgt, state, lengths, keys=keys)


def _copies(layer: nn.Module, count: int, kind: type[nn.Module]) -> nn.ModuleList:
    if not isinstance(layer, kind):
        raise TypeError(f"expected a layer of unrolled.nn.{kind.__name__}, found {type(layer).__name__}")
    if count < 1:
        raise ValueError(f"num_layers must be at least 1, found {count}")
    return nn.ModuleList([deepcopy(layer) for _ in range(count)])


def _step(model: Any, x: Batch, state: State, lengths: Lengths | None, keys: Lengths | None, memories: int) -> Any:
    batch_first = _first(model).self_attn.batch_first
    if lengths is None and keys is None and (y := one_token(model, x, state, batch_first)) is not None:
        return y
    tokens, caches, masks = state.enter(x, lengths, keys, batch_first, len(model.layers), memories)
    for n, (layer, cache) in enumerate(zip(model.layers, caches, strict=True)):
        read = (state.memory[n], masks, state.memory_masks) if memories else (masks,)
        y, _ = layer.run(tokens, *read, False, cache)
        tokens = tokens._replace(values=y)
    state.advance(tokens.rows.length)
    return tokens.restore(_normalised(tokens.values, model.norm))


def _first(module: Any) -> Any:
    return module.layers[0]


def _cached(layers: Any) -> MultiheadAttention:
    """The first self-attention, of layers that can all keep what came before."""
    for layer in layers:
        layer.self_attn.check_cached()
    return layers[0].self_attn  # type: ignore[no-any-return]


def _norm(norm: Any) -> Any:
    if norm is not None and not callable(norm):
        raise TypeError(f"norm must be a module or None, found {norm!r}")
    return norm


def _normalised(x: Tensor, norm: nn.Module | None) -> Tensor:
    return x if norm is None else normalise(x, norm)
