"""The answers folded into the lessons pass the checks beside them: run by hand, ``pytest -m slow tests/notebooks``."""

import re
from pathlib import Path

import nbformat
import pytest

TUTORIALS = sorted((Path(__file__).resolve().parents[2] / "tutorials").glob("*.ipynb"))
ANSWER = re.compile(r"<details><summary>Answer</summary>\n\n```python\n(.*?)```", re.DOTALL)


def solved(path):
    """The lesson with each exercise replaced by the answer that follows it."""
    book = nbformat.read(path, as_version=4)
    for exercise, answer in zip(book.cells, book.cells[2:], strict=False):
        if "exercise" in exercise.metadata.get("tags", []):
            exercise.source = ANSWER.search(answer.source)[1]
    return book


@pytest.mark.real
@pytest.mark.slow
@pytest.mark.parametrize("path", TUTORIALS, ids=lambda path: path.stem)
def test_answers_pass_their_checks(path):
    client = pytest.importorskip("nbclient").NotebookClient(solved(path), timeout=300)
    book = client.execute()
    printed = "\n".join(
        output.text
        for cell in book.cells
        if "check" in cell.metadata.get("tags", [])
        for output in cell.outputs
        if output.output_type == "stream"
    )
    assert "Blank." not in printed
