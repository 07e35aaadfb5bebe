"""One token of each sequence, in evaluation, through layers whose parts are all plain: the core's calls in a row.

For so few rows the way to the core (checks, the dispatcher, new tensors, views) costs as much as the core. Here the
views of the weights and the arrays that the calls write are made once. The numbers are those of the layers' own calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from unrolled.equations.positions import frequencies
from unrolled.nn._hooks import hooked, plain
from unrolled.nn._layer import DROPOUT, LAYER_NORM, LINEAR, RMS_NORM, kind_of
from unrolled.nn.attention import MultiheadAttention
from unrolled.nn.transformer_layers import TransformerDecoderLayer, TransformerEncoderLayer
from unrolled.ops._backend import core, equations_only
from unrolled.ragged import readable

if TYPE_CHECKING:
    from unrolled.nn.decoding import State

Array = Any  # numpy's, (B, D) unless something else is said
SubLayer = Callable[[Array], Array]


class Others(Exception):
    """Something here is to be called, or lies where the core cannot read it."""


class _Linear(NamedTuple):
    weight: Array  # (O, I)
    bias: Array | None  # (O,)


class _Norm(NamedTuple):
    gain: Array | None
    bias: Array | None
    centred: bool
    epsilon: float


class _Attention(NamedTuple):
    q: _Linear
    kv: _Linear | None  # None: of a memory, whose keys and values are there
    out: _Linear
    heads: int
    scale: float
    frequency: Array | None  # of rotary positions
    slopes: Array | None  # of ALiBi
    log_sum: Array  # (B, A)


class _New(NamedTuple):
    """One token of each sequence: position and row, and of the keys with its own the first and how many; (B,) each."""

    t: Array
    row: Array
    start: Array
    length: Array


class _Layer(NamedTuple):
    attentions: list[_Attention]
    feed_forward: tuple[Any, ...]
    norms: list[_Norm]
    norm_first: bool


class Step:
    """Of `layers` and a last `norm`, for B sequences. Errors: Others where they are not all plain."""

    def __init__(self, layers: Sequence[Any], norm: nn.Module | None, sequences: int) -> None:
        self._modules = [m for part in (*layers, norm) if part is not None for m in part.modules()]
        if any(m.training or hooked(m) for m in self._modules):
            raise Others
        like: Any = next(layers[0].parameters())
        self._dtype, self._sequences = like.dtype, sequences
        self._held = list(_held(self._modules))
        self._address = [(p, p.data_ptr()) for _, _, p in self._held if isinstance(p, Tensor)]
        self._layers = [self._layer(layer) for layer in layers]
        self._norm = None if norm is None else self._norm_of(norm)
        width = layers[0].self_attn.embed_dim
        self._q, self._turned, self._o, self._s = (self._new(width) for _ in range(4))
        self._kv, self._kv_turned = (self._new(2 * width) for _ in range(2))
        self._mean, self._scale = (self._new() for _ in range(2))
        self._sums = [(self._new(width), self._new(width)) for _ in range(2)]  # r and y of a norm; the other's are read
        self._queries = np.arange(sequences), np.ones(sequences, np.int64)

    def fits(self, x: Tensor, sequences: int) -> bool:
        """Whether all is as it was when the views were made, and x is of this kind."""
        return (
            x.dtype is self._dtype
            and sequences == self._sequences
            and all(names.get(name) is value for names, name, value in self._held)
            and all(p.data_ptr() == address for p, address in self._address)
            and not any(m.training or hooked(m) for m in self._modules)
        )

    def __call__(self, x: Tensor, state: State) -> Tensor:
        self._threads = torch.get_num_threads()
        y = x.detach().reshape(self._q.shape).contiguous().numpy()
        before, start = state.lengths.numpy(), state.start.numpy()
        new = _New(before, start + before, start, before + 1)
        for n, layer in enumerate(self._layers):
            y = self._around(layer, y, self._sub_layers(layer, state, n, new))
        y = np.copy(y) if self._norm is None else self._normalised(y, self._norm, np.empty_like(y))
        return torch.from_numpy(y).view(x.shape)

    def _sub_layers(self, layer: _Layer, state: State, n: int, new: _New) -> list[SubLayer]:
        kept = state.key_value[n].numpy()
        steps: list[SubLayer] = [lambda y: self._attend(layer.attentions[0], y, kept, new)]
        if state.memory:
            m, mask = state.memory[n], state.memory_masks.mask
            seen = None if mask is None else mask.numpy()
            masks = (seen, None) if mask is None or mask.dtype == torch.bool else (None, seen)
            keys = m.key.numpy(), m.rows.start.numpy(), m.rows.length.numpy(), m.rows.step, False, masks
            own = layer.attentions[1]
            steps.append(lambda y: self._read(own, self._linear(y, own.q, self._q), *keys))
        return [*steps, lambda y: self._feed(layer, y)]

    def _around(self, layer: _Layer, x: Array, sub_layers: list[SubLayer]) -> Array:
        if not layer.norm_first:
            for sub_layer, norm in zip(sub_layers, layer.norms, strict=True):
                _, x = self._add(x, sub_layer(x), norm)
            return x
        y = self._normalised(x, layer.norms[0], self._sums[0][1])
        for sub_layer, norm in zip(sub_layers[:-1], layer.norms[1:], strict=True):
            x, y = self._add(x, sub_layer(y), norm)
        self._sums.reverse()
        return np.add(x, sub_layers[-1](y), out=self._sums[0][0])

    def _attend(self, part: _Attention, x: Array, kept: Array, new: _New) -> Array:
        """Self-attention; the new keys and values go to their rows of those that are kept."""
        assert part.kv is not None
        q, kv = self._linear(x, part.q, self._q), self._linear(x, part.kv, self._kv)
        if part.frequency is not None:
            where, more = (new.t, part.frequency), (part.heads, x.shape[1], self._threads)
            core.rotary(q, *where, self._turned, *more)
            core.rotary(kv, *where, self._kv_turned, *more)
            q, kv = self._turned, self._kv_turned
        kept[new.row] = kv
        return self._read(part, q, kept, new.start, new.length, 1, True, (None, None))

    def _read(
        self,
        part: _Attention,
        q: Array,
        kv: Array,
        start: Array,
        length: Array,
        step: int,
        causal: bool,
        masks: tuple[Array | None, Array | None],
    ) -> Array:
        core.attention_forward(
            *(q, kv, None, *masks, part.slopes, *self._queries, start, length, None, None, None),
            *(self._o, part.log_sum, None, part.heads, 1, step, causal, part.scale, 0.0, 0, self._threads),
        )
        return self._linear(self._o, part.out, self._s)

    def _feed(self, layer: _Layer, x: Array) -> Array:
        kind, *weights = layer.feed_forward
        core.feed_forward_forward(kind, x, *weights, None, None, None, self._s, None, None, 0.0, 0, self._threads)
        return self._s

    def _linear(self, x: Array, part: _Linear, out: Array) -> Array:
        core.linear_forward(x, *part, out, self._threads)
        return out

    def _add(self, x: Array, s: Array, norm: _Norm) -> tuple[Array, Array]:
        self._sums.reverse()
        r, y = self._sums[0]
        return r, self._normalised(x, norm, y, s, r)

    def _normalised(self, x: Array, norm: _Norm, y: Array, s: Array | None = None, r: Array | None = None) -> Array:
        mean = self._mean if norm.centred else None
        core.norm_forward(
            *(x, s, norm.gain, norm.bias, None, None, None, r, y, mean, self._scale, norm.epsilon, 0, 0.0),
            self._threads,
        )
        return y

    def _new(self, *shape: int) -> Array:
        return torch.empty(self._sequences, *shape, dtype=self._dtype).numpy()

    def _layer(self, layer: Any) -> _Layer:
        own = type(layer)
        kind = kind_of(layer.activation)
        if own not in (TransformerEncoderLayer, TransformerDecoderLayer) or kind is None:
            raise Others
        attentions = [self._attention(layer.self_attn, True)]
        if own is TransformerDecoderLayer:
            attentions.append(self._attention(layer.multihead_attn, False))
        one, two = (self._linear_of(part) for part in (layer.linear1, layer.linear2))
        gate = (None, None) if layer.gate is None else self._linear_of(layer.gate)
        count = len(attentions) + 1
        if not all(plain(part, DROPOUT) for name, part in layer.named_children() if name.startswith("dropout")):
            raise Others
        norms = [self._norm_of(getattr(layer, f"norm{n + 1}")) for n in range(count)]
        return _Layer(attentions, (kind, *one, *two, *gate), norms, layer.norm_first)

    def _attention(self, part: Any, itself: bool) -> _Attention:
        weight, bias, heads = part.in_proj_weight, part.in_proj_bias, part.num_heads
        if (type(part), type(part.out_proj)) != (MultiheadAttention, NonDynamicallyQuantizableLinear):
            raise Others
        if weight is None or part.bias_k is not None or part.add_zero_attn or (part.positions and not itself):
            raise Others
        width, both = part.embed_dim, (self._array(weight), self._array(bias))
        q, kv = (
            _Linear(*(None if w is None else w[rows] for w in both)) for rows in (slice(width), slice(width, None))
        )
        rotary = part.positions == "rotary"
        return _Attention(
            q,
            kv if itself else None,
            _Linear(self._array(part.out_proj.weight), self._array(part.out_proj.bias)),
            heads,
            (width // heads) ** -0.5,
            frequencies(width // heads, weight.device).numpy() if rotary else None,
            self._array(part.slopes) if part.positions == "alibi" else None,
            self._new(heads),
        )

    def _linear_of(self, part: Any) -> _Linear:
        if not plain(part, LINEAR):
            raise Others
        return _Linear(self._array(part.weight), self._array(part.bias))

    def _norm_of(self, norm: Any) -> _Norm:
        centred = plain(norm, LAYER_NORM)
        if not centred and not plain(norm, RMS_NORM):
            raise Others
        epsilon = torch.finfo(self._dtype).eps if norm.eps is None else norm.eps
        return _Norm(self._array(norm.weight), self._array(norm.bias) if centred else None, centred, epsilon)

    def _array(self, p: Tensor | None) -> Array | None:
        if p is None:
            return None
        if type(p) not in (Tensor, nn.Parameter) or not _for_core(p, self._dtype):
            raise Others
        return p.detach().numpy()


def one_token(model: Any, x: Any, state: State, batch_first: bool) -> Tensor | None:
    """What the model makes of one token of each sequence, (B, 1, D) or (1, B, D); None where it goes another way."""
    sequences = len(state.lengths)
    shape = (sequences, 1, state.width) if batch_first else (1, sequences, state.width)
    if equations_only() or core is None or type(x) is not Tensor or x.is_nested or x.shape != shape or not sequences:
        return None
    memories = len(model.layers) if type(model.layers[0]) is TransformerDecoderLayer else 0
    if (len(state.key_value), len(state.memory)) != (len(model.layers), memories):
        return None
    given = [*state.key_value, *(m.key for m in state.memory)]
    mask = state.memory_masks.mask
    if not readable(x) or is_in_torch_dispatch_mode() or not all(_for_core(kv, x.dtype) for kv in given):
        return None
    if any(m.value is not None for m in state.memory) or not (mask is None or mask.is_contiguous()):
        return None
    if state.one_token is None or not state.one_token.fits(x, sequences):
        try:
            state.one_token = Step(model.layers, model.norm, sequences)
        except Others:
            return None
        if not state.one_token.fits(x, sequences):
            return None
    state.reserve(1, torch.ones_like(state.lengths))
    y = state.one_token(x, state)
    state.advance(1)
    return y


def _for_core(x: Tensor, dtype: torch.dtype) -> bool:
    on_core = x.is_cpu and x.dtype is dtype and dtype in (torch.float32, torch.float64)
    return on_core and x.is_contiguous() and readable(x)


def _held(modules: list[nn.Module]) -> Iterator[tuple[dict[str, Any], str, Any]]:
    """Where everything stands that a layer computes with."""
    for m in modules:
        for names in (m._modules, m._parameters, m._buffers):
            yield from ((names, name, value) for name, value in names.items())
        own = vars(m)
        yield from ((own, name, own[name]) for name in ("activation", "norm_first", "eps") if name in own)
