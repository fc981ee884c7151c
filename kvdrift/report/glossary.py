"""The words a page uses, as the whole project uses them."""

DRIFT = (
    ("path", "One way to run the model over tokens. Path a is under test, path b is the reference."),
    ("step", "One next-token prediction. Step 0 predicts from the prompt alone and is left out of statistics."),
    ("drift", "The difference between the two paths at one place in the model, fed the same tokens."),
    ("relative L2", "The length of the difference divided by the length of path b's vector."),
    (
        "local drift",
        "What one layer makes by itself: both paths get bitwise the same inputs there. Drift starts at the first "
        "layer where it is not zero.",
    ),
    (
        "rounding floor",
        "The drift of a path against itself with every sum added in another order. Above it means more than the "
        "order of summation; that is not by itself a bug.",
    ),
    ("plateau", "The level that drift reaches in the last quarter of the layers."),
    ("flip", "A step at which the two paths, fed the same tokens, would choose different next tokens."),
    ("margin", "The distance between a path's best and second-best logit; an exact tie is a margin of zero."),
    ("free divergence", "The first token that differs when each path feeds itself."),
    ("KL", "How far the two predicted distributions lie apart, in nats."),
)
PATCHING = (
    (
        "patch",
        "Writing the donor path's value into the recipient path at a site, for given layers, heads, positions and "
        "steps.",
    ),
    ("donor", "The path whose values are written; distances are taken to its logits, on its tokens."),
    ("recipient", "The path that is written into. Without a patch it is the unpatched recipient."),
    (
        "recovery",
        "1 − d²(patched, donor) / d²(placebo, donor), d the centred L2 distance of the logits, summed over the steps "
        "that follow. 1: the donor's logits; 0: no nearer than the placebo; negative: farther. Undefined where the "
        "placebo has the donor's logits already. Hold it against what the unpatched recipient scores on that scale.",
    ),
    (
        "placebo",
        "What any patch is held against: the recipient with noise of equal norm at the same place, or a single entry "
        "moved by one ulp.",
    ),
    ("one-shot", "The patch is written at one step only; what follows runs untouched."),
    (
        "persistent",
        "The patch is written at every step of its window, from the donor's same step. A persistent patch of the last "
        "residual recovers 1 by construction and proves nothing.",
    ),
    (
        "factorial",
        "K/V state × kernel: the one-token kernel or a full recompute, on cached or on recomputed K/V. It gives "
        "no shares of the drift: a single entry moved by one ulp can score as much as the whole path, because drift "
        "runs to a plateau whatever set it off.",
    ),
    (
        "re-roll",
        "A control: the same path with every sum added in another seeded order, and nothing written into it.",
    ),
)
LADDER = (
    ("arm", "The same comparison, with the same weights on the same tokens, in one kind of arithmetic."),
    ("base arm", "The model as it was given; it chooses the tokens that all arms consume."),
    ("KL", "How far the two predicted distributions lie apart, in nats."),
    (
        "predicted by drift²",
        "KL is a squared distance: where one arm drifts a tenth as far as another, a hundredth of the KL is expected. "
        "Drift is the root mean square of the relative L2 difference of the residual stream after the last layer.",
    ),
    (
        "unit roundoff²",
        "The law that sees only the rounding of stored numbers: KL goes with the square of half the distance between "
        "neighbouring numbers (2⁻⁸ in bfloat16, 2⁻¹¹ in float16, 2⁻²⁴ in float32, 2⁻⁵³ in float64). It leaves out the "
        "error that sums accumulate.",
    ),
    ("LayerCast", "Weights stored in 16 bits, cast to float32 just before use; everything is computed in float32."),
    (
        "re-roll",
        "A control: every sum with its terms in another seeded order. Cache-ON against its own re-roll is what the "
        "order of summation alone does, with no cache-OFF in it.",
    ),
    (
        "fixed shape",
        "Every row of every operation is computed at one fixed shape. Two paths that compute the same function then "
        "agree in every bit.",
    ),
    ("flip", "A step at which the two paths, fed the same tokens, would choose different next tokens."),
    ("tie", "A step at which the two best logits of either path are equal."),
)
ARCHITECTURE = (
    (
        "counterfactual",
        "A copy of the model that computes the same function in another architecture; checked in float64.",
    ),
    (
        "KV heads expanded",
        "The K/V weights of each group are repeated, so that every query head has a KV head of its own (MHA).",
    ),
    (
        "windows widened",
        "Sliding layers see every position; the same function while the text fits in the window.",
    ),
    ("drift", "The difference between the two paths at one place in the model, fed the same tokens."),
    (
        "local drift",
        "What one layer makes by itself: both paths get bitwise the same inputs there.",
    ),
    (
        "share of a layer",
        "What it adds to the final drift (its rise over the layer below), or its part of all local drift. An even "
        "course gives 1 / layers to each.",
    ),
    (
        "sign-flip test",
        "If a change of architecture did nothing, each prompt's difference could as well have had the other sign; p is "
        "the share of sign assignments at least as extreme. With n prompts it cannot fall below 2^(1 − n).",
    ),
    (
        "rounding floor",
        "The drift of a path against itself with every sum added in another order. Above it means more than the "
        "order of summation; that is not by itself a bug.",
    ),
)
EVALUATION = (
    (
        "path",
        "One way to run the model over tokens. Path a is under test, path b is the reference; each reads its own text.",
    ),
    (
        "strategy",
        "How the next token is chosen: the most likely one (greedy), or drawn. What is drawn depends on the seed, the "
        "item and the step alone, so that both paths draw the same.",
    ),
    ("divergence", "The first token at which the two texts differ; from there on each path goes its own way."),
    (
        "cumulative incidence",
        "The share of all texts that have parted by so many tokens. A text that ended before it parted stays in the "
        "count: its end is a competing event, not a missing value.",
    ),
    ("answer flip", "An item that only one of the two paths answers rightly."),
    (
        "McNemar's test",
        "Of the answers that flip, does one path win more than half? Exact; with several seeds per item the signs of "
        "the items' differences are flipped instead. It asks for a direction, not for how often texts part.",
    ),
    ("Holm", "A correction for testing several conditions at once; p after Holm is what counts."),
    (
        "cannot tell",
        "So few answers flip (under six of one seed) that the test could not reach 5 % even if all went one way.",
    ),
    (
        "null",
        "Path a against its re-rolls: the same path with every sum added in another order, no path b in it. What the "
        "null does as often as path b does says nothing about path b.",
    ),
    (
        "stands out",
        "At most 5 % of the null, path b counted in, is as extreme as path b. With fewer than 19 re-rolls that "
        "cannot be.",
    ),
    ("gold log-probability", "How likely a path finds the right answer's text after the prompt, in nats."),
)
