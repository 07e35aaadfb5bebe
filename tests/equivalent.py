"""The changes of a backward that its judges cannot tell from the original, each with the reason: see test_teeth.py."""

from __future__ import annotations

import attention_cases
from mutants import CHANGES

ORDER = "a sum does not depend on the order of its terms"
FORM = "only the shape is read here, or whether there is one"
SQUARED = "c is only squared here, or its tanh"

_WEIGHTS = "dweights = Weights(da[tokens].T @ x[tokens], torch.cat([d.T @ a for d, a in zip(cut, left, ..."

# A stale entry fails the test.
EQUIVALENT: dict[str, dict[str, str]] = {
    "recurrence": {
        "recurrence_backward, shift du in dbias_ih = du.sum(0)": ORDER,
        "recurrence_backward, shift dv in dbias_hh = dv.sum(0)": ORDER,
        **{
            f"recurrence_backward, shift {what} in tokens = all_rows(steps, x.device)": "the same order in both factors"
            for what in ("steps", "all_rows(steps, x.device)")
        },
        **{
            f"recurrence_backward, {change} before in dv, dstate, dall = "
            "(torch.zeros_like(du), dlast, tuple((torch.zeros_like(b) for b in befor ...": FORM
            for change in CHANGES
        },
        "recurrence_backward, negate after in "
        "for total, part in zip(dall, cell.total(dafter, after, kept_t), strict=True):": SQUARED,
    },
    "rnn_tanh": {"rnn_tanh_backward, negate after in (dh,), (h,) = (dafter, after)": "h is only squared"},
    "rnn_relu": {
        f"rnn_relu_backward, scale {what}": "a positive factor does not change the sign"
        for what in ("h in da = torch.where(h > 0, dh, 0)", "after in (dh,), (h,) = (dafter, after)")
    },
    "lstm": {
        "lstm_backward, negate after in dh, dc = lstm_total(dafter, after, kept)": SQUARED,
        "lstm_total, negate after in (dh, dc), (_, c), (_, _, _, o) = (dafter, after, kept)": SQUARED,
        "lstm_total, negate torch.tanh(c) in tanh_c = torch.tanh(c)": SQUARED,
        "lstm_total, negate c in tanh_c = torch.tanh(c)": SQUARED,
    },
    "gru": {},
    "options": {
        **{
            f"options_backward, {what} in {_WEIGHTS}": ORDER
            for what in ("shift dv * torch.cat([n.normal for n in trail.norms], 1)", "shift du * norm_x[0].normal")
        },
        **{f"options_backward, {what} in {_WEIGHTS} (2)": ORDER for what in ("shift dv", "shift du")},
        **{
            f"_by_token, {change} parts in "
            "return x.new_zeros(len(x), *parts[0].shape[1:]).index_copy(0, tokens, torch.cat(parts)) (2)": FORM
            for change in CHANGES
        },
        **{
            f"options_backward, {change} x in du, dv, dp, left, dprojected, dall = "
            "pytree.tree_map(partial(_by_token, x, tokens), *parts ...": FORM
            for change in CHANGES
        },
        **{
            f"step_backward, {change} dafter in dout, dbefore = "
            "(dafter, tuple((torch.zeros_like(d) for d in dafter)))": FORM
            for change in CHANGES
        },
        **{f"step_backward, {change} z in if z:": FORM for change in CHANGES},
        **{
            f"step_backward, {change} {what} in dg, dp_s = (torch.zeros_like(g), dv[:, K:])": "empty, or another "
            "takes its place: the cell resets"
            for change in CHANGES
            for what in ("dv", "dv[:, K:]")
        },
    },
    "lstm_options": {
        f"lstm_options_total, {change} dh in return (dh, dc)": "the recurrence with options reads dh where it came from"
        for change in CHANGES
    },
    "gru_before": {},
    "reset": {},
    "layer_norm": {
        f"layer_norm_backward, shift {what} in return LayerNormGrads(dx, (dy * normal).sum(0), dy.sum(0))": ORDER
        for what in ("dy", "dy * normal")
    },
    "rms_norm": {
        "rms_norm_backward, shift dy * normal in return RMSNormGrads(dx, (dy * normal).sum(0))": ORDER,
    },
    "residual_norm": {},
    "rotary": {"rotate, negate a in cos, sin = (a.cos().to(x.dtype), a.sin().to(x.dtype)) (2)": "a cosine is even"},
    "zoneout": {},
    "linear": {
        "linear_backward, shift dy in return LinearGrads(dx=dy @ weight, dweight=dy.T @ x, dbias=dy.sum(0))": ORDER,
    },
    "dropout": {
        **{
            f"dropout_mask, only the {side} of (units + 63) // 64 in first = "
            "torch.arange((units + 63) // 64 * 16, device=key.device)": "more random numbers than are used"
            for side in ("left", "right")
        },
        "dropout_mask, scale p in return (random >= round(p * 2 ** 32)).to(torch.float64) / "
        "(1 - p if p < 1 else 1) (2)": "this p is only asked whether it is 1",
    },
    "embedding": {},
    "mean_squared_error": {},
    "cross_entropy": {},
    "activation": {
        "activation_derivative, scale x in return (x > 0).to(x.dtype)": "a positive factor does not change the sign",
        "activation_derivative, another comparison in x > 0 in return (x > 0).to(x.dtype)": "no number is 0 here; "
        "test_feed_forward.py has one",
    },
    **attention_cases.EQUIVALENT,
    "feed_forward": {
        f"feed_forward_backward, shift {what} in return FeedForwardGrads(dx, da.T @ x, da.sum(0), dy.T @ h, dy.sum(0), "
        f"{end}": ORDER
        for what, end in (
            *((what, "None, None)") for what in ("da", "dy")),
            *((what, "dgate.T @ x, dgate.s ...") for what in ("da", "dy", "dgate")),
        )
    },
    "linear_cross_entropy": {},
    "additive_attention": {
        f"additive_attention_backward, {what} in "
        "return AdditiveAttentionGrads(dq=unpad_rows(ds.sum(2), queries, len(q)), dk=unpad_rows(ds. ...": why
        for what, why in [*((f"{change} mask", FORM) for change in CHANGES), ("shift de[..., None] * a", ORDER)]
    }
    | {
        f"_scores, {what} in seen = seen & (read if mask.dtype == torch.bool else read > -torch.inf)": "what is -inf "
        "here is added too; that it is ruled out as well concerns torch's differentiation of the forward"
        for what in ("another comparison in read > -torch.inf", *(f"{change} read" for change in CHANGES))
    },
}

# Changes that finite differences cannot see and the independent formulation does.
PADDING = "a padding row is a constant by definition only, so finite differences do not look at it"
UNSEEN: dict[str, str] = {
    "embedding_backward, leave out if padding_index is not None: in if padding_index is not None:": PADDING,
    **{
        f"embedding_backward, {change} in dweight[padding_index] = 0": PADDING
        for change in (
            "leave out dweight[padding_index] = 0",
            "drop dweight",
            "shift dweight",
            "scale dweight",
            "negate dweight",
        )
    },
}

STEPS = "the gradients per step are those of no input"
CUT = "a cut state is a constant by definition only, so finite differences do not look at it"
UNSEEN_PARTS: dict[str, str] = {
    "cuts, ": CUT,
    " in if per_step:": STEPS,
    " in total[rows] = part": STEPS,
    " in for total, part in zip(dall, cell.total(": STEPS,
    " in total = (dafter[0], *cell.total(": STEPS,
    " total in return (dbefore, StepGrads(": STEPS,
    " dall in return ": STEPS,
}


def unseen(label: str) -> bool:
    return label in UNSEEN or any(part in label for part in UNSEEN_PARTS)
