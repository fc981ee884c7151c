"""What a model can give: which sites it has, where they are read, and why others are missing."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor, nn

from kvdrift.errors import SiteError
from kvdrift.models.sites import ALL_SITES, GLOBAL_SITES, HEAD_SITES, LOGITS, PATTERN


@dataclass(frozen=True)
class Place:
    """Where a residual site is read: a module's input or output, times ``scale`` (a residual multiplier).

    Attributes
    ----------
    module, kind, scale
        What is read there.
    axes
        Which axes of the module's tensor are those of the batch and of the tokens. All others are features: several
        streams are one row beside each other.
    """

    module: nn.Module
    kind: Literal["input", "output"]
    scale: float = 1.0
    axes: tuple[int, int] = (0, 1)

    def rows(self, value: Tensor) -> Tensor:
        """The module's tensor as ``[batch, token, feature]``: itself, a view of it or a copy."""
        if self.axes == (0, 1) and value.ndim == 3:  # as it is nearly everywhere
            return value
        moved = value.movedim(self.axes, (0, 1))
        return moved if moved.ndim == 3 else moved.flatten(2)

    def unrows(self, rows: Tensor, like: Tensor) -> Tensor:
        """Undo `rows`, into the shape of ``like``."""
        moved = like.movedim(self.axes, (0, 1))
        return rows.reshape(moved.shape).movedim((0, 1), self.axes)


@dataclass(frozen=True)
class Coverage:
    """The sites that a model gives, and one sentence for each that it does not.

    Attributes
    ----------
    places
        Residual site → layer → where it is read. ``embed`` and ``final_norm`` sit under layer 0.
    attention_layers
        Layers whose attention goes through transformers' attention table (``q``, ``k``, ``v``, ``z``).
    has_pattern
        Whether attention weights come out (eager attention).
    n_layers
        How many blocks there are.
    reasons
        Site → why it is missing, in all or some layers.
    table_layers
        Layers that call transformers' attention table, however often → whether every call reads one key per token.
    remarks
        Sentences on what the model's backend does otherwise than transformers.
    """

    places: dict[str, dict[int, Place]]
    attention_layers: tuple[int, ...]
    has_pattern: bool
    n_layers: int
    reasons: dict[str, str] = field(default_factory=dict)
    table_layers: dict[int, bool] = field(default_factory=dict)
    remarks: tuple[str, ...] = ()

    def layers(self, site: str) -> tuple[int, ...]:
        """The layers that have ``site`` (``(0,)`` for a site that exists once, empty where it is missing)."""
        if site == LOGITS:
            return (0,)
        if site in HEAD_SITES or (site == PATTERN and self.has_pattern):
            return self.attention_layers
        return tuple(sorted(self.places.get(site, {})))

    @property
    def sites(self) -> tuple[str, ...]:
        """The sites that at least one layer has."""
        return tuple(site for site in ALL_SITES if self.layers(site))

    def resolve(self, site: str, layers: frozenset[int] | None) -> tuple[int, ...]:
        """The layers of ``site`` among ``layers``.

        Raises
        ------
        SiteError
            If none of them has it, with the reason.
        """
        have = self.layers(site)
        chosen = have if layers is None or site in (*GLOBAL_SITES, LOGITS) else tuple(x for x in have if x in layers)
        if not chosen:
            reason = self.reasons.get(site, "no layer that was asked for has it")
            raise SiteError(f"This model does not give {site!r}: {reason}. It gives {', '.join(self.sites)}.")
        return chosen

    @property
    def notes(self) -> tuple[str, ...]:
        """The remarks, and one sentence per reason why sites are missing (the pattern aside: eager alone gives it)."""
        sites: dict[str, list[str]] = {}
        for site, reason in self.reasons.items():
            if site != PATTERN:
                sites.setdefault(reason, []).append(site)
        return *self.remarks, *(f"not given: {', '.join(names)} ({reason})" for reason, names in sites.items())

    def __str__(self) -> str:
        return "\n".join([f"sites: {', '.join(self.sites)}", *self.notes])

    __repr__ = __str__
