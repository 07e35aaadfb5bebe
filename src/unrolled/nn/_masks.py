"""torch's masks, of which True keeps a query from a key, as those of the operators, of which True lets it attend."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from unrolled.ragged import readable


class Masks(NamedTuple):
    """What a query may attend to, as `ops.attention` takes it."""

    causal: bool
    mask: Tensor | None  # (1 or B, 1 or A, 1 or Tq, 1 or Tk), True = may attend, or numbers to add


def self_attention_masks(
    attn_mask: Tensor | Masks | None,
    causal: bool,
    keep: Tensor | None,
    sizes: tuple[int, int, int | None],
    dtype: torch.dtype,
) -> Masks:
    """Of sequences that read themselves; `keep` is what `padding` made, `sizes` B, A, T.

    A two-dimensional mask that is just the causal one becomes `causal`, which costs nothing and reads no mask.
    """
    if isinstance(attn_mask, Masks):
        return attn_mask
    if attn_mask is not None and is_causal_mask(attn_mask):
        attn_mask, causal = None, True
    return Masks(causal, both(attention_mask(attn_mask, (*sizes, sizes[2]), dtype), keep))


def attention_mask(
    mask: Tensor | None, sizes: tuple[int, int, int | None, int | None], dtype: torch.dtype
) -> Tensor | None:
    """torch's attn_mask, (Tq, Tk) or (B * A, Tq, Tk), for sizes B, A, Tq, Tk; a length of None is not checked.

    Errors: TypeError for a mask that is neither bool nor floating; ValueError for another shape.
    """
    if mask is None:
        return None
    batch, heads, *steps = sizes
    expected = tuple(found if step is None else step for found, step in zip(mask.shape[-2:], steps, strict=False))
    if mask.ndim not in (2, 3) or tuple(mask.shape) not in (expected, (batch * heads, *expected)):
        wanted = tuple("T" if step is None else step for step in steps)
        raise ValueError(
            f"an attention mask must have shape {wanted} or {(batch * heads, *wanted)}, found {tuple(mask.shape)}"
        )
    mask = _polarity(mask, "an attention mask", dtype)
    return mask[None, None] if mask.ndim == 2 else mask.view(batch, heads, *mask.shape[1:])


def padding(mask: Tensor, shape: tuple[int, int], dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """torch's key_padding_mask (B, T) as (B, T) what is a token, and the numbers to add to the scores or None.

    A floating mask says with -inf what True says, and otherwise what is added for that key.
    """
    if tuple(mask.shape) != shape:
        raise ValueError(f"a padding mask must have shape {shape}, found {tuple(mask.shape)}")
    mask = _polarity(mask, "a padding mask", dtype)
    if mask.dtype == torch.bool:
        return mask, None
    live = mask != -torch.inf
    plain = readable(mask) and not mask.requires_grad and not bool(torch.where(live, mask, 0).any())
    return live, None if plain else mask


def over_keys(live: Tensor, added: Tensor | None) -> Tensor:
    """What `padding` found, (B, T), as a mask of attention (B, 1, 1, T)."""
    return (live if added is None else added)[:, None, None]


def both(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    """What both masks let through."""
    if a is None or b is None:
        return b if a is None else a
    if a.dtype == b.dtype == torch.bool:
        return a & b
    dtype = b.dtype if a.dtype == torch.bool else a.dtype
    return _added(a, dtype) + _added(b, dtype)


def is_causal_mask(mask: Tensor) -> bool:
    """Whether it is torch's mask of all later positions, of either dtype."""
    if mask.ndim != 2 or mask.shape[0] != mask.shape[1] or mask.requires_grad or not readable(mask):
        return False
    if mask.dtype != torch.bool and not mask.is_floating_point():
        return False
    later = torch.ones(mask.shape, dtype=torch.bool, device=mask.device).triu(1)
    if mask.dtype != torch.bool:
        later = torch.zeros_like(mask).masked_fill(later, -torch.inf)
    return torch.equal(mask, later)


def _polarity(mask: Tensor, name: str, dtype: torch.dtype) -> Tensor:
    if mask.dtype == torch.bool:
        return ~mask
    if not mask.is_floating_point():
        raise TypeError(
            f"{name} must be bool, True = may not attend, or floating, added to the scores; found {mask.dtype}"
        )
    return mask.to(dtype)


def _added(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """The numbers to add to the scores that do the same."""
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(~mask, -torch.inf)
