"""Multi-head attention with torch.nn's arguments, parameters and results."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from unrolled.equations.dropout import Dropping
from unrolled.equations.positions import alibi_slopes
from unrolled.nn._forms import Batch
from unrolled.nn._hooks import plain
from unrolled.nn._initial import check_sizes
from unrolled.nn._masks import Masks, attention_mask, both, over_keys, padding, self_attention_masks
from unrolled.nn._tokens import Tokens, enter, padded_weights
from unrolled.ops.attention import attention
from unrolled.ops.linear import linear
from unrolled.ops.rotary import rotary
from unrolled.ragged import Lengths, Ragged, Rows

POSITIONS = (None, "rotary", "alibi")


class Cache(NamedTuple):
    """Keys and values of what came before, side by side, and where those of the new tokens go."""

    key_value: Tensor  # (B * capacity, 2 * D)
    row: Tensor  # (N,) of each new token
    rows: Rows  # with the new tokens


class Memory(NamedTuple):
    """Keys and values that queries of other sequences read."""

    key: Tensor  # (M, D), or (M, 2 * D) with the values beside it
    value: Tensor | None
    rows: Rows
    steps: int | None  # T of a padded batch; None: that of the longest sequence


class MultiheadAttention(nn.MultiheadAttention):
    """torch.nn.MultiheadAttention with the gradient in closed form, for sequences of any lengths, 0 included.

    Arguments, parameter names, initial values, `state_dict` and results are torch's. Keyword only:

    - `positions`: "rotary" turns queries and keys by their positions, "alibi" lowers a score by the distance; an odd
      head size has no rotary positions.

    What differs from torch, on purpose: a query that may attend to nothing gets the bias of the output projection and
    passes no gradient on, where torch gives NaN. `is_causal` is a command, with a mask and without. Masks of bool and
    of numbers may meet. half and bfloat16 are computed as such; under autocast the arithmetic is float32.
    Source: `equations.attention`.
    Errors: ValueError for an argument outside what is said here.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        positions: str | None = None,
    ) -> None:
        check_attention(embed_dim, num_heads, dropout, positions)
        super().__init__(
            *(embed_dim, num_heads, dropout, bias, add_bias_kv, add_zero_attn, kdim, vdim, batch_first, device, dtype)
        )
        self.positions = positions
        if positions == "alibi":
            slopes = alibi_slopes(num_heads).to(device=device, dtype=dtype or torch.get_default_dtype())
            self.register_buffer("slopes", slopes, persistent=False)

    def forward(
        self,
        query: Batch,
        key: Batch,
        value: Batch,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | Masks | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
        *,
        causal: bool = False,
        lengths: Lengths | None = None,
        key_lengths: Lengths | None = None,
        keys: Lengths | None = None,
    ) -> tuple[Any, Tensor | None]:
        """The values that each query reads, in the form of `query`, and the weights or None.

        Shapes: query (T, B, D), with `batch_first` (B, T, D); (T, D) for one sequence; a PackedSequence; a jagged
        nested tensor (B, *, D); a Ragged of (N, D); key and value likewise, of S tokens, with kdim and vdim features.
        Weights (B, T, S), or (B, A, T, S) without `average_attn_weights`: those applied, after dropout.
        key_padding_mask (B, S) and attn_mask (T, S) or (B * A, T, S): True = may not attend, or numbers that are added.
        `lengths` of a padded query, `key_lengths` of padded keys (without it, in self-attention, `lengths`).
        `causal` and `is_causal`, which mean the same: query i sees key j up to i + S - T, the last query all of them.
        `keys` (B,): whole numbers that take the place of a sequence's index in the mask of dropout.
        Edges: rows beyond a length are 0.
        Errors: ValueError for shapes that do not fit; TypeError for a mask of another dtype.
        """
        itself = query is key and key is value
        queries = enter(query, self.batch_first, self.embed_dim, lengths).with_keys(keys)
        causal = causal or is_causal
        if itself and key_lengths is None:
            memory, keep = queries, self._keep(key_padding_mask, queries)
            sizes = queries.sequences, self.num_heads, queries.steps if attn_mask is None else queries.longest
            masks = self_attention_masks(attn_mask, causal, keep, sizes, queries.values.dtype)
            o, weights = self.attend(queries, masks, self._dropping(queries), need_weights)
        else:
            memory = enter(key, self.batch_first, self.kdim, key_lengths, key_padding_mask)
            values = (
                memory if key is value else enter(value, self.batch_first, self.vdim, key_lengths, key_padding_mask)
            )
            if values is not memory and (values.steps != memory.steps or len(values.values) != len(memory.values)):
                found = f"{len(memory.values)} keys cannot go with {len(values.values)} values"
                raise ValueError(f"{found}: shapes {_shape(key)} and {_shape(value)}")
            masks = self.masks_over(queries, memory, attn_mask, causal)
            given = self.memory(memory, None if values is memory else values)
            o, weights = self.read(queries, given, masks, self._dropping(queries), need_weights)
        if weights is not None:
            extra = (self.bias_k is not None) + self.add_zero_attn
            wide = memory if not extra or memory.steps is None else memory._replace(steps=memory.steps + extra)
            weights = padded_weights(weights, queries, wide)
            weights = weights.mean(-3) if average_attn_weights else weights
        return queries.restore(o), weights

    def masks_over(self, queries: Tokens, memory: Tokens, attn_mask: Tensor | Masks | None, causal: bool) -> Masks:
        if isinstance(attn_mask, Masks):
            return attn_mask
        if queries.sequences != memory.sequences:
            raise ValueError(
                f"{queries.sequences} sequences of queries cannot read {memory.sequences} sequences of keys"
            )
        if attn_mask is None:
            return Masks(causal, memory.keep)
        sizes = queries.sequences, self.num_heads, queries.longest, memory.longest
        return Masks(causal, both(attention_mask(attn_mask, sizes, queries.values.dtype), memory.keep))

    def attend(
        self,
        x: Tokens,
        masks: Masks,
        dropping: Dropping | None = None,
        need_weights: bool = False,
        cache: Cache | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Self-attention on rows: (N, D), and the weights (B, A, T, T) of the longest or None.

        With a cache the new tokens read what came before too, and are written beside it.
        """
        if not self._in_one:
            if cache is not None:
                self.check_cached()
            return self.read(x, self.memory(x), masks, dropping, need_weights)
        width = self.embed_dim
        qkv = linear(x.values, self.in_proj_weight, self.in_proj_bias)
        if self.positions == "rotary":
            qkv = rotary(qkv, x.place()[1], heads=2 * self.num_heads, columns=2 * width)
        if cache is None:
            return self._out(qkv, None, None, x.rows, None, masks, dropping, need_weights)
        if cache.key_value.dtype is not qkv.dtype:
            raise TypeError(f"the state holds {cache.key_value.dtype}, the model computes {qkv.dtype}: begin again")
        cache.key_value.index_copy_(0, cache.row, qkv[:, width:])
        return self._out(qkv[:, :width], cache.key_value, None, x.rows, cache.rows, masks, dropping, need_weights)

    @property
    def _in_one(self) -> bool:
        """Whether queries, keys and values are one product, and nothing else stands behind the keys."""
        return self.in_proj_weight is not None and self.bias_k is None and not self.add_zero_attn

    def check_cached(self) -> None:
        """Errors: ValueError where the keys of what came before cannot be kept."""
        if not self._in_one:
            raise ValueError("a State keeps no keys of a self-attention with add_bias_kv, add_zero_attn, kdim or vdim")

    def memory(self, keys: Tokens, values: Tokens | None = None) -> Memory:
        """What queries read of these tokens; `values` where those are others."""
        width, bias, weight = self.embed_dim, self.in_proj_bias, self.in_proj_weight
        k: Tensor
        v: Tensor | None
        if weight is not None and values is None:
            k, v = linear(keys.values, _cut(weight, width)[1], None if bias is None else _cut(bias, width)[1]), None
        else:
            _, weight_k, weight_v = self._separate_weights()
            _, bias_k, bias_v = (None,) * 3 if bias is None else bias.chunk(3)
            k = linear(keys.values, weight_k, bias_k)
            v = linear((values or keys).values, weight_v, bias_v)
        if self.positions == "rotary":
            k = rotary(k, keys.place()[1], heads=self.num_heads, columns=width)
        return Memory(k, v, keys.rows, keys.steps)

    def read(
        self, x: Tokens, memory: Memory, masks: Masks, dropping: Dropping | None = None, need_weights: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Attention of the queries `x` to `memory` on rows."""
        width, bias = self.embed_dim, self.in_proj_bias
        weight = self.q_proj_weight if self.in_proj_weight is None else _cut(self.in_proj_weight, width)[0]
        q = linear(x.values, weight, None if bias is None else _cut(bias, width)[0])
        if self.positions == "rotary":
            sequence, t = x.place()
            first = memory.rows.length - x.rows.length
            q = rotary(q, t + first[sequence], heads=self.num_heads)
        k, v, rows, _ = memory
        if self.bias_k is not None or self.add_zero_attn:
            k, v, rows, masks = self._extended(x, memory, masks)
        return self._out(q, k, v, x.rows, rows, masks, dropping, need_weights)

    def _out(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        queries: Rows,
        keys: Rows | None,
        masks: Masks,
        dropping: Dropping | None,
        need_weights: bool,
    ) -> tuple[Tensor, Tensor | None]:
        slopes: Any = self.slopes if self.positions == "alibi" else None
        found: Any = attention(
            *(q, k, v),
            heads=self.num_heads,
            queries=queries,
            keys=keys,
            causal=masks.causal,
            mask=masks.mask,
            slopes=slopes,
            dropping=dropping,
            need_weights=need_weights,
        )
        o, weights = found if need_weights else (found, None)
        out = self.out_proj
        if plain(out, (NonDynamicallyQuantizableLinear,)):
            return linear(o, out.weight, out.bias), weights
        return out(o), weights

    def _extended(self, x: Tokens, memory: Memory, masks: Masks) -> tuple[Tensor, Tensor, Rows, Masks]:
        """Keys and values with the learned one, and that of zeros, behind all steps of each sequence."""
        k, v, rows, steps = memory
        k, v = k.chunk(2, 1) if v is None else (k, v)
        biases = [b.flatten(0, 1) for b in (self.bias_k, self.bias_v) if b is not None]
        learned = [tuple(biases)] if biases else []
        zeros = k.new_zeros(1, k.shape[1])
        more = learned + ([(zeros, zeros)] if self.add_zero_attn else [])
        longest = rows.longest if steps is None else steps
        j = torch.arange(longest + len(more), device=k.device)
        row = torch.where(j < rows.length[:, None], rows.start[:, None] + j * rows.step, 0)
        row = torch.where(j < longest, row, k.shape[0] + j - longest).flatten()
        k, v = (torch.cat([own, *(pair[n] for pair in more)]).index_select(0, row) for n, own in enumerate((k, v)))
        seen = ((j < rows.length[:, None]) | (j >= longest))[:, None, None]
        if masks.causal:
            seen = seen & _causal(x.rows, rows, longest, j)
        mask = masks.mask
        if mask is not None and mask.shape[3] > 1:
            mask = nn.functional.pad(mask[..., :longest], (0, len(more)), value=mask.dtype == torch.bool)
        start = torch.arange(len(rows.length), device=k.device) * len(j)
        return k, v, Rows(start, 1, torch.full_like(start, len(j))), Masks(False, both(mask, seen))

    def _separate_weights(self) -> tuple[Tensor, Tensor, Tensor]:
        if self.in_proj_weight is None:
            return self.q_proj_weight, self.k_proj_weight, self.v_proj_weight
        q, k, v = self.in_proj_weight.chunk(3)
        return q, k, v

    def _keep(self, key_padding_mask: Tensor | None, keys: Tokens) -> Tensor | None:
        if key_padding_mask is None:
            return None
        if keys.steps is None:
            raise ValueError("a padding mask belongs to a padded batch; this input has its own lengths")
        mask = key_padding_mask if keys.batched else key_padding_mask[None]
        return over_keys(*padding(mask, (keys.sequences, keys.steps), keys.values.dtype))

    def _dropping(self, x: Tokens) -> Dropping | None:
        if not self.training or self.dropout == 0:
            return None
        seed = torch.randint(2**63 - 1, ()).to(x.values.device)
        return Dropping(self.dropout, seed, 0, *x.place())


def _shape(x: Batch) -> tuple[Any, ...]:
    data: Any = x.values if isinstance(x, Ragged) else x if isinstance(x, Tensor) else x.data
    return tuple(data.shape)


def _cut(weight: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """What makes the queries, and what makes keys and values; their gradients come together in one."""
    q, kv = torch.split(weight, [width, 2 * width])
    return q, kv


def _causal(queries: Rows, keys: Rows, longest: int, j: Tensor) -> Tensor:
    """(B, 1, Tq, Tk) which keys come no later; those behind the longest sequence belong to no time."""
    i = torch.arange(queries.longest, device=j.device)
    first = (keys.length - queries.length)[:, None, None, None]
    return (j <= i[:, None] + first) | (j >= longest)


def check_attention(embed_dim: int, num_heads: int, dropout: float, positions: str | None) -> None:
    check_sizes(0, embed_dim=embed_dim, num_heads=num_heads)
    if embed_dim % num_heads:
        raise ValueError(f"embed_dim must be a multiple of num_heads, found {embed_dim} and {num_heads}")
    if not 0 <= dropout <= 1:
        raise ValueError(f"dropout must lie in [0, 1], found {dropout}")
    if positions not in POSITIONS:
        raise ValueError(f'positions must be "rotary", "alibi" or None, found {positions!r}')
    if positions == "rotary" and embed_dim // num_heads % 2:
        raise ValueError(f"rotary positions need heads of an even size, found {embed_dim // num_heads}")
