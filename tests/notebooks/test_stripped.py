"""Notebooks are kept without outputs, so that each has one source; tutorials keep the form of a lesson."""

import ast
import re
from pathlib import Path

import nbformat
import pytest

ROOT = Path(__file__).resolve().parents[2]
TUTORIALS = sorted((ROOT / "tutorials").glob("*.ipynb"))
NOTEBOOKS = [*TUTORIALS, *sorted((ROOT / "notebooks").glob("*.ipynb"))]
LESSONS = (
    "01_two_paths",
    "02_where_drift_starts",
    "03_rounding_floor",
    "04_patching",
    "05_exact_control_and_diagnosis",
    "06_gqa_and_sliding_windows",
    "07_your_own_path_or_patch",
)
CELL_METADATA = {"tags"}
ANSWER = re.compile(r"<details><summary>Answer</summary>\n\n```python\n(.*?)```.*?</details>", re.DOTALL)


def name(path):
    return f"{path.parent.name}/{path.stem}"


def source(path, kind):
    return [cell.source for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == kind]


def answers(path):
    return [found for text in source(path, "markdown") for found in ANSWER.findall(text)]


@pytest.fixture(params=NOTEBOOKS, ids=name)
def notebook(request):
    return nbformat.read(request.param, as_version=nbformat.NO_CONVERT)


@pytest.fixture(params=TUTORIALS, ids=name)
def lesson(request):
    return request.param


def test_the_lessons_are_there():
    assert [path.stem for path in TUTORIALS] == list(LESSONS)


def test_the_index_names_every_lesson():
    index = (ROOT / "tutorials" / "README.md").read_text(encoding="utf-8")
    assert [lesson for lesson in LESSONS if f"({lesson}.ipynb)" not in index] == []


def test_it_is_a_valid_notebook(notebook):
    nbformat.validate(notebook)
    assert (notebook.nbformat, notebook.nbformat_minor) >= (4, 5), "save it in nbformat 4.5 or newer: cells need ids"


def test_it_is_stripped(notebook):
    for cell in notebook.cells:
        if cell.cell_type == "code":
            assert not cell.outputs, f"cell {cell.id} holds outputs; strip the notebook before you commit it"
            assert cell.execution_count is None, f"cell {cell.id} holds an execution count"
        assert set(cell.metadata) <= CELL_METADATA, f"cell {cell.id} holds metadata of an editor: {dict(cell.metadata)}"


def test_it_names_its_kernel(notebook):
    kernel = notebook.metadata.get("kernelspec", {})
    assert (kernel.get("language"), kernel.get("name")) == ("python", "python3")
    assert set(notebook.metadata) <= {"kernelspec", "language_info"}, "nothing of an editor or of widgets belongs here"


def test_cell_ids_are_unique(notebook):
    ids = [cell.id for cell in notebook.cells]
    assert len(set(ids)) == len(ids)


def test_it_begins_with_a_title(notebook):
    first = notebook.cells[0]
    assert first.cell_type == "markdown"
    assert first.source.startswith("# ")


def test_its_code_is_python(notebook):
    for cell in notebook.cells:
        if cell.cell_type == "code":
            ast.parse(cell.source)


def test_a_lesson_begins_with_goals_and_needs(lesson):
    first = source(lesson, "markdown")[0]
    assert first.startswith(f"# {int(lesson.stem[:2])}. ")
    assert "**You will be able to**" in first
    assert "**What you need**" in first


def test_a_lesson_prints_its_environment(lesson):
    code = "\n".join(source(lesson, "code")[:6])
    assert "provenance.collect(" in code, "say near the top which versions, device and threads make the numbers"


def test_a_lesson_is_seeded_and_checks_what_it_says(lesson):
    code = source(lesson, "code")
    assert any("torch.manual_seed(" in text for text in code)
    assert sum(text.count("assert ") for text in code) >= 3


def test_an_assertion_explains_itself(lesson):
    """Those that a reader can run into: a failing check must say in a sentence what is wrong."""
    cells = [cell for cell in nbformat.read(lesson, as_version=4).cells if "check" in cell.metadata.get("tags", [])]
    for cell in cells:
        for node in ast.walk(ast.parse(cell.source)):
            assert not isinstance(node, ast.Assert) or node.msg is not None, f"line {node.lineno} of cell {cell.id}"


def test_every_exercise_has_a_check_and_an_answer(lesson):
    cells = nbformat.read(lesson, as_version=4).cells
    places = [place for place, cell in enumerate(cells) if "exercise" in cell.metadata.get("tags", [])]
    assert places, "a lesson has at least one exercise"
    for place in places:
        assert "check" in cells[place + 1].metadata.get("tags", []), f"cell {cells[place].id} has no check below it"
        assert ANSWER.search(cells[place + 2].source), f"cell {cells[place].id} has no folded answer"
    assert len(answers(lesson)) == len(places)


def test_answers_are_python(lesson):
    for answer in answers(lesson):
        ast.parse(answer)


def test_links_between_lessons_lead_somewhere(lesson):
    for text in source(lesson, "markdown"):
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", text):
            assert (lesson.parent / target).exists(), f"{target} is not there"
