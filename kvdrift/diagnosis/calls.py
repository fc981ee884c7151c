"""Every attention call of both paths: does the native function see the right keys, and compute what it should?"""

from __future__ import annotations

import hashlib
from typing import Any

from torch import Tensor

from kvdrift.diagnosis import attention_witness, visibility
from kvdrift.diagnosis.declared import breach, covers_eviction, evicted, loses
from kvdrift.diagnosis.evidence import Evidence, Excuse, Finding
from kvdrift.diagnosis.locate import cache_update, place
from kvdrift.diagnosis.lockstep import Moment
from kvdrift.diagnosis.observe import Call, Snapshot
from kvdrift.models.model import Model
from kvdrift.paths.loss import Declared, said
from kvdrift.paths.path import Path
from kvdrift.paths.path_capabilities import declared_loss

COSTLY = 1 << 16
"""Calls over more pairs of query and key are examined in one layer of a kind; smaller ones in every layer."""


class CallChecks:
    """Examines the attention calls of every step that it is shown, each distinct call once.

    Parameters
    ----------
    model
        The model that runs, for paths that have none of their own.
    evidence
        Where findings go.
    lossy
        What the path under test declares to give up, or None: keys may then be missing.
    """

    def __init__(self, model: Model, evidence: Evidence, lossy: Declared | None) -> None:
        self.model, self.evidence, self.lossy = model, evidence, lossy
        self._examined: set[tuple[Any, ...]] = set()

    def __call__(self, moment: Moment, path: Path, snapshot: Snapshot) -> None:
        """Examine the calls of one step."""
        model = path.model or self.model
        digests: dict[int, str] = {}  # layers of a pass share their masks
        for call in snapshot.calls:
            info = model.architecture.layers[call.layer]
            self._lost(model, moment, path, call)
            if not call.seen:
                continue
            costly = call.call.query.shape[2] * call.call.key.shape[2] > COSTLY
            which = (type(call.call.module), info.attention, info.window) if costly else call.layer
            signature = (id(model), path.attn, which, *_signature(call, digests))
            if signature not in self._examined:
                self._examined.add(signature)
                self._examine(model, moment, path, call)

    def _examine(self, model: Model, moment: Moment, path: Path, made: Call) -> None:
        info, call = model.architecture.layers[made.layer], made.call
        unreadable = made.unplaced or visibility.readable(info, call)
        if unreadable is None:
            self.evidence.count("visibility")
            misread = visibility.misread(call, info, made.queries, made.keys)
            if misread is not None:
                what, why = str(misread).rstrip("."), self._excuse(misread, made)
                where = place(model, made.layer, "z")
                self.evidence.findings.append(Finding("visibility", path.label, what, moment, where, why))
        else:
            self._cannot_judge("The visibility probe", unreadable, made.layer)
        unreadable = attention_witness.readable(call)
        if unreadable is None:
            self.evidence.count("witness")
            visible = visibility.expected(info, made.queries, made.keys, visibility.is_causal(call))
            ratio = attention_witness.excess(call, visible, path.attn)
            if not ratio <= 1:
                what = f"the attention function is off by {ratio:.3g} times what its rounding can explain"
                where = place(model, made.layer, "z")
                self.evidence.findings.append(Finding("witness", path.label, what, moment, where))
        else:
            self._cannot_judge("The local witness", unreadable, made.layer)

    def _lost(self, model: Model, moment: Moment, path: Path, made: Call) -> None:
        """Hold what a call reads against what was written, under the path's declaration if it has one."""
        info, where = model.architecture.layers[made.layer], cache_update(model, made.layer)
        declared = declared_loss(path)
        if made.written is None:
            return
        gone = evicted(made, info)
        if gone is not None and not covers_eviction(declared):
            self.evidence.findings.append(Finding("loss", path.label, gone, moment, where))
        if declared is None:
            return
        self.evidence.lost |= loses(made, info)
        found = breach(made, info, declared)
        self.evidence.count("loss")
        if found is not None:
            self.evidence.findings.append(Finding("loss", path.label, found, moment, where))

    def _cannot_judge(self, check: str, why: str, layer: int) -> None:
        self.evidence.unread.setdefault(f"{check} cannot judge attention: {why}", set()).add(layer)

    def _excuse(self, misread: visibility.Misread, made: Call) -> Excuse | None:
        if misread.extra and not misread.missing and not visibility.is_causal(made.call):
            return Excuse("by_design", "the model declares this attention to be bidirectional")
        if misread.extra and not misread.missing and visibility.blocks_ahead(made.call, made.queries, made.keys):
            self.evidence.looks_ahead = True
            return Excuse("by_design", "the model's mask lets tokens see later ones, in blocks that are read both ways")
        if misread.missing and not misread.extra and covers_eviction(self.lossy):
            return Excuse("lossy", said(self.lossy or ""))
        return None


def _signature(made: Call, digests: dict[int, str]) -> tuple[Any, ...]:
    """What a native attention function can tell one call from another by, values aside."""
    call, mask = made.call, made.call.mask
    if isinstance(mask, Tensor) and id(mask) not in digests:
        digests[id(mask)] = _digest(mask)
    plain = sorted(item for item in call.kwargs.items() if isinstance(item[1], (bool, int, float, str)))
    return (
        *(part for tensor in (call.query, call.key, call.value) for part in (tensor.shape, tensor.stride())),
        call.query.dtype,
        None if not isinstance(mask, Tensor) else (mask.shape, mask.dtype, digests[id(mask)]),
        tuple(made.queries[:1]),
        tuple(made.keys[:1]),
        *plain,
    )


def _digest(mask: Tensor) -> str:
    values = mask.detach().float().cpu().contiguous().numpy()
    return hashlib.sha1(values.tobytes(), usedforsecurity=False).hexdigest()
