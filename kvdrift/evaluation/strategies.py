"""How the next token is chosen: greedy, temperature, top-k, top-p, with noise that both paths share.

Sampling is written as an argmax (the Gumbel-max trick: Gumbel noise added to log-probabilities; Maddison, Tarlow and
Minka, "A* Sampling", 2014). The noise depends on the seed, the item and the step alone, so that two paths, two
runs and two machines draw the same: where their tokens differ, their logits did.
"""

from __future__ import annotations

import hashlib
import math
import re
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np
import torch
from torch import Tensor
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from kvdrift.errors import InputError
from kvdrift.shapes import Logits

USUAL_TEMPERATURE, USUAL_K, USUAL_P = 0.7, 50, 0.9
_NUMBER = r"(\d+(?:\.\d*)?(?:e[+-]?\d+)?|\.\d+)"
_WORDS = re.compile(rf"(greedy|temperature|top-k|top-p)(?:[ =:]{_NUMBER})?(?: ?(?:at|@) ?{_NUMBER})?")


class Decision(Protocol):
    """Scores of every token at one step, the highest of which is taken: a `kvdrift.paths.sampling.Sampler` that shows
    them."""

    def scores(self, logits: Logits, step: int) -> Logits:
        """What decides: ``[vocab]`` float32 or float64, −inf for a token that is ruled out."""
        ...

    def __call__(self, logits: Logits, step: int) -> int:
        """The next token."""
        ...


class Strategy(Protocol):
    """A way to choose tokens. One of your own is a small class with these members."""

    @property
    def label(self) -> str:
        """What tables and figures call it; the same label means the same numbers."""
        ...

    def sampler(self, seed: int, item: str) -> Decision:
        """The sampler of one text."""
        ...


@dataclass(frozen=True)
class Greedy:
    """The most likely token, the first of several equal ones.

    Examples
    --------
    >>> import torch
    >>> import kvdrift as kd
    >>> kd.Greedy().sampler(0, "item")(torch.tensor([0.0, 2.0, 1.0]), 0)
    1
    """

    label: str = "greedy"

    def sampler(self, seed: int, item: str) -> Decision:
        """The same for every seed and item."""
        return _Argmax()


class _Argmax:
    def scores(self, logits: Tensor, step: int) -> Tensor:
        return logits.float()

    def __call__(self, logits: Tensor, step: int) -> int:
        return int(self.scores(logits, step).argmax())


@dataclass(frozen=True)
class Temperature:
    """Draw from the softmax of logits divided by a temperature.

    Parameters
    ----------
    temperature
        Above 0; 1 leaves the distribution alone, less sharpens it.

    Examples
    --------
    >>> import torch
    >>> import kvdrift as kd
    >>> draw = kd.Temperature(0.7).sampler(seed=0, item="q1")
    >>> logits = torch.tensor([0.0, 2.0, 1.0])
    >>> draw(logits, 3) == draw(logits, 3)
    True
    """

    temperature: float = 1.0

    def __post_init__(self) -> None:
        _check_temperature(self.temperature)

    @property
    def label(self) -> str:
        """``"temperature 0.7"``."""
        return f"temperature {_exact(self.temperature)}"

    def sampler(self, seed: int, item: str) -> Decision:
        """The sampler of one text."""
        return _Draw(LogitsProcessorList(_temperature(self.temperature)), seed, item)


@dataclass(frozen=True)
class TopK:
    """Draw from the ``k`` most likely tokens (more where several are equal to the last of them).

    Parameters
    ----------
    k
        How many.
    temperature
        Applied first, as ``generate`` does.
    """

    k: int
    temperature: float = 1.0

    def __post_init__(self) -> None:
        if not isinstance(self.k, int) or isinstance(self.k, bool) or self.k < 1:
            raise InputError(f"TopK(k={self.k!r}): give a whole number of at least 1.")
        _check_temperature(self.temperature)

    @property
    def label(self) -> str:
        """``"top-k 50"``, with the temperature if it is not 1."""
        return f"top-k {self.k}{_at(self.temperature)}"

    def sampler(self, seed: int, item: str) -> Decision:
        """The sampler of one text."""
        return _Draw(LogitsProcessorList([*_temperature(self.temperature), TopKLogitsWarper(self.k)]), seed, item)


@dataclass(frozen=True)
class TopP:
    """Draw from the smallest set of most likely tokens whose probability is at least ``p`` (nucleus sampling).

    Parameters
    ----------
    p
        Above 0, at most 1.
    temperature
        Applied first, as ``generate`` does.
    """

    p: float
    temperature: float = 1.0

    def __post_init__(self) -> None:
        if not _is_number(self.p) or not 0 < self.p <= 1:
            raise InputError(f"TopP(p={self.p!r}): give a probability above 0 and at most 1.")
        _check_temperature(self.temperature)

    @property
    def label(self) -> str:
        """``"top-p 0.9"``, with the temperature if it is not 1."""
        return f"top-p {_exact(self.p)}{_at(self.temperature)}"

    def sampler(self, seed: int, item: str) -> Decision:
        """The sampler of one text."""
        return _Draw(LogitsProcessorList([*_temperature(self.temperature), TopPLogitsWarper(self.p)]), seed, item)


def parse(text: str) -> Strategy:
    """Read a strategy in words: the label of one, or its name alone for the usual value.

    Raises
    ------
    InputError
        If there is no such strategy.

    Examples
    --------
    >>> parse("top-k"), parse("top-p 0.95 at 0.7"), parse("temperature 0.5").label
    (TopK(k=50, temperature=1.0), TopP(p=0.95, temperature=0.7), 'temperature 0.5')
    """
    found = _WORDS.fullmatch(text.strip())
    if (
        found is None
        or (found[1] == "greedy" and (found[2] or found[3]))
        or (found[1] == "temperature" and found[3])
        or (found[1] == "top-k" and found[2] and not found[2].isdecimal())
    ):
        raise InputError(
            f"There is no strategy {text!r}; write 'greedy', 'temperature 0.7', 'top-k 50' or 'top-p 0.9', the last "
            "two also with a temperature: 'top-p 0.9 at 0.7'."
        )
    name, value, temperature = found[1], found[2], float(found[3] or 1)
    if name == "greedy":
        return Greedy()
    if name == "temperature":
        return Temperature(float(value or USUAL_TEMPERATURE))
    if name == "top-k":
        return TopK(int(value or USUAL_K), temperature)
    return TopP(float(value or USUAL_P), temperature)


class _Draw:
    """The argmax of processed logits plus Gumbel noise.

    Logits are processed in float32, as ``generate`` does; the noise and the sum are in float64.
    """

    def __init__(self, processors: LogitsProcessorList, seed: int, item: str) -> None:
        self.processors, self.seed, self.item = processors, seed, item

    @cached_property
    def _key(self) -> int:
        digest = hashlib.sha256(f"{self.seed}|{self.item}".encode()).digest()
        return int.from_bytes(digest[:16], "little")

    def noise(self, step: int, n: int) -> np.ndarray:
        """Standard Gumbel noise ``[n]`` of one step."""
        return np.random.Generator(np.random.Philox(key=self._key, counter=step << 128)).gumbel(size=n)

    def scores(self, logits: Tensor, step: int) -> Tensor:
        processed = self.processors(None, logits.float().cpu()[None])[0].double()  # type: ignore[arg-type]
        return processed + torch.from_numpy(self.noise(step, len(processed)))

    def __call__(self, logits: Tensor, step: int) -> int:
        return int(self.scores(logits, step).argmax())


def _temperature(value: float) -> list[TemperatureLogitsWarper]:
    return [] if value == 1 else [TemperatureLogitsWarper(float(value))]


def _at(temperature: float) -> str:
    return "" if temperature == 1 else f" at {_exact(temperature)}"


def _exact(value: float) -> str:
    """The shortest text that reads back as the same number."""
    return repr(float(value)).removesuffix(".0")


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _check_temperature(value: float) -> None:
    if not _is_number(value) or not 0 < value < math.inf:
        raise InputError(f"temperature={value!r}: give a number above 0; for the limit at 0 use Greedy().")
