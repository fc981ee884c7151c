"""How the arrays of a drift are named and laid out: the one place that knows, and the views by which others ask."""

from __future__ import annotations

import numpy as np

from kvdrift.errors import SiteError
from kvdrift.models.sites import BLOCK_SITES, HEAD_SITES

Arrays = dict[str, np.ndarray]
"""Name → array."""
RESIDUAL_SITES = ("embed", *BLOCK_SITES, "final_norm")
"""In the order of the forward pass."""
FLOORS = ("floor", "local_floor")
"""The kinds of values with a leading ``seed`` axis."""
LOCAL = ("local", "local_floor")
"""The kinds of values whose layer axis is that of the local arrays."""
_STEPS, _POSITION_STEPS, _LAYERS = "steps", "positions/steps", "layers/"
_ALONE = {
    _STEPS: ("step",), _POSITION_STEPS: ("kept",), "fed": ("prompt", "token"), "n_steps": ("prompt",),
    **dict.fromkeys(("measured", "top1_a", "top1_b"), ("prompt", "step")),
}  # fmt: skip
"""Arrays of no site → their axes."""


def array_name(of: str, site: str, metric: str) -> str:
    """The name of the array of one kind, site and metric.

    Examples
    --------
    >>> array_name("drift", "resid_post", "rel_l2")
    'drift/resid_post/rel_l2'
    """
    return f"{of}/{site}/{metric}"


def layers_name(site: str) -> str:
    """The name of the layer numbers of a site, or of ``"local"``."""
    return f"{_LAYERS}{site}"


def axes_of(name: str) -> tuple[str, ...]:
    """The axes of an array; a layer axis is named after what it numbers.

    Examples
    --------
    >>> axes_of("floor/k/rel_l2")
    ('seed', 'prompt', 'step', 'layer of k', 'kv_head')
    """
    if name in _ALONE:
        return _ALONE[name]
    of, site, *_ = f"{name}/".split("/")
    if f"{of}/" == _LAYERS:
        return (f"layer of {site}",)
    seed = ("seed",) if of in FLOORS else ()
    layer = () if site in ("embed", "final_norm", "logits") else (f"layer of {'local' if of in LOCAL else site}",)
    head = ("kv_head",) if site in ("k", "v") else ("head",) if site in ("q", "z") else ()
    if of == "positions":
        return ("prompt", "kept", *layer, *head, "position")
    return (*seed, "prompt", "step", *layer, *head)


def is_known(name: str) -> bool:
    """Whether an array is one of those that `Views` describes; a drift may carry others."""
    return name in _ALONE or "/" in name


def prompt_axis(name: str) -> int | None:
    """Which axis of an array counts prompts; None for coordinates, which all prompts share.

    Examples
    --------
    >>> prompt_axis("drift/q/cosine"), prompt_axis("floor/resid_post/rel_l2"), prompt_axis("layers/k")
    (0, 1, None)
    """
    axes = axes_of(name)
    return axes.index("prompt") if "prompt" in axes else None


def grows(name: str) -> bool:
    """Whether coordinates go on with the length of a run: the numbers of steps, not those of layers."""
    return name in (_STEPS, _POSITION_STEPS)


class Views:
    """The arrays of a drift by what they are; ``arrays`` itself is for its file.

    ``arrays`` is a flat mapping from a name to an array. ``steps [step]`` holds the numbers of the measured steps and
    ``measured [prompt, step]`` says where there is a value (elsewhere floats are NaN, integers -1).
    ``drift/{site}/{metric}`` is ``[prompt, step, layer]`` for residual sites, ``[prompt, step]`` for
    ``embed`` and ``final_norm``, ``[prompt, step, layer, head]`` for ``q``, ``k``, ``v``, ``z``;
    ``drift/logits/{metric}`` is ``[prompt, step]``. ``local/…`` is laid out alike; ``floor/…`` and
    ``local_floor/…`` have a leading ``seed`` axis. ``self_a/{k|v}/rel_l2`` and ``self_b/…`` are laid out like drift.
    ``layers/{site} [layer]`` numbers a layer axis, ``layers/local [layer]`` that of the local arrays.
    ``positions/{k|v}/rel_l2 [prompt, kept, layer, kv_head, position]`` is kept at ``positions/steps``, and
    ``positions/visible_{a|b} [prompt, kept, layer, position]`` says what each path reads there. ``fed [prompt, token]``
    is the token both paths were fed after each step, ``top1_a`` and ``top1_b [prompt, step]`` what each would have
    chosen, ``n_steps [prompt]`` how many steps were walked.
    """

    arrays: Arrays

    @property
    def steps(self) -> np.ndarray:
        """Numbers of the measured steps, int ``[step]``."""
        return self.arrays[_STEPS]

    @property
    def measured(self) -> np.ndarray:
        """Where there is a value, bool ``[prompt, step]``."""
        return self.arrays["measured"]

    @property
    def counted(self) -> np.ndarray:
        """The cells that statistics use: measured, at steps ≥ 1, bool ``[prompt, step]``."""
        return self.measured & (self.steps >= 1)

    @property
    def fed(self) -> np.ndarray:
        """The token that both paths were fed after each step, measured or not, int ``[prompt, token]``; then -1."""
        return self.arrays["fed"]

    @property
    def n_steps(self) -> np.ndarray:
        """How many steps both paths went, measured or not, int ``[prompt]``."""
        return self.arrays["n_steps"]

    @property
    def flips(self) -> np.ndarray:
        """Where the two paths' best tokens differ, bool ``[prompt, step]``; False where nothing was measured."""
        return (self.top1("a") != self.top1("b")) & self.measured

    def top1(self, path: str) -> np.ndarray:
        """The best token of path ``"a"`` or ``"b"``, int ``[prompt, step]``; -1 where nothing was measured."""
        return self.arrays[f"top1_{path}"]

    @property
    def position_steps(self) -> np.ndarray:
        """Numbers of the steps at which K/V were kept position by position, int ``[kept]``; empty if they were not."""
        return self.arrays.get(_POSITION_STEPS, np.empty(0, dtype=np.int64))

    def visible(self, path: str) -> np.ndarray:
        """Which positions path ``"a"`` or ``"b"`` reads, bool ``[prompt, kept, layer, position]``."""
        return self.arrays[f"positions/visible_{path}"]

    @property
    def sites(self) -> tuple[str, ...]:
        """Sites with drift, in the order of the forward pass."""
        return tuple(site for site in (*RESIDUAL_SITES, *HEAD_SITES) if self.has(site))

    def layers(self, site: str, of: str = "drift") -> np.ndarray:
        """Layer numbers along the layer axis of ``site``, int ``[layer]``; empty for sites without one.

        Those of ``of="local"`` and ``"local_floor"`` may be fewer.
        """
        name = layers_name("local" if of in LOCAL else site)
        if of in LOCAL and name not in self.arrays:
            return self.layers(site)
        return self.arrays.get(name, np.empty(0, dtype=np.int64))

    def values(self, site: str, metric: str = "rel_l2", of: str = "drift") -> np.ndarray:
        """One array by site, metric and kind.

        Parameters
        ----------
        site
            A site of `sites`, or ``"logits"``.
        metric
            One of ``rel_l2, max_abs, max_ulp, cosine, identical`` at sites, or a logit metric.
        of
            ``"drift"``, ``"floor"``, ``"local"``, ``"local_floor"``, ``"self_a"``, ``"self_b"`` or, for ``k`` and
            ``v``, ``"positions"``.

        Raises
        ------
        SiteError
            If this drift has no such array; the sentence lists what there is.
        """
        name = array_name(of, site, metric)
        if name not in self.arrays:
            have = ", ".join(sorted(array_name(of, *pair) for pair in self.pairs(of))) or "nothing"
            raise SiteError(f"This drift has no {name!r}; under {of!r} it has {have}.")
        return self.arrays[name]

    def has(self, site: str, metric: str = "rel_l2", of: str = "drift") -> bool:
        """Whether `values` would return an array."""
        return array_name(of, site, metric) in self.arrays

    def floor(self, site: str, of: str = "drift", metric: str = "rel_l2") -> np.ndarray | None:
        """The floor of ``"drift"`` or ``"local"`` drift, with a leading ``seed`` axis; None if it was not measured."""
        return self.arrays.get(array_name("local_floor" if of == "local" else "floor", site, metric))

    def pairs(self, of: str = "drift") -> list[tuple[str, str]]:
        """The site and the metric of every array of a kind."""
        parts = [name.split("/") for name in self.arrays]
        return [(part[1], part[2]) for part in parts if len(part) == 3 and part[0] == of]
