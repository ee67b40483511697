"""What cuDNN's kernels compute, in JAX: their lowering on a CPU, for tests."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.interpreters import mlir

# By name: what JAX calls to ask for a GPU has no public name, nor have the kernels.
CUDNN: Any = importlib.import_module("jax._src.cudnn.fused_attention_stablehlo")


def _scores(q: Any, k: Any, bias: Any, lengths: Any, params: dict[str, Any]) -> Any:
    """By sequence, group of heads, head in it, query and key."""
    batch, time, heads, size = q.shape
    grouped = q.reshape(batch, time, k.shape[2], heads // k.shape[2], size)
    scores = jnp.einsum("btkgh,bskh->bkgts", grouped, k) * params["scale"]
    if params.get("variadic_args", (False,))[0]:
        bias = jnp.broadcast_to(bias, (batch, heads, *bias.shape[2:]))
        scores += bias.reshape(scores.shape)
    mask = jnp.ones(scores.shape, bool)
    name = getattr(params.get("mask_type"), "name", "")
    if "CAUSAL" in name or params.get("use_causal_mask"):
        mask &= jnp.tril(jnp.ones(scores.shape[-2:], bool))
    if "PADDING" in name:
        for position, length in zip((-2, -1), lengths, strict=True):
            at = jnp.arange(scores.shape[position])
            shape = [1] * 5
            shape[position] = at.size
            inside = at.reshape(shape) < length.reshape(-1, 1, 1, 1, 1)
            mask &= inside
    return jnp.where(mask, scores, -1e9)


def _attend(
    q: Any, k: Any, v: Any, bias: Any, *lengths: Any, **params: Any
) -> tuple[Any, Any, Any]:
    """What is found, the logarithms of the sums of rows, and the weights."""
    dtype = q.dtype
    if params["layout"] == 1:
        q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
    q, k, v, bias = (x.astype(jnp.float32) for x in (q, k, v, bias))
    scores = _scores(q, k, bias, lengths, params)
    weights = jax.nn.softmax(scores)
    found = jnp.einsum("bkgts,bskh->btkgh", weights, v).reshape(*q.shape[:3], -1)
    if params["layout"] == 1:
        found = found.swapaxes(1, 2)
    sums = jax.nn.logsumexp(scores, axis=-1).reshape(q.shape[0], q.shape[2], -1)
    return found.astype(dtype), sums, weights


def _forward(*args: Any, **params: Any) -> list[Any]:
    found, sums, _ = _attend(*args[:6], **params)
    return [found, sums] if params["is_training"] else [found]


def _backward(*args: Any, **params: Any) -> list[Any]:
    found, pull = jax.vjp(
        lambda *qkvb: _attend(*qkvb, *args[4:6], **params)[0], *args[:4]
    )
    return list(pull(args[12].astype(found.dtype)))[: 3 + params["variadic_args"][1]]


def _largest(x: Any) -> Any:
    return jnp.max(jnp.abs(x)).astype(jnp.float32).reshape(1, 1, 1, 1)


def _forward_fp8(q: Any, k: Any, v: Any, *scales: Any, **params: Any) -> list[Any]:
    del scales
    found, sums, weights = _attend(q, k, v, jnp.zeros(0), **params)
    results = [found, _largest(weights), _largest(found), sums]
    return results if params["is_training"] else results[:3]


def _backward_fp8(*args: Any, **params: Any) -> list[Any]:
    def found(q: Any, k: Any, v: Any) -> Any:
        return _attend(q, k, v, jnp.zeros(0), **params)[0]

    gradients = jax.vjp(found, *args[:3])[1](args[4])
    return [*gradients, *map(_largest, gradients), _largest(args[4])]


_KERNELS: dict[str, Callable[..., list[Any]]] = {
    "_dot_product_attention_fwd_p": _forward,
    "_dot_product_attention_bwd_p": _backward,
    "_dot_product_attention_fp8_fwd_p": _forward_fp8,
    "_dot_product_attention_fp8_bwd_p": _backward_fp8,
}


@functools.cache
def lower_on_cpu() -> None:
    """Gives cuDNN's kernels a lowering for CPUs."""
    for name, kernel in _KERNELS.items():
        lowering = mlir.lower_fun(kernel, multiple_results=True)
        mlir.register_lowering(getattr(CUDNN, name), lowering, platform="cpu")
