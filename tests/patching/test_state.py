"""What a path holds at a step, and what a patch makes of two of them."""

import pytest
import torch

import kvdrift as kd
from kvdrift.errors import NonFiniteError, SiteError
from kvdrift.models.tiny import tiny
from kvdrift.patching.blocks import gather, layers_of, moved
from kvdrift.patching.spec import Patch
from kvdrift.patching.state import Recorded, State, lacking, live, state
from kvdrift.paths.stepper import Stepper, started
from kvdrift.tracing.tap import Tap

PROMPT = [5, 9, 100, 33, 7, 8, 250, 301, 12, 44, 17, 61]  # longer than the windows of 8
N = len(PROMPT)


def made(position, rows, heads=2, seed=0, site="k", layer=0, at=None):
    shape = (1, heads, rows, 4) if heads else (1, rows, 4)
    value = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return State(position, torch.zeros(3), {site: {layer: value}}, {} if at is None else {(site, layer): at})


def written(patch, model, own, donor, held=None):
    blocks, absent = gather(patch, model, own, donor, held, step=5)
    return [list(g.block.positions) for g in blocks], [(a.reason, a.positions, a.step) for a in absent]


@pytest.mark.parametrize(
    ("positions", "write", "expected", "lost"),
    [
        (None, None, range(7, 14), []),
        ("past", "cache", range(7, 14), []),
        (None, "read", range(7, 14), []),
        ("all", None, range(7, 15), []),
        ("all", "read", range(7, 15), []),
        ([7, 13], None, [7, 13], []),
        ([13, 7], "read", [7, 13], []),
        ([6, 8], None, [8], [("outside the window", (6,), 5)]),
        ([0, 6, 9], "read", [9], [("outside the window", (0, 6), 5)]),
        ([14], "read", [14], []),
        ([14], "cache", [], []),
        ([15, 20], None, [], []),
    ],
)
def test_positions_of_keys_in_a_window(positions, write, expected, lost, tiny_model):
    """The current position is 14: a window of 8 sees 7 to 14, the cache holds 7 to 13."""
    model = tiny_model("mistral")
    own, donor = made(14, 8, at=range(7, 15)), made(14, 15, seed=1, at=range(15))
    found, absent = written(Patch("k", 0, positions=positions, write=write), model, own, donor, lambda _: range(7, 14))
    assert found == ([list(expected)] if len(expected) else [])
    assert absent == lost


def test_values_are_aligned_by_position_not_by_slot(tiny_model):
    model = tiny_model("mistral")
    own, donor = made(14, 8, at=range(7, 15)), made(14, 15, seed=1, at=range(15))
    for positions in (None, [8, 12], [12, 8]):
        (given,), _ = gather(Patch("k", 0, 1, positions, write="read"), model, own, donor, None, 1)
        for slot, position in enumerate(given.block.positions):
            assert torch.equal(given.before[0, 0, slot], own.values["k"][0][0, 1, position - 7])
            assert torch.equal(given.block.value[0, 0, slot], donor.values["k"][0][0, 1, position])
    scattered = [3, 14, 9, 8, 12]
    donor = made(14, 5, seed=1, at=scattered)
    blocks, absent = gather(Patch("k", 0, positions=[8, 9, 10], write="read"), model, own, donor, None, 1)
    assert list(blocks[0].block.positions) == [8, 9]
    assert torch.equal(blocks[0].block.value, donor.values["k"][0][:, :, [3, 2]])
    assert [(a.reason, a.positions) for a in absent] == [("evicted by the donor's cache", (10,))]


@pytest.mark.parametrize(
    ("positions", "own_rows", "expected", "lost"),
    [
        (None, 15, [14], []),
        ("current", 1, [14], []),
        ("all", 15, range(15), []),
        ("all", 1, [14], []),
        ([3, 14], 15, [3, 14], []),
        ([3, 14], 1, [14], [("not computed by the recipient", (3,), 5)]),
        ([20], 15, [], []),
    ],
)
def test_positions_of_residual_sites(positions, own_rows, expected, lost, tiny_model):
    own, donor = (made(14, n, 0, seed, "resid_post") for seed, n in ((0, own_rows), (1, 15)))
    found, absent = written(Patch("resid_post", 0, positions=positions), tiny_model("llama"), own, donor)
    assert found == ([list(expected)] if len(expected) else [])
    assert absent == lost


def test_a_donor_of_another_shape_is_refused(tiny_model):
    for own, donor in ((made(5, 6), made(5, 6, heads=3)), (made(5, 6, 0), made(5, 6, 2))):
        with pytest.raises(SiteError, match="between models of one shape"):
            gather(
                Patch("k", 0, [0, 1] if own.values["k"][0].ndim == 4 else None),
                tiny_model("llama"),
                own,
                donor,
                None,
                1,
            )


def test_the_donors_values_come_in_the_recipients_dtype(tiny_model):
    own, donor = made(5, 6), made(5, 6, seed=1)
    own.values["k"][0] = own.values["k"][0].bfloat16()
    ((given,), _) = gather(Patch("k", 0), tiny_model("llama"), own, donor, None, 1)
    assert given.block.value.dtype == torch.bfloat16
    assert torch.equal(given.block.value, donor.values["k"][0][:, :, :5].bfloat16())


def test_layers_of(tiny_model):
    model = tiny_model("lfm2")
    assert layers_of(model, Patch("k"), "k") == (1, 3)
    assert layers_of(model, Patch("k", [-1, 1]), "k") == (3, 1)
    assert layers_of(model, Patch("k", [-1, 3]), "k") == (3,)
    assert layers_of(model, Patch("embed"), "embed") == (0,)
    for layers, words in (([0], "does not give 'k'"), ([1, 2], "'k' in layer 2"), ([4], "no layer 4")):
        with pytest.raises(SiteError, match=words):
            layers_of(model, Patch("k", layers), "k")


def test_moved_is_one_norm_over_all_blocks():
    own = [torch.zeros(2, 3), torch.ones(4)]
    assert moved([own[0] + 2, own[1] - 1], own) == pytest.approx((6 * 4 + 4) ** 0.5, rel=1e-15)
    big = [torch.full((2,), 6e4, dtype=torch.float16)]
    assert moved(big, [-big[0]]) == pytest.approx(1.2e5 * 2**0.5, rel=1e-3), "in float64, where float16 would overflow"


@pytest.mark.parametrize("path", [kd.CacheOn(), kd.CacheOff()], ids=["on", "off"])
@pytest.mark.parametrize("family", ["llama", "mistral", "gpt-oss"])
def test_a_recorded_moment_is_the_live_one(path, family, tiny_model, same_bits):
    model = tiny_model(family)
    sites = dict.fromkeys(("resid_post", "mlp_out", "q", "k", "v", "z"), (0, 3)) | {"final_norm": (0,)}
    trace = kd.record(
        model, PROMPT, path=path, sites=[*sites, "logits"], positions="all", tokens=[3, 1, 4], progress=False
    )
    recorded = Recorded(trace, model, PROMPT, sites)
    tap = Tap(model, {site: frozenset(layers) for site, layers in sites.items()}, where="all", kv_where="all")
    with tap, started(path, model, PROMPT, tap) as stepper:
        for number, token in enumerate((None, 3, 1)):
            watch = number > 0
            one, two = (source(number, token, watch) for source in (live(stepper), recorded))
            assert one.position == two.position == N - 1 + number
            assert same_bits(one.logits, two.logits)
            assert bool(one.values) == bool(two.values) == watch
            for site, by_layer in one.values.items():
                for layer, value in by_layer.items():
                    assert list(one.rows(site, layer)) == list(two.rows(site, layer)), site
                    assert same_bits(value, two.values[site][layer]), site


def test_current_values_have_a_row(tiny_model):
    model = tiny_model("llama")
    tap = Tap(model, dict.fromkeys(("resid_post", "q", "k")), kv_where="all")
    with tap:
        found = state(Stepper(kd.CacheOff().start(model, PROMPT), PROMPT, tap).step())
    assert found.values["resid_post"][1].shape == (1, 1, 256)
    assert found.values["q"][1].shape == (1, 8, 1, 32)
    assert found.values["k"][1].shape == (1, 2, N, 32)
    assert list(found.rows("q", 1)) == list(found.rows("resid_post", 1)) == [N - 1]
    assert list(found.rows("k", 1)) == list(range(N))


def test_a_step_that_is_not_finite_says_where(hooks):
    hf = tiny("llama", dtype=torch.float16)
    with torch.no_grad():
        hf.model.layers[1].mlp.down_proj.weight *= 1e6
    model = kd.load(hf, quiet=True)
    tap = Tap(model, {"resid_post": None})
    tap.enabled = False
    with tap:
        stepper = Stepper(kd.CacheOff().start(model, PROMPT), PROMPT, tap)
        with pytest.raises(NonFiniteError, match=r"down_proj|layer 1"):
            stepper.step()
        assert not tap.enabled
    assert not hooks(hf)


@pytest.mark.parametrize(
    ("patch", "options", "missing"),
    [
        (Patch("kv"), {}, None),
        (Patch("kv", positions=[3]), {}, None),
        (Patch("resid_post", 1), {}, None),
        (Patch("resid_post", 1), {"positions": "current"}, None),
        (Patch("resid_post", 1, positions="all"), {"positions": "current"}, "'resid_post' at some positions"),
        (Patch("resid_post", 1), {"positions": [N, N + 1]}, None),
        (Patch("resid_post", 1), {"positions": [N]}, "'resid_post' at some positions"),
        (Patch("resid_post", 1), {"layers": [1]}, None),
        (Patch("resid_post", [0, 1, 2]), {"layers": [1]}, "'resid_post' of layer 0, 2"),
        (Patch("kv"), {"positions": "current"}, "'k' at some positions"),
        (Patch("v", positions=[3, 4]), {"positions": [3, 4, 5]}, None),
        (Patch("v", positions=[3, 6]), {"positions": [3, 4, 5]}, "'v' at some positions"),
        (Patch("kv"), {"sites": ["k", "logits"]}, "'v'"),
        (Patch("mlp_out"), {}, "'mlp_out'"),
        (Patch("final_norm"), {}, None),
    ],
)
def test_what_a_trace_lacks(patch, options, missing, tiny_model):
    model = tiny_model("llama")
    options = {"sites": ["resid_post", "final_norm", "k", "v", "logits"], "positions": "all"} | options
    trace = kd.record(model, PROMPT, path=kd.CacheOff(), max_new_tokens=3, progress=False, **options)
    assert lacking(trace, patch, {site: layers_of(model, patch, site) for site in patch.sites}) == missing
