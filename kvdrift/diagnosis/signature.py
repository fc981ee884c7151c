"""When a fault shows: the pattern of the steps at which it was found."""

from __future__ import annotations

from collections.abc import Sequence

from kvdrift.diagnosis.evidence import Finding
from kvdrift.models.architecture import Architecture


def signature(findings: Sequence[Finding], architecture: Architecture) -> tuple[str, ...]:
    """Name the pattern of a fault.

    Returns
    -------
    tuple of str
        From: ``"already in the prompt"``, ``"from the first decode step"``, ``"at the window"``, ``"at key lengths
        that are multiples of …"``, ``"from … tokens on"``, ``"at a chunk boundary"``, ``"at a length switch"``,
        ``"with left padding"``, ``"in a pass of several tokens"``, ``"after a crop"``, ``"after a crop of drafted
        tokens"``, ``"between prompts"``, ``"in a saved prefix"``, ``"in generate() alone"``, ``"in … layers
        only"``.
    """
    if findings and all("generate" in (finding.check, finding.path.removesuffix("()")) for finding in findings):
        return ("in generate() alone",)
    words: list[str] = []
    if any(finding.check == "stale" for finding in findings):
        words.append("between prompts")
    if any(finding.check == "prefix" for finding in findings):
        return (*words, "in a saved prefix")
    timed = [finding for finding in findings if finding.moment is not None]
    plain = [finding for finding in timed if _manner(finding) is None]
    if plain:
        words += _lengths(plain, architecture)
    else:
        words += dict.fromkeys(manner for finding in timed if (manner := _manner(finding)) is not None)
    return (*words, *_kinds(findings, architecture))


def _manner(finding: Finding) -> str | None:
    """The manner of a case in which it alone can show; None for a plain run."""
    assert finding.moment is not None
    case = finding.moment.case
    if case.switch is not None and finding.moment.position + 1 > case.switch:
        return "at a length switch"
    return case.manner


def _lengths(plain: Sequence[Finding], architecture: Architecture) -> list[str]:
    """The lengths at which plain runs went wrong, told from the run that grows token by token where it shows there."""
    moments = [finding.moment for finding in plain if finding.moment is not None]
    growing = [moment for moment in moments if moment.case.grows]
    if any(moment.step == 0 for moment in growing):
        return ["already in the prompt"]
    if any(moment.step == 1 for moment in growing):
        return ["from the first decode step"]
    found = sorted({moment.position + 1 for moment in growing or moments})
    multiple = next((m for m in (64, 32, 16, 8, 4, 2) if all(n % m == 0 for n in found)), None)
    consecutive = found == list(range(found[0], found[-1] + 1))
    if growing and multiple is not None and (len(found) == 1 or not consecutive):
        return [f"at key lengths that are multiples of {multiple}"]
    windows = {info.window for info in architecture.layers if info.window}
    if any(found[0] >= window - 1 and not (growing and found[0] > window + 2) for window in windows):
        return ["at the window"]
    return [f"from {found[0]} tokens on"]


def _kinds(findings: Sequence[Finding], architecture: Architecture) -> list[str]:
    """The one kind of layer in which it was found, where layers of another kind were found clean.

    The arm names the first layer only, so that layers of another kind must stand before it; the other checks look
    at every layer by itself.
    """
    kinds = [info.attention for info in architecture.layers]
    places = [(finding.check, finding.where.layer) for finding in findings if finding.where is not None]
    layers = {layer for _, layer in places if layer is not None and layer < len(kinds)}
    found = {kinds[layer] for layer in layers}
    if len(set(kinds)) < 2 or len(found) != 1:
        return []
    by_itself = all(check in ("visibility", "witness") for check, _ in places) and len(layers) > 1
    if not by_itself and set(kinds[: min(layers)]) <= found:
        return []
    return [f"in {found.pop()} layers only"]
