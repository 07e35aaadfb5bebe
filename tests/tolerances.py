"""The only file with tolerance numbers. To widen one needs a reason here and a line in the changelog.

The bound on two ways to compute the same sums, `bound(dtype, length)`, is the certificate's own (`unrolled.verify`):
what a user is promised is what the tests demand. It is relative to the largest entry of the reference tensor.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from unrolled.equations.layer_norm import EPSILON
from unrolled.verify.judges import FINITE_BOUND as FINITE_BOUND
from unrolled.verify.judges import bound as bound
from unrolled.verify.judges import relative_error

# torch.autograd.gradcheck at torch's own settings, in float64: step 1e-6, and a gradient may differ by 1e-5 + 1e-3 |g|.
GRADCHECK: dict[str, Any] = {"eps": 1e-6, "atol": 1e-5, "rtol": 1e-3}

# Recurrent layers of the tests, as a number of terms for `bound`: at most 7 steps in 2 layers, 10 inputs and 5 units, 5
# sequences. A rounding at one step reaches all later ones, so a state is one sum over the whole walk, and a gradient
# one over the walk there and back and over all tokens.
STATES = 7 * 2 * (10 + 5)
GRADIENTS = 2 * STATES + 7 * 5
# With a layer norm so many times as long: it multiplies what it is given, its rounding too, by up to the root of this.
NORMS = round(1 / EPSILON)

# The same in half precision: products are summed in float32 and rounded once, and the roundings of the few steps partly
# cancel. Over 30 seeds states err by 2 eps at most and gradients by 2 eps in the median; allowed are 4 and 8 eps, in
# bfloat16 3 % and 6 %: an error of 10 % must be refused.
HALF_STATES = 1
HALF_GRADIENTS = 4
HALF_REFUSED = 1.1

# "No larger than torch's error": the root mean square of ours, over some hundred rows, is known to a few percent,
# and where both are mere roundings of the result, half a unit in the last place at most, the smaller is chance.
AS_EXACT = 1.1
ROUNDED = torch.finfo(torch.float32).eps / 2

# A rate measured over n draws lies within 5 standard deviations of its expectation, except once in 1.7 million runs.
DEVIATIONS = 5.0

# Attention of the tests: its projections, scores, weights and values are sums one after the other, of at most 8 terms
# or 7 keys, and the exponential enlarges the rounding of a score by the score, up to about 4.
ATTENTION = 5 * 8 * 4**2

# A Transformer of the tests, likewise: 2 layers of the encoder below 2 of the decoder, each some 5 sums of at most 12
# terms, of which the norms enlarge the roundings, their squares by some 40: over 6 seeds the largest error in outputs
# and gradients is 0.35 of the bound.
TRANSFORMER = 4 * 5 * 12 * 40

# Two results in float64 that must differ: by more than any rounding.
ROUNDING = 1e-6

# A mutant that scales a term: far above every bound here, and above gradcheck's rtol.
MUTANT_SCALE = 1.03


def close(found: Tensor, reference: Tensor, length: int, dtype: torch.dtype | None = None) -> None:
    """Assert that `found` is `reference` within the bound for `dtype` (found's own) and sums of `length` terms."""
    assert found.shape == reference.shape, f"shape {tuple(found.shape)} against {tuple(reference.shape)}"
    error, limit = relative_error(found, reference), bound(dtype or found.dtype, length)
    assert error <= limit, f"relative error {error:.2e} against {reference.dtype}, bound {limit:.2e}"


def same_bits(found: Tensor, reference: Tensor) -> None:
    torch.testing.assert_close(found, reference, rtol=0, atol=0, equal_nan=False)
