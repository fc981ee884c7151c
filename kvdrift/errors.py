"""Everything kvdrift refuses to do, as one small family of exceptions.

Each message says what was given, what was expected and what to do about it, in one sentence that can be
shown to a person as it is: the command line prints it without a traceback.
"""


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
