"""`diagnose`: is a difference between two paths rounding, or a fault?"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from tqdm.auto import tqdm

from kvdrift.diagnosis.cases import default_cases, prompt_cases
from kvdrift.diagnosis.decide import decide
from kvdrift.diagnosis.gather import Gathering
from kvdrift.diagnosis.generated import check_generate
from kvdrift.diagnosis.lanes import lane_cases
from kvdrift.diagnosis.prefixed import begun_with
from kvdrift.diagnosis.verdict import Verdict
from kvdrift.errors import InternalError, KvdriftError
from kvdrift.fingerprint import one_job
from kvdrift.models.load import load
from kvdrift.models.model import Model
from kvdrift.models.prompts import as_prompts
from kvdrift.paths.cache_off import CacheOff
from kvdrift.paths.cache_on import CacheOn
from kvdrift.paths.own import check_path
from kvdrift.paths.path import Path, on_copy
from kvdrift.paths.path_capabilities import holds


@one_job()
def diagnose(
    model: Any,
    prompts: Any = None,
    a: Path | None = None,
    b: Path | None = None,
    *,
    max_new_tokens: int = 16,
    generate: bool | Mapping[str, Any] = False,
    chat: bool = False,
    seed: int = 0,
    progress: bool = True,
) -> Verdict:
    """Decide whether a difference between two paths is rounding or a fault, without a tolerance on drift.

    In order: (0) each path is run again over the same tokens, and the shape-invariant control tests itself; (1) what
    the attention function of every call really sees is probed and held against positions and windows; (2) both
    paths run in shape-invariant arithmetic, where they must agree in every bit; (3) every operator that this
    arithmetic replaces is held against float64 within its a-priori rounding bound; (4) where (2) cannot promise or
    the paths disagree, both run in float64.

    Parameters
    ----------
    model
        Anything `kvdrift.load` takes.
    prompts
        Text, token ids or a list of those. By default random tokens: short, long and one-token prompts; in chunks,
        left-padded, cropped and continued; around every window and RoPE switch. The manners and windows are
        run with prompts of your own too, and so are the other manners of calling the model: ``model(ids)`` with its
        default positions, with a mask alone, and for all logits. Lengths that cost too much run on a tiny twin of the
        model.
    a, b
        The path under test and the reference; by default ``CacheOn()`` and ``CacheOff()``.
    max_new_tokens
        Tokens after each of your own prompts.
    generate
        Also run ``model.generate()`` with path a's cache, chunks and padding, against path a and against itself with
        ``use_cache=False``; True, or a dict of arguments that are passed on to it, such as
        ``{"prompt_lookup_num_tokens": 4}``, ``{"cache_implementation": "static"}``, ``{"assistant_model": draft}`` or
        ``{"num_beams": 3}``.
    chat
        Put text prompts into the chat template.
    seed
        Decides the random tokens.
    progress
        Show a progress bar.

    Raises
    ------
    InputError
        If an argument or a prompt cannot be used.
    ModelError
        If the model cannot be observed, or neither path can run the first case. Later cases that neither can run are
        listed in `Verdict.not_examined`; one that a single path cannot run is a bug.
    InternalError
        If kvdrift itself fails, where the model by itself runs.

    Examples
    --------
    >>> import kvdrift as kd
    >>> verdict = kd.diagnose(kd.models.tiny("llama"), [1, 2, 3, 4], max_new_tokens=4, progress=False)
    >>> verdict.kind
    'rounding'
    """
    model = load(model, repair=False, quiet=not progress).as_it_is()
    a = CacheOn() if a is None else on_copy(check_path(a, "a"), Model.as_it_is)
    b = CacheOff() if b is None else on_copy(check_path(b, "b"), Model.as_it_is)
    arguments = check_generate(generate, a)
    held: tuple[int, ...] = ()
    if prompts is None:
        held = holds(a)
        cases = default_cases(model, a, seed)
    else:
        encoded = [model.encode(prompt, chat) for prompt in as_prompts(prompts)[0]]
        for ids in encoded:
            model.check_length(len(ids), max_new_tokens)
        held = holds(a, encoded[0])
        cases = prompt_cases(model, a, encoded, max_new_tokens, seed)
    cases = begun_with([*cases, *lane_cases(model, a, b, seed)], held)
    with torch.no_grad(), tqdm(desc="diagnose", unit="step", disable=not progress) as bar:
        gathering = Gathering(model, a, b, seed, bar)
        try:
            evidence = gathering.run(cases, arguments)
        except KvdriftError:
            raise
        except Exception as error:  # what a model raises was told apart from it before
            raise InternalError.of(error, f"while it diagnosed {model.name}") from error
    return decide(evidence, model, a, b)
