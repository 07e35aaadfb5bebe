"""What the two Transformer layers share: sub-layers around which a residual connection, dropout and a norm lie."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from unrolled.equations.activations import Kind
from unrolled.equations.dropout import Dropping
from unrolled.nn._forms import Batch
from unrolled.nn._hooks import hooked, plain
from unrolled.nn._masks import Masks, self_attention_masks
from unrolled.nn._tokens import Tokens, enter
from unrolled.nn.attention import Cache, MultiheadAttention
from unrolled.nn.basic import Dropout, Linear
from unrolled.nn.norms import LayerNorm, RMSNorm
from unrolled.ops.activation import activation as activate
from unrolled.ops.dropout import dropout
from unrolled.ops.feed_forward import feed_forward
from unrolled.ops.layer_norm import layer_norm
from unrolled.ops.residual_norm import residual_norm
from unrolled.ops.rms_norm import rms_norm
from unrolled.ragged import Lengths

Activation = Callable[[Tensor], Tensor]
SubLayer = Callable[[Tensor], Tensor]


def gelu_tanh(x: Tensor) -> Tensor:
    """torch.nn.functional.gelu with approximate="tanh"."""
    return F.gelu(x, approximate="tanh")


_FUNCTIONS: dict[str, Activation] = {"relu": F.relu, "gelu": F.gelu, "gelu_tanh": gelu_tanh, "silu": F.silu}
_KINDS: dict[Any, Kind] = {F.relu: "relu", torch.relu: "relu", F.gelu: "gelu", gelu_tanh: "gelu_tanh", F.silu: "silu"}
DROPOUT = (Dropout, nn.Dropout, nn.Identity)
LINEAR = (Linear, nn.Linear)
LAYER_NORM = (LayerNorm, nn.LayerNorm)
RMS_NORM = (RMSNorm, nn.RMSNorm)


def activation_function(activation: str | Activation) -> Activation:
    """Errors: ValueError for a name other than "relu", "gelu", "gelu_tanh", "silu"; TypeError for what is no name."""
    if callable(activation):
        return activation
    if not isinstance(activation, str):
        raise TypeError(f"activation must be a name or a function, found {activation!r}")
    if activation not in _FUNCTIONS:
        raise ValueError(f"activation must be one of {', '.join(_FUNCTIONS)} or a function, found {activation!r}")
    return _FUNCTIONS[activation]


def kind_of(activation: Activation) -> Kind | None:
    """What our operators call it; None for a function that they do not know."""
    if isinstance(activation, nn.Module):
        if hooked(activation):
            return None
        if type(activation) is nn.GELU:
            return "gelu_tanh" if activation.approximate == "tanh" else "gelu"
        return {nn.ReLU: "relu", nn.SiLU: "silu"}.get(type(activation))  # type: ignore[return-value]
    try:
        return _KINDS.get(activation)
    except TypeError:  # a callable without a hash
        return None


class Noise(NamedTuple):
    """The dropout of one call of a layer: one seed, and a number for each place in the layer."""

    seed: Tensor
    key: Tensor
    t: Tensor

    def at(self, layer: int, p: float) -> Dropping | None:
        return Dropping(p, self.seed, layer, self.key, self.t) if p > 0 else None


class Layer(nn.Module):
    """Sub-layer n has `norm{n}` and `dropout{n}` around it; `dropout` acts on the hidden units."""

    _parts: tuple[list[str], list[str]]  # the names of its dropouts and of its attentions
    self_attn: MultiheadAttention
    linear1: Linear
    linear2: Linear
    gate: Linear | None
    dropout: Dropout
    activation: Activation
    norm_first: bool

    def _add_feed_forward(self, d_model: int, units: int, dropout: float, bias: bool, gated: bool, new: Any) -> None:
        """In torch's order, which is that of the first values; the gate, which torch has not, comes last."""
        self.linear1 = Linear(d_model, units, bias=bias, **new)
        self.dropout = Dropout(dropout)
        self.linear2 = Linear(units, d_model, bias=bias, **new)
        self.gate = Linear(d_model, units, bias=bias, **new) if gated else None

    def _add_norms(self, count: int, d_model: int, eps: float, bias: bool, norm: str, dropout: float, new: Any) -> None:
        if norm not in ("layer", "rms"):
            raise ValueError(f'norm must be "layer" or "rms", found {norm!r}')
        for n in range(1, count + 1):
            own = LayerNorm(d_model, eps, bias=bias, **new) if norm == "layer" else RMSNorm(d_model, eps, **new)
            self.add_module(f"norm{n}", own)
        for n in range(1, count + 1):
            self.add_module(f"dropout{n}", Dropout(dropout))

    def _around(self, x: Tensor, sub_layers: list[SubLayer], noise: Noise | None, sites: list[int]) -> Tensor:
        """Each sub-layer with its residual connection, dropout (at its site) and norm, before or after."""
        count = len(sub_layers)
        norms = [getattr(self, f"norm{n + 1}") for n in range(count)]
        dropouts = [getattr(self, f"dropout{n + 1}") for n in range(count)]
        dropping = [self._dropping(noise, site, dropout) for site, dropout in zip(sites, dropouts, strict=True)]
        sub_layers = [_then(*pair) for pair in zip(sub_layers, dropouts, strict=True)]
        if not self.norm_first:
            for n, sub_layer in enumerate(sub_layers):
                _, x = add_and_norm(x, sub_layer(x), norms[n], dropping[n])
            return x
        y = normalise(x, norms[0])
        for n, sub_layer in enumerate(sub_layers[:-1]):
            x, y = add_and_norm(x, sub_layer(y), norms[n + 1], dropping[n])
        return add(x, sub_layers[-1](y), dropping[-1])

    def _feed_forward(self, x: Tensor, dropping: Dropping | None) -> Tensor:
        one, two, gate, kind = self.linear1, self.linear2, self.gate, kind_of(self.activation)
        linear = all(plain(part, LINEAR) for part in (one, two, gate) if part is not None)
        if kind is not None and linear and plain(self.dropout, DROPOUT):
            weight_gate, bias_gate = (None, None) if gate is None else (gate.weight, gate.bias)
            weights = one.weight, one.bias, two.weight, two.bias
            return feed_forward(x, *weights, kind, weight_gate, bias_gate, dropping)
        act: Activation = self.activation if kind is None else lambda a: activate(a, kind)
        h = act(one(x)) if gate is None else act(gate(x)) * one(x)
        h = _foreign(h, self.dropout)
        return two(h if dropping is None else drop(h, dropping))  # type: ignore[no-any-return]

    def _attend(
        self, x: Tokens, masks: Masks, noise: Noise | None, need_weights: bool, cache: Cache | None
    ) -> tuple[Tensor, Tensor | None]:
        attn = self.self_attn
        if cache is None and (type(attn) is not MultiheadAttention or hooked(attn)):
            whole = x.restore(x.values)
            o, weights = attn(*(whole, whole, whole), None, need_weights, masks, False, lengths=x.lengths, keys=x.keys)
            return x.back(o), weights
        return attn.attend(x, masks, self._weights_dropping(noise, 0, attn), need_weights, cache)

    def _noise(self, tokens: Tokens) -> Noise | None:
        """None where nothing is dropped: then nothing is drawn."""
        dropouts, attns = self._parts
        p = [rate(getattr(self, name)) for name in dropouts]
        p += [attn.dropout for attn in (getattr(self, name) for name in attns) if attn.training]
        if not any(p):
            return None
        place = tokens.place()
        return Noise(torch.randint(2**63 - 1, ()).to(place[1].device), *place)

    def _dropping(self, noise: Noise | None, site: int, dropout: nn.Module) -> Dropping | None:
        return None if noise is None else noise.at(site, rate(dropout))

    def _weights_dropping(self, noise: Noise | None, site: int, attn: MultiheadAttention) -> Dropping | None:
        return noise.at(site, attn.dropout) if noise is not None and attn.training else None


def enter_self(
    attn: MultiheadAttention,
    x: Batch,
    mask: Tensor | Masks | None,
    padding_mask: Tensor | None,
    causal: bool,
    lengths: Lengths | None,
    keys: Lengths | None,
) -> tuple[Tokens, Masks]:
    """The tokens of a batch that reads itself, and what they may attend to."""
    tokens = enter(x, attn.batch_first, attn.embed_dim, lengths, padding_mask).with_keys(keys)
    sizes = tokens.sequences, attn.num_heads, tokens.steps if mask is None else tokens.longest
    return tokens, self_attention_masks(mask, causal, tokens.keep, sizes, tokens.values.dtype)


def rate(module: nn.Module) -> float:
    """The probability with which our operators drop in its place: 0 for a module that is to be called."""
    return module.p if module.training and plain(module, DROPOUT[:2]) else 0.0  # type: ignore[return-value]


def _foreign(x: Tensor, dropout: nn.Module) -> Tensor:
    """What a dropout makes of rows that is not plainly one: one of another class, or with hooks."""
    return x if plain(dropout, DROPOUT) else dropout(x)


def _then(sub_layer: SubLayer, dropout: nn.Module) -> SubLayer:
    return lambda x: _foreign(sub_layer(x), dropout)


def drop(x: Tensor, dropping: Dropping) -> Tensor:
    return dropout(x, dropping.p, dropping.seed, dropping.layer, dropping.key, dropping.t)


def add(x: Tensor, s: Tensor, dropping: Dropping | None) -> Tensor:
    return x + (s if dropping is None else drop(s, dropping))


def add_and_norm(x: Tensor, s: Tensor, norm: nn.Module, dropping: Dropping | None) -> tuple[Tensor, Tensor]:
    """The sum, and its norm."""
    if plain(norm, LAYER_NORM):
        gain, bias, epsilon = norm.weight, norm.bias, norm.eps
        return residual_norm(x, s, gain, bias, kind="layer", epsilon=epsilon, dropping=dropping)  # type: ignore[arg-type]
    if plain(norm, RMS_NORM):
        return residual_norm(x, s, norm.weight, kind="rms", epsilon=norm.eps, dropping=dropping)  # type: ignore[arg-type]
    r = add(x, s, dropping)
    return r, norm(r)


def normalise(x: Tensor, norm: nn.Module) -> Tensor:
    if plain(norm, LAYER_NORM):
        return layer_norm(x, norm.weight, norm.bias, norm.eps)  # type: ignore[arg-type]
    if plain(norm, RMS_NORM):
        return rms_norm(x, norm.weight, norm.eps)  # type: ignore[arg-type]
    y: Tensor = norm(x)
    return y
