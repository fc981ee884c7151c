"""What the diagnosis runs: prompts at the lengths and in the manners in which caches go wrong."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from kvdrift.models.model import Model
from kvdrift.models.rope import changes_after, extends, rope_switch
from kvdrift.paths.capabilities import left_padding, stateless
from kvdrift.paths.path import Path
from kvdrift.paths.path_capabilities import begins_filled, drafts, manner, prefill_chunk, rewinds

CHUNKED, PADDED, CROPPED = "at a chunk boundary", "with left padding", "after a crop"
SEVERAL, DRAFTED = "in a pass of several tokens", "after a crop of drafted tokens"
SHORT = 5
"""Tokens of a short prompt: with `STEPS` more, key lengths take every value modulo 16."""
STEPS = 18
PADDING = 3
"""Tokens of left padding, which a window must reach at a decoding step to show that they are seen."""
COST_LIMIT = {"cpu": 3e11, "cuda": 3e13}
"""Above so many parameters × tokens, a case runs on a tiny twin of the model."""


class Pass(NamedTuple):
    """A forward pass after the prompt.

    Attributes
    ----------
    n_tokens
        How many tokens it consumes.
    taken_back
        How many of the latest tokens are forgotten after it, as drafted ones are that were rejected.
    """

    n_tokens: int = 1
    taken_back: int = 0


@dataclass(frozen=True)
class Case:
    """One prompt, run in one manner.

    Attributes
    ----------
    name
        What reasons call it.
    prompt
        Token ids.
    feed
        Token ids consumed after the prompt; None for ``steps`` tokens that path a chooses greedily.
    steps
        How many tokens are consumed after the prompt.
    a
        The path under test in the manner of this case (in chunks, left-padded).
    passes
        In which passes they are consumed, and what is taken back between; one by one and nothing by default.
    manner
        The circumstance in which this case alone can show a fault, as a verdict words it; None for a plain run.
    switch
        The sequence length from which the model is known to compute another function, in a case that goes through it.
    b
        The reference in the manner of this case; None for the one that the diagnosis was given.
    lossless
        Whether path a runs without the loss that it declares, with the model's own cache in the place of its own.
    """

    name: str
    prompt: tuple[int, ...]
    feed: tuple[int, ...] | None
    steps: int
    a: Path
    passes: tuple[Pass, ...] = ()
    manner: str | None = None
    switch: int | None = None
    b: Path | None = None
    lossless: bool = False

    def reference(self, b: Path) -> Path:
        """The reference of this case: its own, or else ``b``."""
        return b if self.b is None else self.b

    @property
    def between_manners(self) -> bool:
        """Whether it holds two manners of calling the model against each other, rather than cache-ON and cache-OFF."""
        return self.b is not None and manner(self.a) != manner(self.b)

    @property
    def of_user(self) -> bool:
        """Whether this is a prompt of the user's own, which is run on the model itself whatever it costs."""
        return self.feed is None

    @property
    def grows(self) -> bool:
        """Whether it goes through many lengths one by one."""
        return self.of_user or self.steps == STEPS

    @property
    def n_tokens(self) -> int:
        """The longest sequence that the case reaches."""
        longest = length = len(self.prompt)
        for one in self.schedule:
            longest = max(longest, length + one.n_tokens)
            length += one.n_tokens - one.taken_back
        return longest

    @property
    def first_pass(self) -> int:
        """How many tokens of the prompt the first pass consumes."""
        chunk = prefill_chunk(self.a)
        first = chunk[0] if isinstance(chunk, tuple) else chunk
        return min(first, len(self.prompt)) if isinstance(first, int) else len(self.prompt)

    @property
    def schedule(self) -> tuple[Pass, ...]:
        """The passes after the prompt."""
        return self.passes or (Pass(),) * self.steps

    @property
    def crops(self) -> bool:
        """Whether tokens are taken back."""
        return any(one.taken_back for one in self.schedule)


def default_cases(model: Model, a: Path, seed: int = 0) -> list[Case]:
    """Prompts of random tokens: short, long, one token; in every manner; around windows and switches.

    Parameters
    ----------
    model
        The model under test.
    a
        The path under test; it is run in chunks, left-padded, over several tokens and cropped where it can be.
    seed
        Decides the tokens.

    Examples
    --------
    >>> import kvdrift as kd
    >>> model = kd.load(kd.models.tiny("mistral"), quiet=True)
    >>> [case.name for case in default_cases(model, kd.CacheOn())][:3]
    ['short prompt', 'one-token prompt', 'long prompt']
    """
    make = _Maker(model, a, seed)
    return _marked(model, [*make.plain(), *make.manners(make.tokens(21)), *lengths(model, a, seed)])


def prompt_cases(model: Model, a: Path, prompts: Sequence[Sequence[int]], steps: int, seed: int = 0) -> list[Case]:
    """A user's prompts, the first of them also in every manner."""
    names = ["prompt"] if len(prompts) == 1 else [f"prompt {number}" for number in range(len(prompts))]
    plain = [Case(name, tuple(ids), None, steps, a) for name, ids in zip(names, prompts, strict=True)]
    make = _Maker(model, a, seed)
    return _marked(model, [*plain, *make.manners(tuple(prompts[0])), *lengths(model, a, seed)])


def lengths(model: Model, a: Path, seed: int = 0) -> list[Case]:
    """Cases around every window of the model, and around the length at which its rotary embedding switches."""
    make = _Maker(model, a, seed)
    cases = [case for window in make.windows for case in make.window(window)]
    switch = rope_switch(model.hf.config)
    if switch is not None:
        cases.append(make.case("around the RoPE switch", max(switch - 2, 1), 4))
    return _marked(model, cases)


def _marked(model: Model, cases: list[Case]) -> list[Case]:
    """The cases, of which those that go through a RoPE switch know it."""
    config = model.hf.config
    switch = rope_switch(config)
    return [
        replace(case, switch=switch) if changes_after(config, case.first_pass, case.n_tokens) else case
        for case in cases
    ]


def left_out(model: Model, a: Path) -> dict[str, str]:
    """Manners that this path cannot be run in → why, so that a verdict says nothing about them.

    Examples
    --------
    >>> import kvdrift as kd
    >>> left_out(kd.load(kd.models.tiny("llama"), quiet=True), kd.CacheOff())
    {'chunked prefill': 'cache-OFF has no cache', 'left padding': 'cache-OFF has no cache', 'crop': 'cache-OFF has \
no cache'}
    """
    make, refused = _Maker(model, a, 0), {}
    why = f"{a.label} has no cache" if stateless(a) else f"{a.label} takes no such arguments"
    if a.varied(prefill_chunk=1) is None:
        refused["chunked prefill"] = why
    if begins_filled(a):
        refused["left padding"] = "a saved prefix begins at position 0"
    elif a.varied(left_padding=PADDING) is None:
        refused["left padding"] = why
    elif make.padded is None:
        refused["left padding"] = "the model has no positions that count from the first real token"
    if not make.croppable:
        refused["crop"] = "the cache cannot be cropped" if drafts(a) else why
    return refused


def too_costly(model: Model, case: Case, share: float = 1) -> bool:
    """Whether a case costs more than ``share`` of `COST_LIMIT`; above the whole of it, it is run on a tiny twin."""
    n_parameters = sum(parameter.numel() for parameter in model.hf.parameters())
    limit = COST_LIMIT.get(model.device.type, COST_LIMIT["cuda"])
    return n_parameters * case.n_tokens > share * limit


def fits(model: Model, case: Case) -> bool:
    """Whether the model's context holds a case, or its rotary embedding reaches beyond it."""
    limit = model.architecture.max_positions
    return limit is None or case.n_tokens <= limit or extends(model.hf.config)


CROP_AND_CONTINUE = (Pass(), Pass(), Pass(), Pass(taken_back=3), Pass(), Pass(), Pass())
"""Four tokens, three of which are taken back, and three others in their place."""
AT_ONCE = (Pass(5), Pass(), Pass(2), Pass(4), Pass(3), Pass())
"""As a continued chat: more than a tile of 16 tokens, in passes that begin at any place in one."""
DRAFTS = (
    Pass(2, 1), Pass(), Pass(3, 3), Pass(4, 2), Pass(5, 1), Pass(), Pass(2, 2), Pass(5, 5), Pass(), Pass(4, 3), Pass(),
)  # fmt: skip
"""2 to 5 tokens in a pass, of which 1 to all are taken back, and decoding on."""
DRAFTS_AT_A_WINDOW = (Pass(3, 2), Pass(5, 5), Pass(), Pass(2, 1), Pass(5, 2), Pass())
"""Into a window from two tokens before it, back out of it, and beyond."""


class _Maker:
    """Makes cases of seeded random tokens."""

    def __init__(self, model: Model, a: Path, seed: int) -> None:
        self.a = a
        self.vocab_size = model.vocab_size
        self.windows = sorted({info.window for info in model.architecture.layers if info.window and info.window > 2})
        placed = model.backend.takes_positions or model.architecture.positional == "alibi"
        blocks = any("compressed" in info.attention for info in model.architecture.layers)  # counted from the padding
        filled = begins_filled(a)  # from position 0 on
        fits = model.architecture.n_heads > 0 and placed and not blocks and not filled
        self.padded = a.varied(left_padding=left_padding(a) + PADDING) if fits else None
        self.drafted, self.croppable = drafts(a), rewinds(a, model)
        self._generator = torch.Generator().manual_seed(seed)

    def tokens(self, n: int) -> tuple[int, ...]:
        return tuple(torch.randint(self.vocab_size, (n,), generator=self._generator).tolist())

    def case(self, name: str, n_prompt: int, steps: int, a: Path | None = None) -> Case:
        return Case(name, self.tokens(n_prompt), self.tokens(steps), steps, a or self.a)

    def plain(self) -> list[Case]:
        return [
            self.case("short prompt", SHORT, STEPS),
            self.case("one-token prompt", 1, 3),
            self.case("long prompt", 70, 2),
        ]

    def manners(self, prompt: tuple[int, ...]) -> list[Case]:
        """The same prompt in chunks, left-padded, continued by several tokens at a time, and with tokens taken back."""
        feed, padded, cases = self.tokens(7), self.padded, list[Case]()
        chunked = self.a.varied(prefill_chunk=max(min(5, len(prompt) - 1), 1))
        if chunked is not None:
            cases.append(Case("chunked prefill", prompt, feed[:2], 2, chunked, manner=CHUNKED))
        if padded is not None:  # a model without attention takes its mask in the first pass alone
            near = prompt[: max(min(self.windows, default=len(prompt) + 6) - PADDING - 3, 1)]
            cases.append(Case("left padding", near, feed[:2], 2, padded, manner=PADDED))
            if near != prompt:
                cases.append(Case("left padding beyond a window", prompt, feed[:2], 2, padded, manner=PADDED))
        if self.drafted:
            cases.append(self.passes("several tokens in a pass", prompt, AT_ONCE, SEVERAL))
        if self.croppable:
            cases.append(Case("crop and continue", prompt, feed, 7, self.a, CROP_AND_CONTINUE, CROPPED))
            cases.append(self.passes("drafted tokens taken back", prompt, DRAFTS, DRAFTED))
        return cases

    def passes(self, name: str, prompt: tuple[int, ...], passes: tuple[Pass, ...], manner: str) -> Case:
        n = sum(one.n_tokens for one in passes)
        return Case(name, prompt, self.tokens(n), n, self.a, passes, manner)

    def window(self, window: int) -> list[Case]:
        """On reaching a window, at twice its length, and in chunks and cropped beyond it."""
        cases = [
            self.case(f"on reaching the window of {window}", max(window - 2, 1), 4),
            self.case(f"beyond the window of {window}", 2 * window, 2),
        ]
        chunked = self.a.varied(prefill_chunk=window // 2 + 1)
        if chunked is not None:
            case = self.case(f"chunked prefill beyond the window of {window}", window + 5, 2, chunked)
            cases.append(replace(case, manner=CHUNKED))
        if self.drafted:
            start = self.tokens(max(window - 2, 1))
            cases.append(self.passes(f"several tokens at the window of {window}", start, (Pass(4), Pass(3)), SEVERAL))
        if self.croppable:
            name = f"drafted tokens taken back at the window of {window}"
            cases.append(self.passes(name, start, DRAFTS_AT_A_WINDOW, DRAFTED))
            case = self.case(f"crop beyond the window of {window}", window + 2, 7)
            cases.append(replace(case, passes=CROP_AND_CONTINUE, manner=CROPPED))
        return cases
