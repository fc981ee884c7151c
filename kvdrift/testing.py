"""For other projects' test suites: one assertion that a model's KV cache is right."""

from __future__ import annotations

from typing import Any

from kvdrift.diagnosis.diagnose import diagnose
from kvdrift.diagnosis.verdict import Verdict, VerdictKind

EQUIVALENT: tuple[VerdictKind, ...] = ("exact", "rounding")


def assert_cache_equivalent(
    model: Any, prompts: Any = None, *, allow: tuple[VerdictKind, ...] = EQUIVALENT, **options: Any
) -> Verdict:
    """Fail unless decoding with the model's KV cache computes the same function as recomputing every prefix.

    Parameters
    ----------
    model
        Anything `kvdrift.load` takes.
    prompts
        Text or token ids; lengths and manners that are known to break caches by default.
    allow
        Verdicts that pass; add ``"by_design"`` or ``"lossy"`` for models that declare a difference.
    **options
        Handed to `kvdrift.diagnose`.

    Returns
    -------
    Verdict
        What was found.

    Raises
    ------
    AssertionError
        With the whole verdict as its message.

    Examples
    --------
    >>> import kvdrift as kd
    >>> from kvdrift.testing import assert_cache_equivalent
    >>> verdict = assert_cache_equivalent(kd.models.tiny("llama"), [1, 2, 3], max_new_tokens=2)
    """
    verdict = diagnose(model, prompts, **{"progress": False, **options})
    if verdict.kind not in allow:
        raise AssertionError(str(verdict))
    return verdict
