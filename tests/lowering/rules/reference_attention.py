"""What cuDNN's kernels compute, in JAX: their lowering on a CPU, for tests."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
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
        behind = jnp.arange(scores.shape[-2])[:, None] - jnp.arange(scores.shape[-1])
        mask &= (behind >= 0) & (behind < (params.get("sliding_window_length") or time))
    if "PADDING" in name:
        for position, length in zip((-2, -1), lengths, strict=True):
            at = jnp.arange(scores.shape[position])
            shape = [1] * 5
            shape[position] = at.size
            inside = at.reshape(shape) < length.reshape(-1, 1, 1, 1, 1)
            mask &= inside
    return jnp.where(mask, scores, -np.inf)


def _of_no_length(lengths: Any, params: dict[str, Any]) -> Any:
    """By sequence: no number for a length of 0, for which nothing is known of cuDNN."""
    name = getattr(params.get("mask_type"), "name", "")
    if "PADDING" not in name:
        return jnp.zeros((1, 1, 1, 1))
    none = (lengths[0] == 0) | (lengths[1] == 0)
    return jnp.where(none, np.nan, 0).reshape(-1, 1, 1, 1)


def _attend(
    q: Any, k: Any, v: Any, bias: Any, *lengths: Any, **params: Any
) -> tuple[Any, Any, Any]:
    """What is found, the logarithms of the sums of rows, and the weights."""
    dtype = q.dtype
    if params["layout"] == 1:
        q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
    q, k, v, bias = (x.astype(jnp.float32) for x in (q, k, v, bias))
    scores = _scores(q, k, bias, lengths, params)
    sums = jax.nn.logsumexp(scores, axis=-1, keepdims=True)
    weights = jnp.exp(scores - jnp.where(jnp.isneginf(sums), 0, sums))
    found = jnp.einsum("bkgts,bskh->btkgh", weights, v).reshape(*q.shape[:3], -1)
    if params["layout"] == 1:
        found = found.swapaxes(1, 2)
    found += _of_no_length(lengths, params)
    sums = sums.reshape(q.shape[0], q.shape[2], -1)
    return found.astype(dtype), sums, weights


def _forward(*args: Any, **params: Any) -> list[Any]:
    found, sums, _ = _attend(*args[:6], **params)
    return [found, sums] if params["is_training"] else [found]


def _backward(*args: Any, **params: Any) -> list[Any]:
    """By the statistics and results of all keys, as the kernel does."""
    sums, found, cotangent = args[10:13]
    operands = [x.astype(jnp.float32) for x in args[:4]]
    found, cotangent = (x.astype(jnp.float32) for x in (found, cotangent))
    if params["layout"] == 1:
        operands[:3] = (x.swapaxes(1, 2) for x in operands[:3])
        found, cotangent = found.swapaxes(1, 2), cotangent.swapaxes(1, 2)
    query, key, value, bias = operands

    def grouped(x: Any) -> Any:
        return x.reshape(*x.shape[:2], key.shape[2], -1, x.shape[-1])

    def scores(query: Any, key: Any, bias: Any) -> Any:
        return _scores(query, key, bias, args[4:6], params)

    made, pull = jax.vjp(scores, query, key, bias)
    sums = jnp.where(jnp.isneginf(sums), 0, sums)  # a row that nothing was found in
    weights = jnp.exp(made - sums.reshape(*made.shape[:-1], 1))
    found, cotangent = grouped(found), grouped(cotangent)
    rows = jnp.einsum("btkgh,btkgh->bkgt", found, cotangent)[..., None]
    of_weights = jnp.einsum("btkgh,bskh->bkgts", cotangent, value)
    of_values = jnp.einsum("bkgts,btkgh->bskh", weights, cotangent)
    of_query, of_key, of_bias = pull(weights * (of_weights - rows))
    gradients = [of_query, of_key, of_values]
    if params["layout"] == 1:
        gradients = [x.swapaxes(1, 2) for x in gradients]
    gradients = [x + _of_no_length(args[4:6], params) for x in gradients]
    gradients = [*gradients, of_bias][: 3 + params["variadic_args"][1]]
    return [x.astype(a.dtype) for x, a in zip(gradients, args, strict=False)]


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


def as_with_cudnn(monkeypatch: pytest.MonkeyPatch) -> None:
    """JAX takes this machine for one with a GPU and cuDNN, whose kernels run here."""
    monkeypatch.setattr(CUDNN, "check_cudnn_version", lambda: 91300)
    monkeypatch.setattr(CUDNN, "check_compute_capability", lambda _: True)
    monkeypatch.setattr(CUDNN, "is_cuda_compute_capability_equal", lambda _: False)
    lower_on_cpu()


@functools.cache
def lower_on_cpu() -> None:
    """Gives cuDNN's kernels a lowering for CPUs."""
    for name, kernel in _KERNELS.items():
        lowering = mlir.lower_fun(kernel, multiple_results=True)
        mlir.register_lowering(getattr(CUDNN, name), lowering, platform="cpu")
