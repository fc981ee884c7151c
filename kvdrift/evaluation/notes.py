"""What a reader of an evaluation should see beside its numbers."""

from __future__ import annotations

from collections.abc import Sequence

from kvdrift.evaluation.records import ItemRecord
from kvdrift.evaluation.task import Item, Task
from kvdrift.models.ending import template_notes, way_on
from kvdrift.models.model import Model

SHORT = 60


def notes(model: Model, task: Task, items: Sequence[Item], records: Sequence[ItemRecord]) -> tuple[str, ...]:
    """That no answer is right at all, that every text is empty, that a chat template was left out."""
    hints = template_notes(model, [item.prompt for item in items if not item.chat], chat=False)
    written = [answer for record in records for trial in record.trials for answer in (trial.a, trial.b)]
    if written and all(len(answer.tokens) == 1 and answer.stop == "eos" for answer in written):
        return (f"the model ended every text after 0 tokens. {way_on(hints, follow=False)}",)
    return (*_no_match(task, records), *hints)


def _no_match(task: Task, records: Sequence[ItemRecord]) -> tuple[str, ...]:
    """That no text of either path is right, with an example: more often the scorer's doing than the model's."""
    pairs = [(record, answer) for record in records for trial in record.trials for answer in (trial.a, trial.b)]
    scored = [(record, answer) for record, answer in pairs if answer.correct is not None]
    if not scored or any(answer.correct for _, answer in scored):
        return ()
    record, answer = scored[0]
    said = (
        f"no answer of either path is right in {len(scored)} texts, so nothing is known about a direction: the first "
        f"text is {_short(answer.text)}, where the answer is {_short(record.reference or '')}"
    )
    scorer = getattr(task, "scorer", None)
    if isinstance(scorer, str):
        said += (
            f", held against it by the scorer {scorer!r}; if that is not what you mean, choose another one (scorer=, "
            "--scorer) or cut texts off (stop=, --stop)"
        )
    return (said,)


def _short(text: str) -> str:
    return repr(text if len(text) <= SHORT else f"{text[: SHORT - 1]}…")
