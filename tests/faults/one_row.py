"""Modules that compute one row otherwise than many, in every kind of module, and hooks that act on one position."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import torch
from faults.attention import attention_modules
from faults.fault import fault
from faults.passes import watched
from torch import Tensor, nn

from kvdrift.models.tree import find_blocks


def off(x: Tensor) -> Tensor:
    """Off by a thousandth, or by a hundredth where a thousandth would be rounded away."""
    return x * (1.01 if x.dtype in (torch.float16, torch.bfloat16) else 1.001)


def second_block(hf: Any) -> int:
    """The second block."""
    return min(1, len(find_blocks(hf).blocks) - 1)


def first_block(hf: Any) -> int:
    """The first block: in the last one a hook on the last position is there in every pass alike."""
    return 0


def norm(hf: Any, layer: int) -> nn.Module | None:
    """The first norm of a block."""
    return next((m for n, m in _leaves(hf, layer) if "norm" in type(m).__name__.lower() or n.startswith("ln")), None)


def attention_projections(hf: Any, layer: int) -> list[nn.Module]:
    """The projections inside a block's attention, queries first, output last."""
    attention = attention_modules(hf).get(layer)
    return [] if attention is None else [m for m in attention.modules() if _is_projection(m)]


def other_projections(hf: Any, layer: int) -> list[nn.Module]:
    """The projections of a block that stand outside its attention; the last writes to the residual stream."""
    inside = {id(module) for module in attention_projections(hf, layer)}
    return [m for _, m in _leaves(hf, layer) if _is_projection(m) and id(m) not in inside]


def mlp(hf: Any, layer: int) -> nn.Module | None:
    """The part of a block that is called an MLP."""
    children = dict(find_blocks(hf).blocks[layer].named_children())
    return next((children[name] for name in ("mlp", "feed_forward", "block_sparse_moe") if name in children), None)


def router(hf: Any, layer: int) -> nn.Module | None:
    """What sends tokens to experts."""
    found = find_blocks(hf).blocks[layer].named_modules()
    return next((m for name, m in found if name.rpartition(".")[2] in ("gate", "router") and _experts(hf)), None)


def _experts(hf: Any) -> bool:
    return any("expert" in type(module).__name__.lower() for module in hf.modules())


def _leaves(hf: Any, layer: int) -> list[tuple[str, nn.Module]]:
    block = find_blocks(hf).blocks[layer]
    return [(name.rpartition(".")[2], m) for name, m in block.named_modules() if not list(m.children())]


def _is_projection(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"


def _has(find: Callable[[Any, int], Any]) -> Callable[[Any], bool]:
    return lambda hf: bool(find(hf, second_block(hf)))


def changed(
    hf: Any, module: nn.Module, when: Callable[[int], bool], change: Callable[[Tensor], Tensor] = off
) -> ExitStack:
    """Change what a module returns in passes of so many tokens."""
    stack = ExitStack()
    now = stack.enter_context(watched(hf.base_model))

    def hook(_: nn.Module, args: Any, output: Any) -> Any:
        if not when(now.queries):
            return output
        return (change(output[0]), *output[1:]) if isinstance(output, tuple) else change(output)

    stack.callback(module.register_forward_hook(hook).remove)
    return stack


def one(queries: int) -> bool:
    """Whether a pass has a single token."""
    return queries == 1


@fault(_has(norm), second_block, "from the first decode step")
def norm_off_at_one_row(hf: Any, layer: int) -> Iterator[None]:
    """In one block a norm is off by a thousandth in passes of one token."""
    with changed(hf, norm(hf, layer), one):
        yield


@fault(_has(attention_projections), second_block, "from the first decode step")
def first_projection_off_at_one_row(hf: Any, layer: int) -> Iterator[None]:
    """In one layer the projection to queries is off by a thousandth in passes of one token."""
    with changed(hf, attention_projections(hf, layer)[0], one):
        yield


@fault(_has(attention_projections), second_block, "from the first decode step")
def output_projection_off_at_one_row(hf: Any, layer: int) -> Iterator[None]:
    """In one layer the last projection of attention is off by a thousandth in passes of one token."""
    with changed(hf, attention_projections(hf, layer)[-1], one):
        yield


@fault(_has(other_projections), second_block, "from the first decode step")
def down_projection_off_at_one_row(hf: Any, layer: int) -> Iterator[None]:
    """In one block the last projection outside attention is off by a thousandth in passes of one token."""
    with changed(hf, other_projections(hf, layer)[-1], one):
        yield


@fault(_has(router), second_block, "from the first decode step")
def router_off_at_one_row(hf: Any, layer: int) -> Iterator[None]:
    """In one block what the router returns, scores and weights, is off by a thousandth in passes of one token."""

    def hook(_: nn.Module, args: Any, output: Any) -> Any:
        if not one(now.queries):
            return output
        if isinstance(output, Tensor):
            return off(output)
        return tuple(off(x) if x.is_floating_point() else x for x in output)

    with watched(hf.base_model) as now, ExitStack() as stack:
        stack.callback(router(hf, layer).register_forward_hook(hook).remove)
        yield


@fault(_has(mlp), second_block, "from the first decode step")
def mlp_rounded_at_one_row(hf: Any, layer: int) -> Iterator[None]:
    """In one block the MLP's output is rounded to eight bits in passes of one token: quantised at decode only."""
    with changed(hf, mlp(hf, layer), one, lambda x: x.to(torch.float8_e5m2).to(x.dtype)):
        yield


@fault(_has(mlp), second_block)
def mlp_off_in_passes_of_many_rows(hf: Any, layer: int) -> Iterator[None]:
    """In one block the MLP is off by a thousandth in passes of several tokens: cached steps are the right ones."""
    with changed(hf, mlp(hf, layer), lambda queries: queries > 1):
        yield


@fault(lambda hf: find_blocks(hf).final_norm is not None, signature="from the first decode step")
def final_norm_off_at_one_row(hf: Any) -> Iterator[None]:
    """The final norm is off by a thousandth in passes of one token."""
    with changed(hf, find_blocks(hf).final_norm, one):
        yield


@fault(lambda hf: find_blocks(hf).embed is not None, signature="from the first decode step")
def embedding_off_at_one_row(hf: Any) -> Iterator[None]:
    """Embeddings are off by a hundredth in passes of one token."""
    with changed(hf, find_blocks(hf).embed, one, lambda x: x * 1.01):
        yield


# --- hooks that act on one position of a pass


def _added(x: Tensor, row: int) -> Tensor:
    x = x.clone()
    x[:, row] += 0.1 * torch.cos(torch.arange(x.shape[-1], device=x.device)).to(x.dtype)
    return x


@fault(lambda hf: True, first_block, "from the first decode step")
def hook_steers_the_last_position(hf: Any, layer: int) -> Iterator[None]:
    """A hook adds a direction to the last position of every pass of one block."""
    with changed(hf, find_blocks(hf).blocks[layer], lambda _: True, lambda x: _added(x, -1)):
        yield


@fault(lambda hf: True, first_block, "from the first decode step")
def hook_steers_the_first_position(hf: Any, layer: int) -> Iterator[None]:
    """A hook adds a direction to the first position of every pass of one block."""
    with changed(hf, find_blocks(hf).blocks[layer], lambda _: True, lambda x: _added(x, 0)):
        yield


@fault(_has(mlp), first_block, "from the first decode step")
def pre_hook_steers_the_last_position(hf: Any, layer: int) -> Iterator[None]:
    """A hook adds a direction to what one MLP is given at the last position of every pass."""
    handle = mlp(hf, layer).register_forward_pre_hook(lambda _, args: (_added(args[0], -1), *args[1:]))
    try:
        yield
    finally:
        handle.remove()
