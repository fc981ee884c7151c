"""What a prompt is, and what it becomes; text and chat templates are tested with the model that encodes them."""

import pytest

from kvdrift.models.prompts import as_prompts


@pytest.mark.parametrize(
    ("given", "prompts", "many"),
    [
        ("text", ["text"], False),
        ([1, 2], [[1, 2]], False),
        ((1, 2), [[1, 2]], False),
        (["a", "b"], ["a", "b"], True),
        (["a"], ["a"], True),
        ([[1, 2], [3]], [[1, 2], [3]], True),
        (["a", [3]], ["a", [3]], True),
    ],
)
def test_one_prompt_or_many(given, prompts, many):
    assert as_prompts(given) == (prompts, many)
