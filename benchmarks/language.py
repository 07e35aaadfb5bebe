"""The models that `benchmarks.attention` races: a decoder-only language model and step-by-step decoding, both twice."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import unrolled
from unrolled.ops.linear_cross_entropy import linear_cross_entropy


class LanguageModel(nn.Module):
    """Embedding, learned positions, causal encoder layers with the norm first, projection; gives the mean loss.

    `library`: torch.nn or unrolled.nn, of which all of it is made.
    """

    def __init__(self, library: Any, classes: int, sizes: Any, layers: int, dropout: float) -> None:
        super().__init__()
        _, t, d, ff, heads = sizes
        self.ours = library is not nn
        self.embedding = library.Embedding(classes, d)
        self.position = library.Embedding(t, d)
        self.dropout = library.Dropout(dropout)
        layer = library.TransformerEncoderLayer(d, heads, ff, dropout, batch_first=True, norm_first=True)
        own = {} if self.ours else {"enable_nested_tensor": False}
        self.encoder = library.TransformerEncoder(layer, layers, library.LayerNorm(d), **own)
        self.linear = library.Linear(d, classes)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(t), persistent=False)
        self.register_buffer("t", torch.arange(t), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens (B, T + 1): each is to be told from those before it."""
        x = self.dropout(self.embedding(tokens[:, :-1]) + self.position(self.t))
        target = tokens[:, 1:].flatten()
        if self.ours:
            y = self.encoder(x, is_causal=True).flatten(0, 1)
            return linear_cross_entropy(y, self.linear.weight, self.linear.bias, target)
        y = self.encoder(x, mask=self.mask, is_causal=True)
        return F.cross_entropy(self.linear(y).flatten(0, 1), target)


def language_models(classes: int, sizes: Any, layers: int, dropout: float) -> tuple[nn.Module, nn.Module]:
    """Ours and torch's with the same weights."""
    ours, theirs = (LanguageModel(kind, classes, sizes, layers, dropout) for kind in (unrolled.nn, nn))
    with torch.no_grad():
        theirs.embedding.weight.mul_(theirs.embedding.weight.shape[1] ** -0.5)
    ours.load_state_dict(theirs.state_dict())
    return ours, theirs


class Decoding:
    """A decoder with the same weights twice, reading a memory step by step in evaluation.

    The tokens are given, so that both read the same; each step's output is that of the last token alone.
    """

    def __init__(self, d: int, heads: int, ff: int, layers: int) -> None:
        def decoder(library: Any) -> nn.Module:
            return library.TransformerDecoder(library.TransformerDecoderLayer(d, heads, ff, batch_first=True), layers)

        self._theirs: Any = decoder(nn).eval()
        self._ours: Any = decoder(unrolled.nn).eval()
        self._ours.load_state_dict(self._theirs.state_dict())

    def compile(self) -> None:
        self._theirs = torch.compile(self._theirs, dynamic=True)

    @torch.no_grad()
    def theirs(self, tokens: Tensor, memory: Tensor) -> Tensor:
        """The whole prefix again for each step: torch has no cache."""
        last = []
        for t in range(1, tokens.shape[1] + 1):
            mask = nn.Transformer.generate_square_subsequent_mask(t)
            last.append(self._theirs(tokens[:, :t], memory, tgt_mask=mask, tgt_is_causal=True)[:, -1:])
        return torch.cat(last, 1)

    @torch.no_grad()
    def ours(self, tokens: Tensor, memory: Tensor) -> Tensor:
        """One token at a time, with the keys and values of those before kept."""
        state = self._ours.begin(memory)
        return torch.cat([self._ours.step(tokens[:, t : t + 1], state) for t in range(tokens.shape[1])], 1)
