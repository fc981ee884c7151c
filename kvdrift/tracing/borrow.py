"""Feeding a pass the inputs of another path, layer by layer, so that what is left is each layer's own work."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from kvdrift.models.model import Model
from kvdrift.tracing.tap import Values
from kvdrift.tracing.writer import Index, SiteEditor

KeyPositions = Callable[[int, int], Sequence[int]]
"""``(layer, n_keys)`` → the absolute position of each key."""


def shared_positions(a: Sequence[int], b: Sequence[int], before: int, since: int = 0) -> tuple[Index, Index]:
    """Where the positions that two paths both read sit in each of them.

    Parameters
    ----------
    a, b
        Absolute positions of the keys of each path, by slot.
    before, since
        Only positions from ``since`` on, ahead of ``before``.

    Returns
    -------
    in_a, in_b
        Indices of the same positions in ``a`` and in ``b``, in the same order; slices where both are ranges.

    Examples
    --------
    >>> shared_positions(range(2, 6), range(0, 6), before=5)
    (slice(0, 3, None), slice(2, 5, None))
    """
    if isinstance(a, range) and isinstance(b, range):
        start = max(a.start, b.start, since)
        stop = max(min(a.stop, b.stop, before), start)
        return slice(start - a.start, stop - a.start), slice(start - b.start, stop - b.start)
    place = {position: slot for slot, position in enumerate(b) if since <= position < before}
    pairs = [(slot, place[position]) for slot, position in enumerate(a) if position in place]
    return [slot for slot, _ in pairs], [slot for _, slot in pairs]


class Borrow(SiteEditor):
    """Makes every block read a donor's inputs during a pass.

    At the current position each block's residual input becomes the donor's ``resid_pre``; what the attention
    kernel reads at earlier positions becomes the donor's ``k`` and ``v``, aligned by absolute position. The
    block's own keys and values of the current position stay its own work.

    Parameters
    ----------
    model
        The recipient.
    donor
        The donor's live values: ``resid_pre`` at the current position ``[1, d_model]``, and ``k``, ``v`` as its
        kernel read them ``[1, kv_head, key, feature]``.
    donor_keys, own_keys
        ``(layer, n_keys)`` → absolute positions of the keys that a kernel reads, for donor and recipient.
    position
        The current position, which stays the recipient's own work.
    """

    def __init__(
        self,
        model: Model,
        donor: Values,
        donor_keys: KeyPositions,
        own_keys: KeyPositions,
        position: int,
    ) -> None:
        inside = donor.get("k", {})
        super().__init__(model, {"resid_pre": range(len(model.tree.blocks)), "k": inside, "v": inside})
        self.donor, self.position = donor, position
        self.donor_keys, self.own_keys = donor_keys, own_keys

    def edit(self, site: str, layer: int, own: Tensor) -> Tensor:
        """The donor's residual at the current position, or the past keys and values of the donor."""
        given = self.donor[site][layer]
        if site == "resid_pre":
            own[:, -1] = given.to(own.device)
            return own
        return self._past(own, given, layer)

    def _past(self, own: Tensor, given: Tensor, layer: int) -> Tensor:
        """``own`` with every position before the current one that both read taken from ``given``."""
        to, source = shared_positions(
            self.own_keys(layer, own.shape[2]), self.donor_keys(layer, given.shape[2]), before=self.position
        )
        changed = own.clone()
        changed[:, :, to] = given[:, :, source].to(own.device)
        return changed
