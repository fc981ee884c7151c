from kvdrift.demo_prompts import DEMO_PROMPTS


def test_there_are_several_short_and_different_ones():
    assert 6 <= len(DEMO_PROMPTS) <= 8
    assert len(set(DEMO_PROMPTS)) == len(DEMO_PROMPTS)
    for prompt in DEMO_PROMPTS:
        assert prompt.startswith("Question: ")
        assert prompt.endswith("\nAnswer:")
        assert len(prompt) < 250
