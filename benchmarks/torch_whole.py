"""A whole training step in PyTorch: FSDP2, blocks compiled, fused AdamW.

Wrapped as torchtitan does it: each block is checkpointed, compiled, and sharded, in
this order, and then embedding, last norm with output weights, and the rest.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch  # pyright: ignore[reportMissingImports]
import torch.nn.functional as F  # pyright: ignore[reportMissingImports]
from torch import nn  # pyright: ignore[reportMissingImports]
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (  # pyright: ignore[reportMissingImports]
    checkpoint_wrapper,
)
from torch.distributed.fsdp import (  # pyright: ignore[reportMissingImports]
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.nn.attention import (  # pyright: ignore[reportMissingImports]
    sdpa_kernel,
)

from benchmarks.torch_step import KERNELS

Tensor: TypeAlias = Any
Module: Any = nn.Module
Sizes: TypeAlias = dict[str, Any]

LEARNING_RATE = 3e-4


class Block(Module):
    """One Llama layer."""

    def __init__(self, model: Sizes) -> None:
        super().__init__()
        self.model = model
        hidden, ffn, head = model["hidden"], model["ffn"], model["head"]
        queries, shared = model["heads"] * head, model["kv_heads"] * head

        def linear(rows: int, columns: int) -> Any:
            return nn.Linear(rows, columns, bias=False)

        self.attention_norm = nn.RMSNorm(hidden, eps=1e-5)
        self.query, self.key = linear(hidden, queries), linear(hidden, shared)
        self.value, self.out = linear(hidden, shared), linear(queries, hidden)
        self.mlp_norm = nn.RMSNorm(hidden, eps=1e-5)
        self.gate, self.up = linear(hidden, ffn), linear(hidden, ffn)
        self.down = linear(ffn, hidden)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        h = self.mlp_norm(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))

    def attention(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        rows, length, _ = x.shape

        def heads(projected: Tensor) -> Tensor:
            return projected.view(rows, length, -1, self.model["head"]).transpose(1, 2)

        q, k = (_rotated(heads(w(x)), cos, sin) for w in (self.query, self.key))
        v = heads(self.value(x))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.out(mixed.transpose(1, 2).reshape(rows, length, -1))


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(x.dtype)


class Llama(Module):
    """Embedding, blocks, and logits."""

    def __init__(self, model: Sizes, how: Sizes) -> None:
        super().__init__()
        self.embedding = nn.Embedding(how["vocabulary"], model["hidden"])
        self.blocks = nn.ModuleList(Block(model) for _ in range(how["layers"]))
        self.norm = nn.RMSNorm(model["hidden"], eps=1e-5)
        self.logits = nn.Linear(model["hidden"], how["vocabulary"], bias=False)

    def forward(self, tokens: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, cos, sin)
        return self.logits(self.norm(x))


def step(model: Sizes, how: Sizes, device: Any) -> Callable[[int], list[Tensor]]:
    """A training step on random tokens, which returns its loss.

    Args:
        model: the sizes of a layer.
        how: the `vocabulary`, the number of `layers`, whether each is a `checkpoint`,
            and how many `sequences` this device has.
        device: this process's.
    """
    torch.compiler.reset()  # of the case before
    with torch.device(device):
        net = Llama(model, how)
        cos, sin = _angles(model)
        shape = how["sequences"], model["sequence"] + 1
        tokens = torch.randint(how["vocabulary"], shape)
    net = _sharded(net, how["checkpoint"])
    optimizer = torch.optim.AdamW(
        net.parameters(),
        lr=LEARNING_RATE,
        betas=(0.9, 0.95),
        weight_decay=0.1,
        fused=True,
    )
    loss_of = torch.compile(_cross_entropy)

    def run(_: int) -> list[Tensor]:
        with sdpa_kernel(KERNELS, set_priority=True):
            loss = loss_of(net(tokens[:, :-1], cos, sin), tokens[:, 1:])
            loss.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return [loss.detach()]

    run(0)  # compiles, and makes the optimizer's moments
    return run


def _cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(0, 1))


def _sharded(net: Any, checkpointed: bool) -> Any:
    """Weights gathered in bfloat16, gradients scattered in it."""
    narrow = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16,
        reduce_dtype=torch.bfloat16,
        cast_forward_inputs=False,  # angles stay as they are
    )
    for number, block in enumerate(net.blocks):
        if checkpointed:
            block = checkpoint_wrapper(block, preserve_rng_state=False)
        net.blocks[number] = torch.compile(block)
        fully_shard(net.blocks[number], mp_policy=narrow)
    fully_shard(net.embedding, mp_policy=narrow)
    fully_shard([net.norm, net.logits], mp_policy=narrow, reshard_after_forward=False)
    return fully_shard(net, mp_policy=narrow)


def _angles(model: Sizes, base: float = 10_000.0) -> tuple[Tensor, Tensor]:
    half = model["head"] // 2
    frequencies = base ** (-torch.arange(half, dtype=torch.float32) / half)
    angles = torch.arange(model["sequence"], dtype=torch.float32)[:, None] * frequencies
    return angles.cos(), angles.sin()
