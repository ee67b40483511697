"""A mixture of experts: each device has some of them."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn.dtypes import promote_dtype
from jax import lax
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec as P

from jhost import errors
from jhost._ragged.function import ragged_dot
from jhost.nnx._dispatch import dispatch, on_their_devices
from jhost.nnx._params import annotated, check_divides

_router_init = nnx.initializers.lecun_normal()
_kernel_init = jax.nn.initializers.lecun_normal(
    # Each expert is a matrix of its own: fans are those of one.
    in_axis=-2,
    out_axis=-1,
    batch_axis=(0,),
)


class MoE(nnx.Module):
    """A mixture of experts that drops no token.

    A router chooses `top_k` experts for each token, by the softmax of its logits in
    float32.  The result is the weighted sum of the experts' results, in float32 as
    well.  An expert is a gated MLP, `down(activation(gate(x)) * up(x))`, or a plain
    one, `down(activation(up(x)))`.  Its matmuls are `jhost.ragged_dot` of the rows of
    the tokens that chose it.

    A mesh axis shards the experts, and the sequence (the last dim but one) of the
    tokens.  Kernels stay where they are.  Each token goes to the devices of its experts
    and back, by `jax.lax.ragged_all_to_all`.  If XLA does not have it, as on CPUs, the
    token goes by `jax.lax.all_to_all` of padded blocks.  If there are D devices, each
    with n experts and t tokens, a device sends `t * top_k` rows.  All tokens may choose
    the experts of one device.  So each device has room for `D * t * min(top_k, n)` rows
    of the features, and for as many of the hidden features.

    The mesh is the mesh of `jax.set_mesh` when the layer is called or, if there is no
    mesh then, when it is made.  Without a mesh the layer computes the same, and
    `jhost.jit` moves all tokens or all kernels, whichever have fewer bytes.

    It takes and returns floats of shape `(..., sequence, features)`.  The result has
    the promoted dtype of the operand and `dtype`, or of the operand and the parameters
    if `dtype` is None.

    Args:
        features: the features of operand and result.
        hidden_features: the hidden features of each expert.
        num_experts: the number of experts, a multiple of the size of the mesh axis.
        top_k: how many experts a token has, 1 to `num_experts`.
        gated: whether experts are gated, with three kernels instead of two.
        activation: an elementwise function of floats of shape `(rows,
            hidden_features)`.
        normalize: whether the weights of a token's experts are divided by their sum.
        mesh_axis: the mesh axis that shards the experts, and the sequence of the
            tokens.
        batch_axes: other mesh axes, which shard the first dim of the tokens.
        dtype: the dtype in which experts compute; None for the promoted dtype of `x`
            and kernels.
        param_dtype: the dtype of the kernels.  The router has float32, or float64 if
            this is float64.
        kernel_init: makes the experts' kernels, of shape `(num_experts, in, out)`.
        router_init: makes the router's kernel, of shape `(features, num_experts)`.
        rngs: as everywhere in flax.  Parameters are drawn in the order router, gate,
            up, down.

    Raises:
        DivisibilityError: the mesh axis does not divide the experts.
        OptionError: `top_k` is not between 1 and `num_experts`.

    Example:
        >>> from flax import nnx
        >>> import jax.numpy as jnp
        >>> import jhost.nnx
        >>> layer = jhost.nnx.MoE(4, 16, 8, top_k=2, rngs=nnx.Rngs(0))
        >>> layer(jnp.ones((2, 6, 4))).shape
        (2, 6, 4)
        >>> layer.up.out_sharding
        ('ep', None, None)
    """

    def __init__(
        self,
        features: int,
        hidden_features: int,
        num_experts: int,
        *,
        top_k: int = 2,
        gated: bool = True,
        activation: Callable[[jax.Array], jax.Array] = jax.nn.silu,
        normalize: bool = True,
        mesh_axis: str = "ep",
        batch_axes: Sequence[str] = (),
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        kernel_init: Any = _kernel_init,
        router_init: Any = _router_init,
        rngs: nnx.Rngs,
    ) -> None:
        check_divides("The number of experts", num_experts, mesh_axis)
        if not 1 <= top_k <= num_experts:
            raise errors.OptionError(
                f"jhost.nnx.MoE got top_k={top_k}, but it must be at least 1 and at "
                f"most num_experts={num_experts}."
            )

        def kernel(rows: int, columns: int) -> Any:
            value = kernel_init(
                rngs.params(), (num_experts, rows, columns), param_dtype
            )
            return annotated(nnx.Param(value), (mesh_axis, None, None))

        wide = param_dtype if jnp.finfo(param_dtype).bits > 32 else jnp.float32
        self.router = nnx.Param(
            router_init(rngs.params(), (features, num_experts), wide)
        )
        self.gate = kernel(features, hidden_features) if gated else None
        self.up = kernel(features, hidden_features)
        self.down = kernel(hidden_features, features)
        self.num_experts, self.top_k = num_experts, top_k
        self.activation, self.normalize = activation, normalize
        self.mesh_axis, self.batch_axes = mesh_axis, tuple(batch_axes)
        self.dtype = dtype
        self.mesh = jax.sharding.get_abstract_mesh()

    def __call__(self, x: jax.Array) -> jax.Array:
        """Runs the layer.

        Args:
            x: floats of shape `(..., sequence, features)`.

        Returns:
            Floats of the same shape, of the promoted dtype of `x` and `dtype`, or of
            `x` and the parameters if `dtype` is None.

        Raises:
            DivisibilityError: the mesh axes do not divide the tokens.
            DimError: `x` has no sequence.
        """
        # The softmax is over all experts; `normalize` divides by the chosen ones' sum.
        weights, chosen = lax.top_k(self._probabilities(x), self.top_k)
        if self.normalize:
            weights = weights / jnp.sum(weights, -1, keepdims=True)
        given = (x, self.gate, self.up, self.down)
        values: Any = tuple(None if v is None else v[...] for v in given)
        x, *kernels = promote_dtype(values, dtype=self.dtype)
        mesh = self._mesh()
        if mesh.shape.get(self.mesh_axis, 1) == 1:
            return self._apply(x, chosen, weights, kernels)
        spec = self._spec(x.shape, mesh.shape)
        mapped = jax.shard_map(
            functools.partial(self._apply, axis=self.mesh_axis),
            mesh=mesh,
            in_specs=(spec, spec, spec, P(self.mesh_axis)),
            out_specs=spec,
            check_vma=False,
        )
        return mapped(x, chosen, weights, kernels)

    def load_balance(self, x: jax.Array) -> jax.Array:
        """Returns how unevenly tokens choose experts, to be added to the model's loss.

        It is 1 if all experts are chosen equally often, and at most `num_experts`.
        Formula: Fedus, Zoph and Shazeer, "Switch Transformers",
        https://arxiv.org/abs/2101.03961, equation 4, over all tokens of the batch, with
        each of a token's choices counted as `1 / top_k`.

        Args:
            x: floats of shape `(..., sequence, features)`, as for the layer.

        Returns:
            A float of shape `()`, in the dtype of the router's kernel.
        """
        probabilities = self._probabilities(x)
        _, chosen = lax.top_k(probabilities, self.top_k)
        counts = jax.nn.one_hot(chosen, self.num_experts, dtype=probabilities.dtype)
        tokens = tuple(range(x.ndim - 1))
        share = jnp.mean(counts, (*tokens, x.ndim - 1))
        return self.num_experts * jnp.sum(share * jnp.mean(probabilities, tokens))

    def _probabilities(self, x: jax.Array) -> jax.Array:
        router = self.router[...]
        # Near ties decide where a token goes: no TF32, which GPUs take by default.
        logits = jnp.matmul(x.astype(router.dtype), router, precision="highest")
        return jax.nn.softmax(logits)

    def _apply(
        self,
        x: jax.Array,
        chosen: jax.Array,
        weights: jax.Array,
        kernels: Sequence[jax.Array | None],
        axis: str | None = None,
    ) -> jax.Array:
        """On one device's part, if there is an axis: its tokens, and its experts."""
        gate, up, down = kernels
        assert up is not None
        assert down is not None

        def experts(rows: jax.Array, counts: jax.Array) -> jax.Array:
            hidden = ragged_dot(rows, up, counts)
            if gate is None:
                hidden = self.activation(hidden)
            else:
                hidden = self.activation(ragged_dot(rows, gate, counts)) * hidden
            return ragged_dot(hidden, down, counts)

        parts = (part.reshape(-1, part.shape[-1]) for part in (x, chosen, weights))
        tokens, chosen, weights = parts
        work = experts
        if axis is not None:
            # A token has at most one row for each expert here.  Shapes are static, so
            # there is room for the worst case.
            most = len(tokens) * min(self.top_k, len(up))
            work = on_their_devices(experts, axis, most)
        done = dispatch(tokens, chosen, weights, self.num_experts, work)
        return done.reshape(x.shape)

    def _mesh(self) -> Any:
        """The mesh of the call, or the one under which the layer was made.

        With devices, if they are known: a jit that closes over the layer asks for them.
        """
        mesh = jax.sharding.get_abstract_mesh()
        if not mesh.empty:
            return mesh
        kernel = self.up[...]
        known = None if isinstance(kernel, Tracer) else kernel.sharding
        if isinstance(known, NamedSharding) and known.mesh.abstract_mesh == self.mesh:
            return known.mesh
        return self.mesh

    def _spec(self, shape: Sequence[int], mesh: Any) -> P:
        """The spec of the tokens; raises if the axes do not divide them."""
        if len(shape) < 2:
            raise errors.DimError(
                f"jhost.nnx.MoE got a token of shape {tuple(shape)}, and shards tokens "
                f"over {self.mesh_axis!r} by their last dim but one. Give it several, "
                "of shape (..., sequence, features)."
            )
        dims: list[tuple[str, ...]] = [()] * len(shape)
        dims[0] += self.batch_axes
        dims[-2] += (self.mesh_axis,)
        for dim, axes in enumerate(dims):
            size = math.prod(mesh[axis] for axis in axes)
            if shape[dim] % size:
                raise errors.DivisibilityError(
                    f"jhost.nnx.MoE got tokens of shape {tuple(shape)}, whose dim "
                    f"{dim} is sharded over the mesh axes {axes}, and their size "
                    f"{size} does not divide it: {shape[dim]} = {shape[dim] // size} * "
                    f"{size} + {shape[dim] % size}. Pad it to a multiple of {size}."
                )
        return P(*dims)
