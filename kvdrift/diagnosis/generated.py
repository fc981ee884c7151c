"""``model.generate()`` as the path under test would run it: against that path, and with a cache against without one."""

from __future__ import annotations

import os
import traceback
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import GenerationConfig

from kvdrift.bits import same_bits
from kvdrift.controls import Control
from kvdrift.controls.combine import with_arm
from kvdrift.controls.fixed_shape import FixedShape
from kvdrift.controls.float64_copy import float64_copy
from kvdrift.controls.true_float64 import TrueFloat64
from kvdrift.diagnosis.cases import Case
from kvdrift.diagnosis.design import bidirectional, excuse
from kvdrift.diagnosis.evidence import Evidence, Finding
from kvdrift.diagnosis.float64 import TOLERANCE, in_float64
from kvdrift.diagnosis.locate import Equal, within
from kvdrift.diagnosis.lockstep import Moment
from kvdrift.diagnosis.raised import out_of_memory, raised_by_kvdrift, said
from kvdrift.errors import InputError, InternalError, KvdriftError, one_line
from kvdrift.models.load import load
from kvdrift.models.model import Model
from kvdrift.paths.cache_off import CacheOff
from kvdrift.paths.capabilities import cache_of, left_padding, stateless
from kvdrift.paths.path import Path
from kvdrift.paths.path_capabilities import begins_filled, manner, own_cache, prefill_chunk
from kvdrift.shapes import Logits

NEW_TOKENS = 8
NAME = "generate()"

_OF_A_PATH = {
    "cache": "CacheOn(cache=…)",
    "past_key_values": "CacheOn(cache=…)",
    "prefill_chunk_size": "CacheOn(prefill_chunk=…)",
    "attention_mask": "CacheOn(left_padding=…)",
}
_OWN = (
    "inputs", "input_ids", "inputs_embeds", "position_ids", "use_cache", "max_length", "max_new_tokens", "min_length",
    "min_new_tokens", "return_dict_in_generate", "output_logits", "output_scores", "output_attentions",
    "output_hidden_states", "streamer", "synced_gpus", "generation_config", "num_return_sequences", "custom_generate",
)  # fmt: skip
_BESIDE_CONFIG = (
    "assistant_model", "assistant_tokenizer", "tokenizer", "logits_processor", "stopping_criteria",
    "prefix_allowed_tokens_fn", "negative_prompt_ids", "negative_prompt_attention_mask",
)  # fmt: skip
_DRAWS = {
    "do_sample": "it draws its tokens at random",
    "penalty_alpha": "contrastive search chooses by hidden states",
    "dola_layers": "DoLa mixes the logits of several layers",
    "guidance_scale": "guidance mixes the logits of two prompts",
}
_ONLY_CACHED = ("cache_", "max_cache_len", "assistant", "prompt_lookup", "ngram", "lookbehind")
"""Parts of the names of arguments that mean nothing, or are refused, without a cache."""


def check_generate(generate: bool | Mapping[str, Any], a: Path) -> dict[str, Any] | None:
    """The arguments to pass on to ``generate()``; None if it is not to be run.

    Raises
    ------
    InputError
        If something is asked for that cannot be passed on, or cannot be held against a path.

    Examples
    --------
    >>> import kvdrift as kd
    >>> check_generate(False, kd.CacheOn()), check_generate(True, kd.CacheOn())
    (None, {})
    """
    if isinstance(generate, bool):
        given: dict[str, Any] = {}
    elif isinstance(generate, Mapping):
        given = dict(generate)
    else:
        raise InputError(f"generate={generate!r}: give True, or a dict of arguments of model.generate().")
    if generate is False:
        return None
    if manner(a) is None:
        raise InputError(f"generate= runs the cache, chunks and padding of a kd.CacheOn, and a={a.label} is none.")
    chunk = prefill_chunk(a)
    if chunk is not None and not isinstance(chunk, int):
        raise InputError("generate= fills the cache in chunks of one length; give prefill_chunk as one number.")
    for name, value in given.items():
        _check_argument(name, value, a)
    return given


def _check_argument(name: str, value: Any, a: Path) -> None:
    shown = f"generate={{{name!r}: …}}"
    if name in _OF_A_PATH:
        raise InputError(f"{shown}: the path decides this; give it as {_OF_A_PATH[name]}.")
    if name in _OWN:
        raise InputError(f"{shown}: kvdrift sets {name} itself; leave it out.")
    if name in _DRAWS and value:
        raise InputError(f"{shown}: {_DRAWS[name]}, which no path can be held against; leave it out.")
    if name not in _BESIDE_CONFIG and not hasattr(GenerationConfig(), name):
        raise InputError(f"{shown}: model.generate() of transformers {transformers.__version__} has no such argument.")
    if name == "cache_implementation" and value is not None and (own_cache(a) is not None or begins_filled(a)):
        raise InputError(f"{shown}: the path has a cache of its own; give one or the other.")
    if stateless(a) and any(part in name for part in _ONLY_CACHED):
        raise InputError(f"{shown}: it needs a cache, and {a.label} has none; give a=kd.CacheOn().")


@dataclass(frozen=True)
class _Written:
    """What one call of ``generate()`` wrote.

    Attributes
    ----------
    tokens
        ``[sequence, token]``, without the prompt.
    logits
        Those of each step, ``[row, vocab]``; a row per beam.
    """

    tokens: list[list[int]]
    logits: list[Logits]


@dataclass(frozen=True)
class _Apart:
    """Two ways of writing that gave other logits."""

    what: str
    step: int


@dataclass(frozen=True)
class _Calls:
    """``generate()`` calls of one path over one prompt.

    Attributes
    ----------
    model, path
        What runs.
    case
        Whose prompt is gone on with, by as many tokens as the case has steps.
    arguments
        Passed on to ``generate()``.
    cached
        With a cache, the path's own if it has one.
    """

    model: Model
    path: Path
    case: Case
    arguments: Mapping[str, Any]
    cached: bool

    @property
    def beams(self) -> bool:
        """Whether several sequences are followed at once."""
        return int(self.arguments.get("num_beams") or 1) > 1

    def apart(self, control: Control, equal: Equal) -> list[_Apart]:
        """Where ``generate()`` leaves the path, and where it does with its cache what it does not do without."""
        written, found = self.write((control,)), []
        if not self.beams:
            own = self._followed(written.tokens[0], control)
            step = _first(written.logits, own, equal)
            if step is not None:
                what = f"other logits than forward() with explicit positions gives along {self.path.label}"
                found.append(_Apart(what, step))
        if self.cached:
            step = _first(written.logits, self.without_cache().write((control,)).logits, equal)
            if step is not None:
                found.append(_Apart("other logits with its cache than with use_cache=False", step))
        return found

    def without_cache(self) -> _Calls:
        """The same with ``use_cache=False``, and without what needs a cache."""
        kept = {name: value for name, value in self.arguments.items() if not any(part in name for part in _ONLY_CACHED)}
        return replace(self, arguments=kept, cached=False)

    def write(self, controls: tuple[Control, ...] = ()) -> _Written:
        """Call ``generate()`` once."""
        hf, prompt = self.model.hf, list(self.case.prompt)
        padding = left_padding(self.path)
        filler = getattr(hf.config, "pad_token_id", None) or 0
        ids = torch.tensor([[filler] * padding + prompt], device=self.model.device)
        mask = (torch.arange(-padding, len(prompt), device=ids.device) >= 0).long().unsqueeze(0)
        given = {"num_beams": 1, "disable_compile": True} | dict(self.arguments)
        given |= self._of_path(with_arm(self.path.controls, controls))
        with ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            stack.enter_context(self.model.evaluating())
            stack.enter_context(self.model.backend.attention(self.path.attn))
            for control in with_arm(self.path.controls, controls):
                bound = control.bind(self.model)
                stack.callback(bound.close)
                stack.enter_context(bound)
            output = hf.generate(
                ids,
                attention_mask=mask,
                max_new_tokens=self.case.steps,
                min_new_tokens=self.case.steps,
                do_sample=False,
                use_cache=self.cached,
                return_dict_in_generate=True,
                output_logits=True,
                **given,
            )
        return _Written(output.sequences[:, ids.shape[1] :].tolist(), list(output.logits))

    def _of_path(self, controls: tuple[Control, ...]) -> dict[str, Any]:
        """The path's own cache, with the prefix that it may hold, and its chunks."""
        path, found = self.path, dict[str, Any]()
        if not self.cached:
            return found
        if own_cache(path) is not None or begins_filled(path):
            named = "past_key_values" if self.model.backend.cache_argument == "past_key_values" else "cache"
            run = path.start(self.model, self.case.prompt, controls)
            found[named] = cache_of(run)
            run.close()
        if prefill_chunk(path) is not None:
            found["prefill_chunk_size"] = prefill_chunk(path)
        return found

    def _followed(self, tokens: Sequence[int], control: Control) -> list[Logits]:
        """Logits of the path itself over the tokens that ``generate()`` wrote."""
        run = self.path.start(self.model, self.case.prompt, with_arm(self.path.controls, (control,)))
        try:
            return [run.step(token).logits.unsqueeze(0) for token in (None, *tokens[:-1])]
        finally:
            run.close()


def examine(
    evidence: Evidence, model: Model, path: Path, first: Case, arguments: Mapping[str, Any], lossy: Any
) -> None:
    """Hold ``generate()`` against the path, and against itself without a cache, and note what is found.

    Compared are logits, in shape-invariant arithmetic, where passes of one row (the path's) and of several (those of
    assisted generation) must agree in every bit; where they do not, float64 says whether it is another function.

    Parameters
    ----------
    evidence
        Where findings go.
    model, path
        The model and the path under test.
    first
        The first case. A prompt of random tokens is written twice, so that a look-up in it finds something.
    arguments
        From `check_generate`.
    lossy
        What the path declares to give up.
    """
    model = path.model or model
    case = _case(model, first)
    if isinstance(case, str):
        evidence.not_examined[NAME] = case
        return
    calls = _Calls(model, path, case, _loaded(arguments), not stateless(path))
    try:
        calls.write()
    except Exception as error:  # whatever a model or a cache raises in generate() alone
        _raised(evidence, path, case, error)
        return
    promised = not (evidence.not_covered or evidence.self_test)
    found = _observed(calls, FixedShape(case.n_tokens + left_padding(path) + SLACK), same_bits)
    if found:
        exact = _in_float64(calls)
        for one in found:
            _judge(evidence, model, case, one, exact, promised, lossy)
    plain = (str, int, float, bool, type(None))
    said = {name: value if isinstance(value, plain) else type(value).__name__ for name, value in arguments.items()}
    shown = ", ".join(f"{name}={value}" for name, value in said.items())
    evidence.note(f"generate({shown}) was followed over {case.steps} tokens, with and without a cache.")


SLACK = 16
"""Slots beyond the longest sequence, for drafted tokens."""


def _case(model: Model, first: Case) -> Case | str:
    if not hasattr(model.hf, "generate"):
        return "the model has no generate()"
    prompt = first.prompt if first.of_user else first.prompt * 2
    limit = model.architecture.max_positions
    room = NEW_TOKENS if limit is None else min(NEW_TOKENS, limit - len(prompt))
    if room < 1:
        return "the model's context holds no further token"
    return Case(NAME, prompt, None, room, first.a)


def _loaded(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments with an assistant that is given as anything `kvdrift.load` takes."""
    assistant = arguments.get("assistant_model")
    if assistant is None or isinstance(assistant, torch.nn.Module):
        return dict(arguments)
    return {**arguments, "assistant_model": load(assistant, quiet=True).hf}


def _raised(evidence: Evidence, path: Path, case: Case, error: Exception) -> None:
    if out_of_memory(error):
        evidence.not_examined[NAME] = "memory does not suffice"
    elif isinstance(error, KvdriftError):
        evidence.not_examined[NAME] = one_line(error)
    elif raised_by_kvdrift(error):
        raise InternalError.of(error, f"while it called {NAME}") from error
    elif _refused(error):
        evidence.not_examined[NAME] = f"transformers refuses it: {one_line(error)}"
    else:
        evidence.findings.append(Finding("crash", NAME, f"raises {said(error)}, where {path.label} runs"))


def _refused(error: Exception) -> bool:
    """Whether an error is transformers' way to say that arguments do not go together."""
    frames = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__)]
    where = os.path.join(os.path.dirname(transformers.__file__), "generation") + os.sep
    return isinstance(error, (ValueError, NotImplementedError)) and bool(frames) and frames[-1].startswith(where)


def _observed(calls: _Calls, control: Control, equal: Equal) -> list[_Apart]:
    """`_Calls.apart` after the same call ran by itself: what is raised now is kvdrift's own.

    Raises
    ------
    InternalError
        If something is.
    """
    try:
        return calls.apart(control, equal)
    except KvdriftError:
        raise
    except Exception as error:
        raise InternalError.of(error, f"while it followed {NAME}, which runs by itself") from error


def _in_float64(calls: _Calls) -> dict[str, _Apart] | str:
    """Where float64 differs, too; or why it cannot be asked."""
    try:
        copy = float64_copy(calls.model)
        case, _ = in_float64(replace(calls.case, a=calls.path), CacheOff())
        arguments = dict(calls.arguments)
        if arguments.get("assistant_model") is not None:
            arguments["assistant_model"] = float64_copy(load(arguments["assistant_model"], quiet=True)).hf
        path = case.a
        again = replace(calls, model=path.model or copy, path=path, case=case, arguments=arguments)
        found = again.apart(TrueFloat64(), within(TOLERANCE))
    except InternalError:
        raise
    except Exception as error:  # whatever a model raises that has no float64
        return one_line(error)
    return {one.what: one for one in found}


def _judge(
    evidence: Evidence,
    model: Model,
    case: Case,
    one: _Apart,
    exact: Mapping[str, _Apart] | str,
    promised: bool,
    lossy: Any,
) -> None:
    confirmed = None if isinstance(exact, str) else exact.get(one.what)
    step = one.step if confirmed is None else confirmed.step
    moment = Moment(case, step, len(case.prompt) - 1 + step, case.prompt)
    if confirmed is not None or (isinstance(exact, str) and promised):
        bits = "in float64" if confirmed is not None else "in shape-invariant arithmetic"
        why = excuse(moment, lossy, bidirectional(model))
        evidence.findings.append(Finding("generate", NAME, f"{one.what}, {bits}", moment, excuse=why))
    elif isinstance(exact, str):
        evidence.unsettled.append(f"{moment}: {one.what}, where only float64 could judge ({exact}).")
    elif promised:
        evidence.note(f"{moment}: {one.what} in shape-invariant arithmetic, and the same function in float64.")


def _first(some: Sequence[Tensor], others: Sequence[Tensor], equal: Equal) -> int | None:
    """The first step at which two texts have other logits; those of ``generate()`` are in float32 at least."""
    for step, (x, y) in enumerate(zip(some, others, strict=False)):
        wide = torch.promote_types(torch.promote_types(x.dtype, y.dtype), torch.float32)
        if not equal(x.to(wide), y.to(device=x.device, dtype=wide)):
            return step
    return None
