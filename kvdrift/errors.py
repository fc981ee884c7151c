"""Everything kvdrift refuses to do, as one small family of exceptions.

Each message says what was given, what was expected and what to do about it, in one sentence that can be
shown to a person as it is: the command line prints it without a traceback.
"""

import os
import traceback


class KvdriftError(Exception):
    """Base of every error that kvdrift raises on purpose."""


class InputError(KvdriftError, ValueError):
    """An argument cannot be used: an empty prompt, an unknown metric, tokens beyond the context."""


class StaleCacheError(InputError):
    """A new run was given a cache that holds tokens of another one."""


class ModelError(KvdriftError):
    """The model cannot be loaded or cannot be driven as a decoder language model."""


class WeightsError(KvdriftError):
    """Pretrained weights cannot be fetched, verified, written or read."""


class SiteError(KvdriftError, KeyError):
    """A site was asked for that this model does not have."""

    def __str__(self) -> str:  # KeyError would print the repr of the message
        return str(self.args[0]) if self.args else ""


class NonFiniteError(KvdriftError, ArithmeticError):
    """NaN or infinity appeared in a forward pass."""


class NotFaithfulError(KvdriftError):
    """Tracing would change a bit of what it observes, so nothing was measured."""


class MemoryBudgetError(KvdriftError, MemoryError):
    """A recording would not fit in the memory allowed for it."""


class FileError(KvdriftError, OSError):
    """A file cannot be written, or is truncated, edited or of another schema."""


class InternalError(KvdriftError):
    """kvdrift itself failed, where the model by itself runs: a fault of kvdrift, to be reported.

    The error that happened is its cause (``raise … from error``).

    Examples
    --------
    >>> print(InternalError.of(IndexError("list index out of range"), "while it watched tiny-llama"))
    kvdrift itself failed while it watched tiny-llama (IndexError: list index out of range); this is a fault of \
kvdrift and says nothing about the model: please report this sentence with the model's class and configuration.
    """

    @classmethod
    def of(cls, error: BaseException, when: str) -> "InternalError":
        """The sentence about ``error``, with the line of code that raised it where there is one."""
        return cls(
            f"kvdrift itself failed {when} ({type(error).__name__}: {one_line(error)}{_raised_at(error)}); this is a "
            "fault of kvdrift and says nothing about the model: please report this sentence with the model's class "
            "and configuration."
        )


def one_line(error: BaseException) -> str:
    """What an error says, on one line and without a full stop."""
    return " ".join(str(error).split()).rstrip(".")


def _raised_at(error: BaseException) -> str:
    """The innermost line of kvdrift's own code that an error passed; empty if it passed none."""
    package, found = os.path.dirname(__file__), ""
    for frame, line in traceback.walk_tb(error.__traceback__):
        path = frame.f_code.co_filename
        if path.startswith(package + os.sep):
            found = f", at kvdrift/{os.path.relpath(path, package)}:{line}"
    return found
