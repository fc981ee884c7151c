"""What is written, and where: a `Patch`, and a `Cell` of patches that are written together."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any, Literal, SupportsIndex

from kvdrift.errors import InputError, SiteError
from kvdrift.models.sites import BLOCK_SITES, GLOBAL_SITES, HEAD_SITES, parse_sites
from kvdrift.patching.schedule import Schedule

KV = "kv"
"""Keys and values together."""
PATCH_SITES = (*GLOBAL_SITES, *BLOCK_SITES, *HEAD_SITES, KV)
Positions = Literal["current", "past", "all"] | Sequence[int] | int | None
Write = Literal["cache", "read"]


@dataclass(frozen=True)
class Patch:
    """A site of the recipient at which the donor's values are written.

    Parameters
    ----------
    site
        ``embed``, ``resid_pre``, ``attn_out``, ``resid_mid``, ``mlp_out``, ``resid_post``, ``final_norm``, ``q``,
        ``k``, ``v``, ``z``, or ``kv`` for keys and values together; also a full name such as
        ``blocks.5.hook_resid_post``.
    layers
        Layer numbers (negative ones count from the end); all that have the site by default.
    heads
        Query heads at ``q`` and ``z``, KV heads at ``k``, ``v`` and ``kv``; all by default.
    positions
        At residual sites, ``q`` and ``z``: ``"current"`` (the default), ``"all"`` of the pass, or absolute positions.
        At ``k``, ``v`` and ``kv``: ``"past"`` (the default: every position before the current one that both
        paths read and the layer's window shows), ``"all"`` (the current one too), or absolute positions.
    schedule
        A `Schedule` or its text; ``"persistent"`` by default.
    write
        For ``k``, ``v`` and ``kv``: ``"cache"`` overwrites the entries of the recipient's cache, which stay;
        ``"read"`` changes what the kernel reads at that step only. By default ``"cache"`` where the recipient has
        one (``"read"`` at ``positions="all"``: the current position is not in the cache yet).

    Raises
    ------
    SiteError, InputError
        If the site is none, or an argument is empty, repeated or does not fit the site.

    Examples
    --------
    >>> import kvdrift as kd
    >>> kd.Patch("kv", layers=5, schedule="one_shot(3)")
    Patch(kv, layers 5, one_shot(3))
    >>> kd.Patch("blocks.5.attn.hook_v", heads=[0, 1])
    Patch(v, layers 5, heads 0 1, persistent)
    """

    site: str
    layers: tuple[int, ...] | None = None
    heads: tuple[int, ...] | None = None
    positions: str | tuple[int, ...] | None = None
    schedule: Schedule = field(default_factory=Schedule.persistent)
    write: Write | None = None

    def __init__(
        self,
        site: str,
        layers: Iterable[SupportsIndex] | SupportsIndex | None = None,
        heads: Iterable[SupportsIndex] | SupportsIndex | None = None,
        positions: Positions = None,
        schedule: Schedule | str = "persistent",
        write: Write | None = None,
    ) -> None:
        parsed, named = _site(site)
        if named is not None and layers is not None:
            raise SiteError(f"{site} names its layer already; leave out layers=.")
        chosen = {
            "site": parsed,
            "layers": _numbers("layers", named if layers is None else layers),
            "heads": _numbers("heads", heads),
            "positions": positions if isinstance(positions, str) else _numbers("positions", positions),
            "schedule": Schedule.parse(schedule),
            "write": write,
        }
        for name, value in chosen.items():
            object.__setattr__(self, name, value)
        self._check()

    def _check(self) -> None:
        if self.heads is not None and self.site not in (*HEAD_SITES, KV):
            raise SiteError(f"heads={list(self.heads)}: {self.site!r} has no heads; leave them out.")
        if self.layers is not None and self.site in GLOBAL_SITES:
            raise SiteError(f"layers={list(self.layers)}: {self.site!r} exists once in a model; leave them out.")
        allowed = ("past", "all") if self.is_kv else ("current", "all")
        if isinstance(self.positions, str) and self.positions not in allowed:
            raise InputError(
                f"positions={self.positions!r}: at {self.site!r} choose {allowed[0]!r}, {allowed[1]!r} or absolute "
                "positions."
            )
        if isinstance(self.positions, tuple) and min(self.positions) < 0:
            raise InputError(f"positions={list(self.positions)}: absolute positions count from 0.")
        if self.write not in (None, "cache", "read"):
            raise InputError(f"write={self.write!r}: choose 'cache' or 'read'.")
        if self.write is not None and not self.is_kv:
            raise InputError(f"write={self.write!r} is for k, v and kv; at {self.site!r} there is one way only.")
        if self.write == "cache" and self.positions == "all":
            raise InputError(
                "write='cache' overwrites entries before the current position; positions='all' needs write='read'."
            )

    @property
    def is_kv(self) -> bool:
        """Whether keys or values are written."""
        return self.site in ("k", "v", KV)

    @property
    def sites(self) -> tuple[str, ...]:
        """The sites written: ``kv`` is two."""
        return ("k", "v") if self.site == KV else (self.site,)

    @property
    def beyond_current(self) -> bool:
        """Whether a residual site, ``q`` or ``z`` is written at other positions than the current one."""
        return not self.is_kv and self.positions not in (None, "current")

    @property
    def label(self) -> str:
        """A short name for tables and figures."""
        parts = [self.site]
        for name, numbers in (("layers", self.layers), ("heads", self.heads)):
            if numbers is not None:
                parts.append(f"{name} {' '.join(map(str, numbers))}")
        if self.positions is not None:
            at = self.positions if isinstance(self.positions, str) else " ".join(map(str, self.positions))
            parts.append(f"positions {at}")
        if self.write is not None:
            parts.append(f"write {self.write}")
        return ", ".join([*parts, str(self.schedule)])

    def __repr__(self) -> str:
        return f"Patch({self.label})"

    def to_dict(self) -> dict[str, Any]:
        """Plain data that JSON can hold; see `from_dict`."""
        return {
            "site": self.site,
            "layers": self.layers,
            "heads": self.heads,
            "positions": self.positions,
            "schedule": str(self.schedule),
            "write": self.write,
        }

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Patch:
        """Make a patch from `to_dict`."""
        return cls(**values)


@dataclass(frozen=True)
class Cell:
    """Patches that are written together: one row of a table, one cell of a heatmap."""

    label: str
    patches: tuple[Patch, ...]

    @property
    def first(self) -> int:
        """The first step at which something is written."""
        return min(patch.schedule.first for patch in self.patches)

    def covers(self, step: int) -> bool:
        """Whether something is written at ``step``."""
        return any(patch.schedule.covers(step) for patch in self.patches)

    def trivial(self, n_layers: int, steps: Iterable[int]) -> bool:
        """Whether the donor's logits follow by construction: its last residual is written at each of ``steps``."""
        final = [patch.schedule for patch in self.patches if _is_last_residual(patch, n_layers)]
        return all(any(schedule.covers(step) for schedule in final) for step in steps)


def _is_last_residual(patch: Patch, n_layers: int) -> bool:
    """Whether a patch writes what the LM head reads of the current position."""
    if patch.positions not in (None, "current", "all"):
        return False
    last = patch.layers is None or bool({-1, n_layers - 1} & set(patch.layers))
    return patch.site == "final_norm" or (patch.site == "resid_post" and last)


def as_cell(patches: Patch | str | Iterable[Patch | str], label: str | None = None) -> Cell:
    """One cell of one or several patches; a bare site name is a persistent patch at all its layers.

    Raises
    ------
    InputError
        If there is none, or something that is no patch.
    """
    if isinstance(patches, (Patch, str)) or not isinstance(patches, Iterable):
        patches = [patches]
    given = list(patches)
    if not given:
        raise InputError("There is no patch; give at least one kd.Patch.")
    made = tuple(Patch(patch) if isinstance(patch, str) else patch for patch in given)
    for patch in made:
        if not isinstance(patch, Patch):
            raise InputError(f"{patch!r} is no patch; give a kd.Patch, such as kd.Patch('kv', layers=5).")
    return Cell(label or " + ".join(patch.label for patch in made), made)


def _site(name: str) -> tuple[str, list[int] | None]:
    if name == KV:
        return KV, None
    try:
        ((site, layers),) = parse_sites(name).items()
    except SiteError:
        site, layers = name, None
    if site not in PATCH_SITES:
        raise SiteError(
            f"{site!r} cannot be patched; choose among {', '.join(PATCH_SITES)}, or a full name such as "
            "blocks.5.hook_resid_post."
        )
    return site, None if layers is None else sorted(layers)


def _numbers(name: str, given: Iterable[SupportsIndex] | SupportsIndex | None) -> tuple[int, ...] | None:
    if given is None:
        return None
    numbers = [given] if isinstance(given, Integral) else list(given)  # type: ignore[arg-type]
    whole = all(isinstance(n, Integral) and not isinstance(n, bool) for n in numbers)
    if not numbers or not whole or len(set(numbers)) < len(numbers):
        raise InputError(f"{name}={numbers}: give whole numbers, each once, or leave it out for all.")
    return tuple(int(n) for n in numbers)
