"""Where NaN or infinity began in a forward pass, in one sentence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvdrift.backends.transformer_lens import plain_name
from kvdrift.errors import NonFiniteError
from kvdrift.tracing.sites import BLOCK_SITES
from kvdrift.tracing.tap import Tap

if TYPE_CHECKING:
    from kvdrift.models.model import Model

_ORDER = ("resid_pre", "q", "k", "v", "z", "attn_out", "resid_mid", "mlp_out", "resid_post")


def leaves_finite(logits: Tensor) -> bool:
    """Whether logits hold NaN or +inf; −inf rules a token out and is legal.

    One pass over them: the largest is NaN if any is.

    Examples
    --------
    >>> leaves_finite(torch.tensor([0.5, -torch.inf])), leaves_finite(torch.tensor([0.5, torch.nan]))
    (False, True)
    """
    return not bool(logits.max() < torch.inf)


def explain_nonfinite(model: Model, tokens: Sequence[int], attn: str | None = None) -> NonFiniteError:
    """Run ``tokens`` once more and say where the first value that is not finite comes from.

    Parameters
    ----------
    model
        The model that produced it.
    tokens
        The tokens it had consumed.
    attn
        The attention implementation it ran with, if not its own.

    Returns
    -------
    NonFiniteError
        To be raised: names the weight that is not finite, or the layer and site where the first such value
        appeared with the largest finite value before it, and what to do.
    """
    weight = next((plain_name(name) for name, w in model.hf.named_parameters() if not w.isfinite().all()), None)
    if weight is not None:
        return NonFiniteError(
            f"The weights of {model.name} are broken: {weight} holds NaN or infinity; load them again, or in "
            "another dtype if they were cast."
        )
    sites = dict.fromkeys(site for site in (*BLOCK_SITES, "q", "k", "v", "z") if site in model.coverage.sites)
    ids = torch.tensor([list(tokens)], device=model.device)
    with model.evaluating(), model.backend.attention(attn), Tap(model, sites, where="all", kv_where="all") as tap:
        logits = model.backend.forward(ids, 0)
    advice = "use dtype='bfloat16' or 'float32'" if model.dtype == torch.float16 else "use dtype='float64'"
    largest, at = 0.0, "the embeddings"
    for layer in range(len(model.tree.blocks)):
        for site in (site for site in _ORDER if layer in tap.values.get(site, {})):
            value = tap.values[site][layer]
            finite = value.isfinite()
            peak = float(value[finite].abs().max()) if finite.any() else 0.0
            if peak > largest:
                largest, at = peak, f"{site} of layer {layer}"
            if not finite.all():
                return NonFiniteError(
                    f"{model.name} in {model.dtype_name} leaves the finite numbers at {site} of layer {layer}: "
                    f"the largest finite value up to there is {largest:.4g} ({at}), and {model.dtype_name} ends at "
                    f"{torch.finfo(model.dtype).max:.4g}; {advice}."
                )
    if logits.isfinite().all():
        return NonFiniteError(
            f"A path gives values that are not finite, but {model.name} in {model.dtype_name} does not when it reads "
            "the same tokens plainly, without a cache: look at the path's own cache, attention and controls."
        )
    return NonFiniteError(
        f"{model.name} in {model.dtype_name} gives logits that are not finite although every block is (largest "
        f"value {largest:.4g}, {at}); {advice}."
    )
