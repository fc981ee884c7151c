"""A declared loss excuses what it declares, and nothing else."""

import pytest
import torch
from faults.registry import FAULTS
from transformers import DynamicCache

import kvdrift as kd

PROMPT = [5, 9, 100, 33, 7, 8, 250, 301, 12, 44, 17, 61]


def diagnose(cache, lossy, family="llama", prompt=PROMPT, **overrides):
    model = kd.models.tiny(family, num_hidden_layers=2 if cache is OtherLayer else 1, **overrides)
    return kd.diagnose(model, prompt, a=kd.CacheOn(cache=cache, lossy=lossy), max_new_tokens=4, progress=False)


class Swapped(DynamicCache):
    """Hands back the heads the other way round at decode."""

    def update(self, k, v, layer_idx, *args, **kwargs):
        keys, values = super().update(k, v, layer_idx)
        return (keys.flip(1), values.flip(1)) if k.shape[2] == 1 else (keys, values)


class OtherLayer(DynamicCache):
    """Hands back the values of the layer before at decode."""

    def update(self, k, v, layer_idx, *args, **kwargs):
        keys, values = super().update(k, v, layer_idx)
        return keys, self.layers[layer_idx - 1].values if layer_idx and k.shape[2] == 1 else values


class Stale(DynamicCache):
    """Hands back the key of the token before as that of the latest one."""

    def update(self, k, v, layer_idx, *args, **kwargs):
        keys, values = super().update(k, v, layer_idx)
        return torch.cat([keys[:, :, :-1], keys[:, :, -2:-1]], 2) if k.shape[2] == 1 else keys, values


class OwnLost(DynamicCache):
    """Hands back all but the latest token's entry at decode."""

    def update(self, k, v, layer_idx, *args, **kwargs):
        keys, values = super().update(k, v, layer_idx)
        return (keys[:, :, :-1], values[:, :, :-1]) if k.shape[2] == 1 else (keys, values)


class Sinks(DynamicCache):
    """Keeps the first ``FIRST`` and the last ``LAST`` entries between passes."""

    FIRST, LAST = 2, 4

    def update(self, k, v, layer_idx, *args, **kwargs):
        keys, values = super().update(k, v, layer_idx)
        n = keys.shape[2]
        if n > self.FIRST + self.LAST:
            kept = [*range(self.FIRST), *range(n - self.LAST, n)]
            self.layers[layer_idx].keys, self.layers[layer_idx].values = keys[:, :, kept], values[:, :, kept]
        return keys, values


class OneTooFew(Sinks):
    LAST = 3


class SwappedSinks(Sinks):
    def update(self, k, v, layer_idx, *args, **kwargs):
        keys, values = super().update(k, v, layer_idx)
        return (keys.flip(1), values.flip(1)) if k.shape[2] == 1 else (keys, values)


class PerHead(DynamicCache):
    """As caches of heavy hitters do: each head keeps other entries, the largest six and always the newest."""

    def update(self, k, v, layer_idx, *args, **kwargs):
        keys, values = super().update(k, v, layer_idx)
        n = keys.shape[2]
        if n > 6:
            size = keys[0].norm(dim=-1)
            size[:, -1] = float("inf")
            kept = size.topk(6, dim=-1).indices.sort(-1).values[None, ..., None].expand(1, -1, -1, keys.shape[3])
            self.layers[layer_idx].keys = keys.gather(2, kept)
            self.layers[layer_idx].values = values.gather(2, kept)
        return keys, values


def rounding(bits):
    """A cache that stores integers of so many bits, scaled by the largest number of each entry."""

    class Integers(DynamicCache):
        def update(self, k, v, layer_idx, *args, **kwargs):
            return super().update(self.rounded(k), self.rounded(v), layer_idx)

        @staticmethod
        def rounded(x):
            scale = x.abs().amax(-1, keepdim=True) / (2 ** (bits - 1) - 1)
            return (x / scale).round() * scale

    return Integers


class Half(DynamicCache):
    def update(self, k, v, layer_idx, *args, **kwargs):
        return super().update(k.half().to(k.dtype), v.half().to(v.dtype), layer_idx)


EIGHT_BITS = kd.Rounded(relative=0.51 / 127)
SIX = kd.Dropped(first=2, last=4)


@pytest.mark.parametrize(
    ("cache", "lossy"),
    [
        (rounding(8), EIGHT_BITS),
        pytest.param(rounding(4), "keys and values in 4 bits", marks=pytest.mark.slow),
        (Half, kd.Rounded(dtype="float16")),
        (Sinks, SIX),
        (PerHead, kd.Dropped(at_least=6)),
        (PerHead, "keeps the largest six of each head"),
    ],
)
def test_what_is_lost_as_declared_is_lossy(cache, lossy):
    verdict = diagnose(cache, lossy)
    assert verdict.kind == "lossy", str(verdict)
    assert any("on trust" in reason for reason in verdict.reasons) is isinstance(lossy, str)


@pytest.mark.parametrize(
    ("cache", "lossy", "said"),
    [
        (Swapped, "drops entries beyond 1000 tokens", "they are swapped"),
        (Swapped, kd.Dropped(), "KV head"),
        (OtherLayer, "keys in 8 bits", "of layer 0"),
        (Stale, "keys in 8 bits", "position 11"),
        (OwnLost, "drops entries", "which the pass itself has just written"),
        (rounding(4), EIGHT_BITS, "is declared (rounds entries"),
        (OneTooFew, SIX, "beyond what is declared"),
        (Sinks, kd.Dropped(first=2, last=3), "declared to be gone"),
        (OneTooFew, kd.Dropped(at_least=6), "keeps 5 entries where 6"),
        (SwappedSinks, SIX, "KV head"),
        (Sinks, EIGHT_BITS, "has evicted"),
        (rounding(8), SIX, "not, bit for bit"),
        (Sinks, None, "has evicted"),
    ],
)
def test_what_no_declaration_covers_is_a_bug(cache, lossy, said):
    verdict = diagnose(cache, lossy, "gpt2" if cache in (OneTooFew, OwnLost) else "llama")
    assert verdict.kind == "bug", str(verdict)
    assert any(said in reason for reason in verdict.reasons), str(verdict)


@pytest.mark.parametrize(
    ("cache", "lossy"),
    [
        (None, "keys in 8 bits"),
        pytest.param(DynamicCache, kd.Dropped(), marks=pytest.mark.slow),
        (rounding(8), EIGHT_BITS),
        pytest.param(Half, "keys in float16", marks=pytest.mark.slow),
        (Sinks, SIX),
    ],
)
def test_shifted_positions_are_a_bug_under_any_declaration(cache, lossy):
    model = kd.models.tiny("llama", num_hidden_layers=1)
    with FAULTS["positions-one-too-high-at-decode"].apply(model):
        verdict = kd.diagnose(model, PROMPT, a=kd.CacheOn(cache=cache, lossy=lossy), max_new_tokens=4, progress=False)
    assert verdict.kind == "bug", str(verdict)


@pytest.mark.parametrize("family", ["mistral", pytest.param("gemma2", marks=pytest.mark.slow)])
def test_a_declared_loss_within_sliding_windows_is_lossy(family):
    model = kd.models.tiny(family, num_hidden_layers=2)
    path = kd.CacheOn(cache=lambda: rounding(8)(config=model.config), lossy=EIGHT_BITS)
    verdict = kd.diagnose(model, PROMPT, a=path, max_new_tokens=4, progress=False)
    assert verdict.kind == "lossy", str(verdict)
