"""The only file with tolerance numbers. To widen one needs a reason here and a line in the changelog.

The bound on two ways to compute the same sums, `bound(dtype, length)`, is the certificate's own (`unrolled.verify`):
what a user is promised is what the tests demand. It is relative to the largest entry of the reference tensor.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from unrolled.verify.judges import FINITE_BOUND as FINITE_BOUND
from unrolled.verify.judges import bound as bound
from unrolled.verify.judges import relative_error

# torch.autograd.gradcheck at torch's own settings, in float64: step 1e-6, and a gradient may differ by 1e-5 + 1e-3 |g|.
GRADCHECK: dict[str, Any] = {"eps": 1e-6, "atol": 1e-5, "rtol": 1e-3}

# A rate measured over n draws lies within 5 standard deviations of its expectation, except once in 1.7 million runs.
DEVIATIONS = 5.0

# A mutant that scales a term: far above every bound here, and above gradcheck's rtol.
MUTANT_SCALE = 1.03


def close(found: Tensor, reference: Tensor, length: int, dtype: torch.dtype | None = None) -> None:
    """Assert that `found` is `reference` within the bound for `dtype` (found's own) and sums of `length` terms."""
    assert found.shape == reference.shape, f"shape {tuple(found.shape)} against {tuple(reference.shape)}"
    error, limit = relative_error(found, reference), bound(dtype or found.dtype, length)
    assert error <= limit, f"relative error {error:.2e} against {reference.dtype}, bound {limit:.2e}"


def same_bits(found: Tensor, reference: Tensor) -> None:
    torch.testing.assert_close(found, reference, rtol=0, atol=0, equal_nan=False)
