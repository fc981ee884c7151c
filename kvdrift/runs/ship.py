"""Models on their way to other processes: loaded there again by name, or pickled, and proved to give the same bits."""

from __future__ import annotations

import hashlib
import io
import pickle
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from kvdrift.errors import InputError
from kvdrift.models.load import load
from kvdrift.models.model import Model
from kvdrift.models.source import Source
from kvdrift.paths.cache_off import CacheOff
from kvdrift.paths.cache_on import CacheOn

ALIGNMENT = 64
"""Bytes. Kernels treat weights that start elsewhere differently, and give other bits."""
PROBE_TOKENS, PROBE_STEPS = 24, 4
Content = TypeVar("Content")


class Packed(Generic[Content]):
    """Something with models in it, able to travel to another process; `pack` makes it.

    In the process that packed it, `unpack` gives the very thing back and nothing is copied or computed.
    """

    def __init__(self, content: Content) -> None:
        self._content = content

    def unpack(self) -> Content:
        """What was packed: itself here, a proved copy elsewhere.

        Raises
        ------
        InputError
            In another process, if a model there gives other bits than the model here.
        """
        return self._content

    def __reduce__(self) -> tuple[Any, ...]:
        content, models = _dumps(self._content)
        return Arrived, (content, tuple(_parcel(model) for model in models))


class Arrived:
    """What `Packed` is in another process.

    Parameters
    ----------
    content
        The pickled content, with numbers in the place of models.
    parcels
        The models.
    """

    def __init__(self, content: bytes, parcels: tuple[Parcel, ...]) -> None:
        self._data, self._parcels = content, parcels

    @cached_property
    def _content(self) -> Any:
        models = [parcel.model() for parcel in self._parcels]
        return _Unpickler(self._data, models).load()

    def unpack(self) -> Any:
        """A copy of what was packed, whose models give the bits of the originals.

        Raises
        ------
        InputError
            If one does not.
        """
        return self._content


def pack(content: Content) -> Packed[Content]:
    """Make something that holds models able to travel: a `Model`, a path with a model of its own, a tuple of those.

    A model that `kvdrift.load` found by name is loaded by that name again; a module that was given in memory travels
    as a pickle, its weights on their old places relative to 64-byte boundaries. Either then proves itself: its weights
    and the logits of a short probe, with and without a cache, must be those of the original, bit for bit.

    Parameters
    ----------
    content
        Anything picklable, models apart; within Ray, functions may be lambdas.

    Examples
    --------
    >>> import pickle
    >>> import kvdrift as kd
    >>> from kvdrift.runs.ship import pack
    >>> model = kd.load(kd.models.tiny("llama"), quiet=True)
    >>> pack(model).unpack() is model
    True
    >>> elsewhere = pickle.loads(pickle.dumps(pack((model, kd.CacheOn(model=model)))))
    >>> copy, path = elsewhere.unpack()
    >>> copy is model, path.model is copy, copy.fingerprint == model.fingerprint
    (False, True, True)
    """
    return Packed(content)


def cuda_devices(*models: Model) -> int:
    """How many CUDA devices some models lie on together: the GPUs that a worker needs.

    Examples
    --------
    >>> import kvdrift as kd
    >>> from kvdrift.runs.ship import cuda_devices
    >>> cuda_devices(kd.load(kd.models.tiny("llama"), quiet=True))
    0
    """
    return len({p.device for model in models for p in model.hf.parameters() if p.device.type == "cuda"})


def digest(model: Model) -> str:
    """A hash of the logits' bits of a short fixed text: one pass without a cache, then cached steps."""
    limit = model.architecture.max_positions or PROBE_TOKENS + PROBE_STEPS
    n_prompt = max(1, min(PROBE_TOKENS, limit - PROBE_STEPS))
    ids = torch.randint(
        model.vocab_size, (n_prompt + PROBE_STEPS,), generator=torch.Generator().manual_seed(0)
    ).tolist()
    found = hashlib.sha256()
    for path, n_steps in ((CacheOff(), 1), (CacheOn(), 1 + PROBE_STEPS)):
        run = path.start(model, ids[:n_prompt])
        try:
            for step in range(n_steps):
                logits = run.step(ids[n_prompt + step - 1] if step else None).logits
                found.update(logits.contiguous().cpu().view(torch.uint8).numpy().tobytes())
        finally:
            run.close()
    return found.hexdigest()[:16]


@dataclass(frozen=True)
class Parcel:
    """One model under way.

    Attributes
    ----------
    name
        What the model is called.
    source, dtype
        Where to load it from; None if it travels itself.
    hf, backend, places
        The module, what drives it (None: as by default), and where its weights lie relative to 64-byte boundaries.
    tokenizer
        Its tokenizer; None if it is loaded with the model.
    fingerprint, digest
        What the copy must have.
    """

    name: str
    source: Source | None
    dtype: str
    hf: Any
    backend: Any
    places: dict[str, int]
    tokenizer: Any
    fingerprint: str
    digest: str

    def model(self) -> Model:
        """The copy.

        Raises
        ------
        InputError
            If it gives other bits than the original.
        """
        if self.source is None:
            for name, tensor in _weights(self.hf).items():
                _put(tensor, self.places.get(name, 0))
            model = Model(self.hf, self.tokenizer, self.name, self.backend)
        else:
            model = load(
                self.source.name, self.dtype, "auto" if self.source.device_map is not None else self.source.device,
                self.source.attn, tokenizer=self.tokenizer, device_map=self.source.device_map, quiet=True,
            )  # fmt: skip
            model.name, model.source = self.name, self.source
        if model.fingerprint != self.fingerprint or digest(model) != self.digest:
            raise InputError(self._unlike(model))
        return model

    def _unlike(self, model: Model) -> str:
        if self.source is None:
            return (
                f"A worker's copy of {self.name} gives other bits than the model here; load it by name, "
                "kd.load('NAME or FOLDER'), so that workers load it in the same way, or run with engine='local'."
            )
        if model.fingerprint != self.fingerprint:
            return (
                f"{self.name} was changed after it was loaded by name, and a worker that loads it again has other "
                "weights; give the module itself: kd.load(kd.load(…).hf, tokenizer=…)."
            )
        return (
            f"{self.name}, loaded by a worker, gives other bits than the model here: it has hooks, was changed after "
            "it was loaded, or the machines differ; load it anew, or run with engine='local'."
        )


def _parcel(model: Model) -> Parcel:
    source = model.source
    travels = source is None
    return Parcel(
        name=model.name,
        source=source,
        dtype=model.dtype_name,
        hf=model.hf if travels else None,
        backend=model.backend if travels else None,
        places={name: _place(tensor) for name, tensor in _weights(model.hf).items()} if travels else {},
        tokenizer=None if source is not None and source.tokenizer else model.tokenizer,
        fingerprint=model.fingerprint,
        digest=digest(model),
    )


# --- where weights lie


def _weights(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers on the CPU, each once."""
    named = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    return {name: tensor for name, tensor in named.items() if tensor.device.type == "cpu" and tensor.numel()}


def _place(tensor: Tensor) -> int:
    return tensor.data_ptr() % ALIGNMENT


def _put(tensor: Tensor, place: int) -> None:
    """Move a tensor's values to memory that starts ``place`` bytes after a 64-byte boundary."""
    size = tensor.element_size()
    extent = 1 + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    if _place(tensor) == place or place % size or extent < tensor.numel():
        return
    room = torch.empty(extent + ALIGNMENT // size, dtype=tensor.dtype)
    start = (place - room.data_ptr()) % ALIGNMENT // size
    moved = room.as_strided(tensor.shape, tensor.stride(), start)
    moved.copy_(tensor.detach())
    tensor.data = moved


# --- pickles with numbers in the place of models


def _dumps(content: Any) -> tuple[bytes, list[Model]]:
    try:
        from ray.cloudpickle import Pickler
    except ImportError:  # then nothing leaves this machine, and plain pickle will do
        from pickle import Pickler  # type: ignore[assignment]
    models: list[Model] = []

    class Pickling(Pickler):
        """Pickles everything but models."""

        def persistent_id(self, thing: Any) -> int | None:
            """The number of a model, None for everything else."""
            if not isinstance(thing, Model):
                return None
            for number, model in enumerate(models):
                if model is thing:
                    return number
            models.append(thing)
            return len(models) - 1

    file = io.BytesIO()
    Pickling(file, protocol=pickle.HIGHEST_PROTOCOL).dump(content)
    return file.getvalue(), models


class _Unpickler(pickle.Unpickler):
    def __init__(self, data: bytes, models: list[Model]) -> None:
        super().__init__(io.BytesIO(data))
        self._models = models

    def persistent_load(self, number: int) -> Model:
        """The model of that number."""
        return self._models[number]
