"""A training step in PyTorch: the layers of `torch_layers`, a loss, and its gradients.

The gradient of gathering and multiplying is multiplying and scattering, and the other
way round: a backward uses the operations of the forward, fused where those are.
Gradients of weights are matmuls of what was gathered.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch  # pyright: ignore[reportMissingImports]
import torch.distributed as dist  # pyright: ignore[reportMissingImports]
from torch.nn.attention import (  # pyright: ignore[reportMissingImports]
    SDPBackend,
    sdpa_kernel,
)
from torch.utils.checkpoint import (  # pyright: ignore[reportMissingImports]
    checkpoint,
)

from benchmarks import torch_layers

Tensor: TypeAlias = Any
Function: Any = torch.autograd.Function

# cuDNN's first, which the arms in JAX call as well.
KERNELS = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]


class _Gather(Function):
    """Products of the rows of all devices with this one's columns."""

    @staticmethod
    def forward(ctx: Any, comm: Any, x: Tensor, *weights: Tensor) -> Any:
        whole, products = comm.gathered(x, weights)
        ctx.comm = comm
        ctx.save_for_backward(whole, *weights)
        return tuple(products)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> Any:
        whole, *weights = ctx.saved_tensors
        cotangents = tuple(each.contiguous() for each in cotangents)
        # One product of all, so that one sum is scattered.
        of_x = ctx.comm.scatter(_side_by_side(cotangents), _side_by_side(weights).t())
        return None, of_x, *(whole.t() @ each for each in cotangents)


class _Scatter(Function):
    """This device's rows of a product that is summed over the devices."""

    @staticmethod
    def forward(ctx: Any, comm: Any, h: Tensor, w: Tensor) -> Tensor:
        ctx.comm = comm
        ctx.save_for_backward(h, w)
        return comm.scatter(h, w)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Any:
        h, w = ctx.saved_tensors
        whole, (of_h,) = ctx.comm.gathered(cotangent.contiguous(), [w.t()])
        return None, of_h, h.t() @ whole


def _side_by_side(matrices: Sequence[Tensor]) -> Tensor:
    return matrices[0] if len(matrices) == 1 else torch.cat(list(matrices), dim=1)


class Differentiable:
    """A communication of `torch_layers`, of whose results gradients can be taken."""

    def __init__(self, comm: Any) -> None:
        self._comm = comm

    def gather(self, x: Tensor, weights: Sequence[Tensor]) -> list[Tensor]:
        return list(_Gather.apply(self._comm, x, *weights))

    def scatter(self, h: Tensor, w: Tensor) -> Tensor:
        return _Scatter.apply(self._comm, h, w)

    def reduce(self, h: Tensor, w: Tensor) -> Tensor:
        raise NotImplementedError("no layer of a step reduces")


def step(
    comm: Any, model: torch_layers.Model, how: dict[str, Any]
) -> Callable[[Sequence[Tensor]], list[Tensor]]:
    """From x and the weights of all layers: the loss, and gradients if wanted.

    Args:
        comm: a communication of `torch_layers`.
        model: the layers' sizes.
        how: the number of `layers`, whether each is a `checkpoint`, and whether it goes
            `backward`; operands then require gradients.
    """
    differentiable = Differentiable(comm)

    def layer(x: Tensor, *weights: Tensor) -> Tensor:
        return torch_layers.layer(differentiable, model, (x, *weights))

    def again(x: Tensor, *weights: Tensor) -> Tensor:
        return checkpoint(
            layer, x, *weights, use_reentrant=False, preserve_rng_state=False
        )

    def loss(x: Tensor, weights: Sequence[Tensor]) -> Tensor:
        each = len(weights) // how["layers"]
        for start in range(0, len(weights), each):
            work = again if how["checkpoint"] else layer
            x = work(x, *weights[start : start + each])
        return (x.float() ** 2).sum()

    def forward(operands: Sequence[Tensor]) -> list[Tensor]:
        with torch.no_grad(), sdpa_kernel(KERNELS, set_priority=True):
            return [_total(loss(operands[0], operands[1:]))]

    def both(operands: Sequence[Tensor]) -> list[Tensor]:
        with sdpa_kernel(KERNELS, set_priority=True):
            result = loss(operands[0], operands[1:])
            gradients = torch.autograd.grad(result, list(operands))
        return [_total(result.detach()), *_with_summed_gains(gradients)]

    return both if how["backward"] else forward


def _total(value: Tensor) -> Tensor:
    dist.all_reduce(value)
    return value


def _with_summed_gains(gradients: Sequence[Tensor]) -> list[Tensor]:
    """Gains are the same on every device, and their gradients of all rows: one sum."""
    found = list(gradients)
    places = [number for number, each in enumerate(found) if each.dim() == 1]
    summed = _total(torch.stack([found[number] for number in places]))
    for number, each in zip(places, summed, strict=True):
        found[number] = each
    return found
