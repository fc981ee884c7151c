"""Where a run left the finite numbers, found by its own path once more."""

from __future__ import annotations

from collections.abc import Sequence

from kvdrift.errors import NonFiniteError
from kvdrift.paths.capabilities import left_padding
from kvdrift.paths.path import Run
from kvdrift.tracing.finite import broken_weight, is_nonfinite, largest_finite, watch_all


def explain_nonfinite(run: Run, tokens: Sequence[int]) -> NonFiniteError:
    """Run ``tokens`` once more and say where the first value that is not finite comes from.

    The run's own path reads them, with its cache, chunks, padding and controls: as one prompt, and if that stays
    finite, one by one.

    Returns
    -------
    NonFiniteError
        To be raised: names the weight that is not finite, or the layer and site where the first such value
        appeared with the largest finite value before it, and what to do.
    """
    model = run.model
    weight = broken_weight(model)
    if weight is not None:
        return NonFiniteError(weight)
    for n_prompt in (len(tokens), 1):
        with watch_all(model) as watch:
            again = run.path.start(model, list(tokens[:n_prompt]), run.controls)
            try:
                logits = again.step().logits
                for token in tokens[n_prompt:]:
                    logits = again.step(token).logits
            finally:
                again.close()
        found = watch.first_nonfinite()
        if found is not None and is_nonfinite(logits):
            padding = left_padding(run)
            return NonFiniteError(f"{found.told(model, padding)}; {found.advice(model, padding)}.")
        if is_nonfinite(logits):
            largest, at = largest_finite(watch.passes)
            return NonFiniteError(
                f"{model.name} in {model.dtype_name} gives logits that are not finite although every block is "
                f"(largest value {largest:.4g}, {at}); look at the final norm and the LM head."
            )
    return NonFiniteError(
        f"A path gives values that are not finite, but {model.name} in {model.dtype_name} does not when the path reads "
        "the same tokens again: look at the path's own cache, attention and controls."
    )
