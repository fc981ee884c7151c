"""One condition of an evaluation (a model and a strategy): both paths' numbers, paired, with the null beside them."""

from __future__ import annotations

from dataclasses import dataclass

from kvdrift.statistics.paired import Difference
from kvdrift.statistics.rates import Rate
from kvdrift.statistics.survival import Incidence


@dataclass(frozen=True)
class NullNumbers:
    """The same table for path a against its re-rolls: what the order of summation alone does, per replicate.

    Attributes
    ----------
    differences
        Accuracy of path a minus that of the re-roll, ``[replicate]``.
    divergence
        Share of texts that left path a's, ``[replicate]``.
    gold
        Mean over items of the gold log-probability of path a minus the re-roll's, nats, ``[replicate]``.
    refused
        Why this null says nothing (its drift is zero), or None.
    p_divergence, p_difference, p_gold
        Share of the null at least as extreme as path b, ``(1 + #) / (1 + replicates)``: of the divergence rate
        (one-sided, as high), of the accuracy difference and of the gold difference (two-sided, as far from zero). NaN
        if refused.
    """

    differences: tuple[float, ...]
    divergence: tuple[float, ...]
    gold: tuple[float, ...]
    refused: str | None
    p_divergence: float
    p_difference: float
    p_gold: float


@dataclass(frozen=True)
class Condition:
    """One strategy of one model.

    Attributes
    ----------
    model, strategy
        Which.
    n_items, n_seeds
        Over how many.
    accuracy_a, accuracy_b
        Share of right answers of each path.
    difference
        Accuracy a − b, paired over items.
    only_a, only_b
        Answer flips: trials that only path a, or only path b, answered rightly.
    test
        ``"McNemar"`` (exact, one seed) or ``"sign flip"`` (a permutation over items, several seeds).
    p, p_holm
        Of no systematic direction; raw, and after Holm over the conditions. NaN without answers.
    enough
        Whether the discordant items are so many that the test could reach 5 % at all.
    detectable
        The smallest true accuracy difference that this many items, with as many discordant ones as seen, would show
        with 80 % power; None if no difference could.
    divergence
        Share of texts in which b left a.
    incidence
        The same by token number.
    invalid_a, invalid_b
        Texts without an answer to extract.
    truncated_a, truncated_b
        Texts cut off at ``max_new_tokens``.
    gold
        Mean over items of the gold text's log-probability, a − b, nats; None if not asked for. It does not depend on
        the strategy.
    null
        None if no re-rolls ran.
    """

    model: str
    strategy: str
    n_items: int
    n_seeds: int
    accuracy_a: Rate
    accuracy_b: Rate
    difference: Difference
    only_a: int
    only_b: int
    test: str
    p: float
    p_holm: float
    enough: bool
    detectable: float | None
    divergence: Rate
    incidence: Incidence
    invalid_a: int
    invalid_b: int
    truncated_a: int
    truncated_b: int
    gold: Difference | None
    null: NullNumbers | None

    @property
    def scored(self) -> bool:
        """Whether both paths have answers."""
        return self.accuracy_a.n > 0 and self.accuracy_b.n > 0


@dataclass(frozen=True)
class Overall:
    """One path against the other over all conditions of one or several evaluations of the same items.

    Attributes
    ----------
    n_conditions, n_items
        Models × strategies, and the items that all have.
    a_higher, b_higher
        In how many conditions path a, or path b, scored higher.
    discordant
        Items whose differences do not cancel.
    p
        Of the item-level sign-flip test; NaN without answers.
    enough
        Whether so many discordant items could reach 5 % at all.
    null_a_higher
        In how many conditions path a scored higher than its re-roll, per replicate.
    null_share
        ``(1 + #) / (1 + replicates)`` of the replicates in which as many conditions (or more) favoured one arm as do
        here; NaN without a null.
    """

    n_conditions: int
    n_items: int
    a_higher: int
    b_higher: int
    discordant: int
    p: float
    enough: bool
    null_a_higher: tuple[int, ...]
    null_share: float
