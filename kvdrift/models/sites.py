"""The names of the places in a model, in TransformerLens terms."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from kvdrift.errors import SiteError

GLOBAL_SITES = ("embed", "final_norm")
"""Sites that exist once in a model: ``[batch, position, d_model]``."""
BLOCK_SITES = ("resid_pre", "attn_out", "resid_mid", "mlp_out", "resid_post")
"""Sites of the residual stream in every block: ``[batch, position, d_model]``."""
HEAD_SITES = ("q", "k", "v", "z")
"""Sites inside attention, as the kernel reads or writes them: ``[batch, head, position, feature]``; ``k`` and
``v`` per KV head."""
PATTERN = "pattern"
"""Attention weights ``[batch, head, query, key]``, from eager attention only."""
LOGITS = "logits"
"""Next-token logits at the current position: ``[vocab]``."""
ALL_SITES = ("embed", *BLOCK_SITES, "final_norm", *HEAD_SITES, PATTERN, LOGITS)

FULL_NAMES = {
    "hook_embed": "embed",
    "ln_final.hook_normalized": "final_norm",
    "ln_final.hook_out": "final_norm",
    "unembed.hook_out": "logits",
}
"""Full names of the sites that exist once."""
BLOCK_NAME = re.compile(r"blocks\.(\d+)\.(?:attn\.)?hook_(?:rot_(?=[qk]$))?(\w+)")
"""Full names of the sites of a block: its number and the site."""


def parse_sites(sites: Iterable[str] | str) -> dict[str, frozenset[int] | None]:
    """Read site names, short (``resid_post``) or full (``blocks.5.hook_resid_post``).

    Parameters
    ----------
    sites
        One name or several.

    Returns
    -------
    dict
        For each site the layers named with it, or None for all layers.

    Raises
    ------
    SiteError
        For a name that is no site.

    Examples
    --------
    >>> parse_sites(["resid_post", "blocks.5.attn.hook_k"])
    {'resid_post': None, 'k': frozenset({5})}
    """
    wanted: dict[str, frozenset[int] | None] = {}
    for name in [sites] if isinstance(sites, str) else list(sites):
        site, layer = _parse(name)
        if layer is None:
            wanted[site] = None
        elif wanted.get(site, frozenset()) is not None:
            wanted[site] = (wanted.get(site) or frozenset()) | {layer}
    if not wanted:
        raise SiteError(f"No site was asked for; choose among {', '.join(ALL_SITES)}.")
    return wanted


def _parse(name: str) -> tuple[str, int | None]:
    if name in ALL_SITES:
        return name, None
    if name in FULL_NAMES:
        return FULL_NAMES[name], None
    if (match := BLOCK_NAME.fullmatch(name)) and match[2] in (*BLOCK_SITES, *HEAD_SITES, PATTERN):
        return match[2], int(match[1])
    raise SiteError(
        f"There is no site {name!r}; choose among {', '.join(ALL_SITES)}, or a full name such as "
        "blocks.5.hook_resid_post or blocks.5.attn.hook_k."
    )


def choose_layers(
    wanted: Mapping[str, frozenset[int] | None], layers: Iterable[int] | int | None, n_layers: int
) -> dict[str, frozenset[int] | None]:
    """Restrict sites to ``layers`` (negative ones count from the end).

    Raises
    ------
    SiteError
        If a layer is out of range.
    """
    named = {layer for chosen in wanted.values() if chosen is not None for layer in chosen}
    given = None if layers is None else [layers] if isinstance(layers, int) else list(layers)
    for layer in [*sorted(named), *(given or [])]:
        if not -n_layers <= layer < n_layers:
            raise SiteError(f"There is no layer {layer}: this model has layers 0 to {n_layers - 1}.")
    if given is None:
        return dict(wanted)
    kept = frozenset(layer % n_layers for layer in given)
    return {site: kept if chosen is None else chosen & kept for site, chosen in wanted.items()}


def choose_heads(heads: Iterable[int] | int | None, n_heads: int) -> list[int] | None:
    """Query heads to keep, or None for all.

    Raises
    ------
    SiteError
        If none is named, or one twice or out of range.
    """
    if heads is None:
        return None
    chosen = [heads] if isinstance(heads, int) else list(heads)
    if not chosen or len(set(chosen)) < len(chosen) or any(not 0 <= head < n_heads for head in chosen):
        raise SiteError(f"heads={chosen}: name each once, among heads 0 to {n_heads - 1}.")
    return chosen
