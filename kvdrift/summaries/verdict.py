"""A verdict in plain sentences, its evidence numbered."""

from __future__ import annotations

from collections.abc import Iterator

from kvdrift import markup
from kvdrift.diagnosis.verdict import MEANING, Verdict


def headline(verdict: Verdict) -> str:
    """What was found."""
    return f"{verdict.kind.upper().replace('_', ' ')}: {MEANING[verdict.kind]}."


def summary(verdict: Verdict) -> str:
    """The headline, the circumstances, the evidence, what was not examined, what to do next."""
    lines = [headline(verdict), _subject(verdict)]
    lines += [f"{name}: {value}" for name, value in _circumstances(verdict)]
    lines += [f"  {number}. {reason}" for number, reason in enumerate(verdict.reasons, 1)]
    lines += [f"not examined: {case}" for case in verdict.not_examined]
    if verdict.suggestion:
        lines.append(f"next: {verdict.suggestion}")
    return "\n".join(lines)


def html(verdict: Verdict) -> str:
    """The same for Jupyter; every text is escaped."""
    return markup.block(
        headline(verdict),
        markup.paragraph(_subject(verdict)),
        markup.table(_circumstances(verdict)),
        markup.listing(verdict.reasons, numbered=True),
        *(markup.paragraph(f"Not examined: {case}") for case in verdict.not_examined),
        markup.paragraph(f"Next: {verdict.suggestion}" if verdict.suggestion else ""),
    )


def _subject(verdict: Verdict) -> str:
    return f"{verdict.model}: {verdict.a} against {verdict.b}"


def _circumstances(verdict: Verdict) -> Iterator[tuple[str, str]]:
    """Where, which path and when, as far as they are known."""
    if verdict.where is not None:
        yield "where", str(verdict.where)
    if verdict.wrong is not None:
        yield "wrong path", verdict.a if verdict.wrong == "a" else verdict.b
    if verdict.signature:
        yield "when", ", ".join(verdict.signature)
