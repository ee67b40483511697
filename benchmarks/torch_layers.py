"""The same layer functions in PyTorch, for one device's tensors.

Only `torch_worker` imports this: jhost and its benchmarks do not need PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch  # pyright: ignore[reportMissingImports]
import torch.distributed as dist  # pyright: ignore[reportMissingImports]
import torch.nn.functional as F  # pyright: ignore[reportMissingImports]

EPSILON = 1e-5  # as in `benchmarks.layers`, which imports JAX


class Communication(Protocol):
    """As in `benchmarks.communication`, for products instead of functions of rows."""

    def gather(self, x: Any, weights: Sequence[Any]) -> list[Any]: ...

    def scatter(self, h: Any, w: Any) -> Any: ...

    def reduce(self, h: Any, w: Any) -> Any: ...


class Collectives:
    """One collective of the default group, one matmul."""

    def gather(self, x: Any, weights: Sequence[Any]) -> list[Any]:
        return self.gathered(x, weights)[1]

    def gathered(self, x: Any, weights: Sequence[Any]) -> tuple[Any, list[Any]]:
        """The rows of all devices as well."""
        whole = x.new_empty((x.shape[0] * dist.get_world_size(), x.shape[1]))
        dist.all_gather_into_tensor(whole, x)
        return whole, [whole @ w for w in weights]

    def scatter(self, h: Any, w: Any) -> Any:
        product = h @ w
        rows = product.shape[0] // dist.get_world_size()
        kept = product.new_empty((rows, product.shape[1]))
        dist.reduce_scatter_tensor(kept, product)
        return kept

    def reduce(self, h: Any, w: Any) -> Any:
        product = h @ w
        dist.all_reduce(product)
        return product


class AsyncTensorParallel:
    """PyTorch's fused operations on symmetric memory."""

    def __init__(self) -> None:
        self._group = dist.group.WORLD.group_name

    def gather(self, x: Any, weights: Sequence[Any]) -> list[Any]:
        return self._fused(x, weights, keep=False)[1]

    def gathered(self, x: Any, weights: Sequence[Any]) -> tuple[Any, list[Any]]:
        """The rows of all devices as well."""
        return self._fused(x, weights, keep=True)

    def _fused(self, x: Any, weights: Sequence[Any], *, keep: bool) -> Any:
        fused = torch.ops.symm_mem.fused_all_gather_matmul
        return fused(x, list(weights), 0, self._group, return_A=keep)

    def scatter(self, h: Any, w: Any) -> Any:
        fused = torch.ops.symm_mem.fused_matmul_reduce_scatter
        return fused(h, w, "sum", 0, self._group)

    def reduce(self, h: Any, w: Any) -> Any:
        raise NotImplementedError("there is no fused matmul and all-reduce")


class InPlace:
    """No communication: gathered rows are in place, sums stay partial."""

    def __init__(self, placed: Any, keep_rows: bool) -> None:
        self._placed, self._keep_rows = placed, keep_rows

    def gather(self, x: Any, weights: Sequence[Any]) -> list[Any]:
        return [self._placed @ w for w in weights]

    def scatter(self, h: Any, w: Any) -> Any:
        product = h @ w
        if not self._keep_rows:
            return product
        return product[: product.shape[0] // dist.get_world_size()]

    def reduce(self, h: Any, w: Any) -> Any:
        return h @ w


Model = dict[str, int]


def gathered(comm: Communication, model: Model, xs: Sequence[Any]) -> Any:
    return comm.gather(xs[0], xs[1:])[0]


def gathered_swiglu(comm: Communication, model: Model, xs: Sequence[Any]) -> Any:
    gate, up = comm.gather(xs[0], xs[1:])
    return F.silu(gate) * up


def scattered(comm: Communication, model: Model, xs: Sequence[Any]) -> Any:
    return comm.scatter(xs[0], xs[1])


def reduced(comm: Communication, model: Model, xs: Sequence[Any]) -> Any:
    return comm.reduce(xs[0], xs[1])


def mlp(comm: Communication, model: Model, xs: Sequence[Any]) -> Any:
    x, up, down = xs
    return comm.scatter(F.gelu(comm.gather(x, [up])[0], approximate="tanh"), down)


def swiglu_mlp(comm: Communication, model: Model, xs: Sequence[Any]) -> Any:
    x, gate, up, down = xs
    return comm.scatter(gathered_swiglu(comm, model, (x, gate, up)), down)


def attention(comm: Communication, model: Model, xs: Sequence[Any]) -> Any:
    x, qkv, out = xs
    return comm.scatter(_attend(comm.gather(x, [qkv])[0], model), out)


def layer(comm: Communication, model: Model, xs: Sequence[Any]) -> Any:
    x, first_gain, qkv, out, second_gain, gate, up, down = xs
    x = x + attention(comm, model, (_normalized(x, first_gain), qkv, out))
    block = (_normalized(x, second_gain), gate, up, down)
    return x + swiglu_mlp(comm, model, block)


def gelu_layer(comm: Communication, model: Model, xs: Sequence[Any]) -> Any:
    x, first_gain, qkv, out, second_gain, up, down = xs
    x = x + attention(comm, model, (_normalized(x, first_gain), qkv, out))
    return x + mlp(comm, model, (_normalized(x, second_gain), up, down))


def _normalized(x: Any, gain: Any) -> Any:
    return F.rms_norm(x, (x.shape[1],), gain, EPSILON)


def _attend(qkv: Any, model: Model) -> Any:
    """PyTorch's fused causal attention over the heads in `qkv`."""
    rows, width = qkv.shape
    queries, head, sequence = model["queries"], model["head"], model["sequence"]
    groups = width // ((queries + 2) * head)
    parts = qkv.view(rows // sequence, sequence, groups, queries + 2, head)
    q = parts[..., :queries, :].flatten(2, 3).transpose(1, 2)
    k, v = (parts[..., queries + n, :].transpose(1, 2) for n in (0, 1))
    mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return mixed.transpose(1, 2).reshape(rows, groups * queries * head)


LAYERS: dict[str, Callable[[Communication, Model, Sequence[Any]], Any]] = {
    function.__name__: function
    for function in (
        gathered,
        gathered_swiglu,
        scattered,
        reduced,
        mlp,
        swiglu_mlp,
        attention,
        layer,
        gelu_layer,
    )
}
