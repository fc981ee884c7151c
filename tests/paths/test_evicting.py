"""Caches that evict: positions are right, or are not told."""

import pytest
import torch
from transformers import DynamicCache

import kvdrift as kd
from kvdrift.errors import SiteError

IDS = [(7 * i * i + 3 * i) % 380 for i in range(20)]


class Evicting(DynamicCache):
    """Keeps some entries between passes; a pass reads what it holds and its own tokens."""

    def update(self, k, v, layer_idx, *args, **kwargs):
        keys, values = super().update(k, v, layer_idx)
        kept = self.kept(layer_idx, keys)
        if kept is not None:
            self.layers[layer_idx].keys = keys.gather(2, kept[None, ..., None].expand(1, -1, -1, keys.shape[3]))
            self.layers[layer_idx].values = values.gather(2, kept[None, ..., None].expand(1, -1, -1, values.shape[3]))
        return keys, values

    def kept(self, layer, keys):
        n = keys.shape[2]
        places = torch.tensor([*range(2), *range(n - 6, n)]) if n > 8 else None
        return None if places is None else places.expand(keys.shape[1], -1)


class Pyramid(Evicting):
    """Later layers keep less."""

    def kept(self, layer, keys):
        n, size = keys.shape[2], 8 - 2 * layer
        return torch.arange(n - size, n).expand(keys.shape[1], -1) if n > size else None


class PerHead(Evicting):
    """Each head keeps the entries that are largest to it."""

    def kept(self, layer, keys):
        return keys[0].norm(dim=-1).topk(8, dim=-1).indices.sort(-1).values if keys.shape[2] > 8 else None


class Telling(Evicting):
    """Hands back entries in other bits, and says where they sit."""

    def update(self, k, v, layer_idx, *args, **kwargs):
        n, held = self.__dict__.setdefault("n", {}), self.__dict__.setdefault("at", {})
        first = n.get(layer_idx, 0)
        read = [*held.get(layer_idx, []), *range(first, first + k.shape[2])]
        n[layer_idx] = first + k.shape[2]
        self.__dict__.setdefault("reads", {})[layer_idx] = read
        held[layer_idx] = [*read[:2], *read[-6:]] if len(read) > 8 else read
        keys, values = super().update(k, v, layer_idx)
        return keys * 1.0001, values

    def positions(self, layer):
        return self.reads[layer]


def seen(cache, family="llama", layer=0):
    """Positions visible in cache-ON after five decoded tokens, and the largest drift of layer 0's keys there."""
    drift = kd.compare(
        kd.models.tiny(family), IDS, a=kd.CacheOn(cache=cache), max_new_tokens=6, floor=0, kv_every=1, progress=False
    )
    table = drift.to_dataframe("positions")
    table = table[(table.step == 5) & (table.site == "k") & (table["head"] == 0) & (table.layer == layer)]
    visible = table[table.visible_a]
    return visible.position.tolist(), float(visible.rel_l2.max())


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_positions_are_found_among_the_entries_that_were_written(family):
    positions, drift = seen(Evicting, family)
    assert positions == [0, 1, *range(18, 25)]
    assert drift < 1e-5


def test_each_layer_has_its_own_positions():
    assert seen(Pyramid)[0] == [*range(16, 25)]
    assert seen(Pyramid, layer=1)[0] == [*range(18, 25)]


def test_a_cache_may_tell_its_positions():
    positions, drift = seen(Telling)
    assert positions == [0, 1, *range(18, 25)]
    assert 1e-5 < drift < 1e-3


def test_positions_that_differ_between_heads_are_left_out():
    assert seen(PerHead)[0] == []
    drift = kd.compare(
        kd.models.tiny("llama"), IDS, a=kd.CacheOn(cache=PerHead), max_new_tokens=3, floor=0, progress=False
    )
    left_out = [note for note in drift.notes if "left out" in note]
    assert len(left_out) == 1
    assert "other ones in each head" in left_out[0]
    run = kd.CacheOn(cache=PerHead).start(kd.load(kd.models.tiny("llama"), quiet=True), IDS)
    run.step(), run.step(3)
    assert "other ones in each head" in run.evicted(0, 9)
    run.close()


def test_forks_and_chunks_keep_what_was_written():
    model = kd.load(kd.models.tiny("llama"), quiet=True)
    run = kd.CacheOn(cache=Evicting, prefill_chunk=7).start(model, IDS)
    run.step()
    fork = run.fork()
    for one in (run, fork):
        one.step(3)
        assert one.key_positions(0, 9) == [0, 1, *range(14, 21)]
        one.close()


def test_what_was_evicted_is_not_overwritten():
    run = kd.CacheOn(cache=Evicting).start(kd.load(kd.models.tiny("llama"), quiet=True), IDS)
    run.step()
    with pytest.raises(SiteError, match="has evicted entries"):
        run.held(0)
    run.close()


def test_a_recording_marks_what_was_read():
    trace = kd.record(kd.models.tiny("llama"), IDS, path=kd.CacheOn(cache=Evicting), sites=["k"], positions="all",
                      max_new_tokens=3, progress=False)  # fmt: skip
    mask = trace.masks["k"][2]
    assert mask[0].reshape(-1, mask.shape[-1])[0].nonzero()[:, 0].tolist() == [0, 1, *range(15, 22)]


def test_a_patch_says_what_was_evicted_and_refuses_what_cannot_be_placed(tiny_model):
    patch = kd.Patch("v", layers=1, positions=[0, 9], schedule="persistent", write="read")
    options = {"donor": kd.CacheOff(), "max_new_tokens": 4, "progress": False}
    result = kd.patch(tiny_model(), IDS, patch, recipient=kd.CacheOn(cache=Evicting), **options)
    assert any("evicted by the recipient's cache" in note and "9 (step" in note for note in result.notes)
    assert not any("position 0" in note for note in result.notes)
    with pytest.raises(SiteError, match="evicted entries of layer 1, and at which positions"):
        kd.patch(tiny_model(), IDS, kd.Patch("v", 1, write="read"), recipient=kd.CacheOn(cache=PerHead), **options)
    with pytest.raises(SiteError, match=r"recipient's cache has evicted|donor's cache has evicted"):
        kd.factorial(tiny_model(), IDS, a=kd.CacheOn(cache=PerHead), max_new_tokens=4, progress=False)
