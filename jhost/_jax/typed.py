"""Programs traced on a mesh with explicit axes, rewritten without sharding types.

On explicit axes types have shardings, and JAX checks that they fit.  Shardings that the
user writes (`jax.sharding.reshard`, `out_sharding=`) become sharding constraints.
Everything else in the types follows from these, and jhost may lay it out differently.
"""

# JAX's private functions are partly untyped; what leaves this module is typed.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportPrivateUsage=false

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import jax
from jax._src import linear_util
from jax.core import AbstractValue, ShapedArray, eval_jaxpr
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var, new_jaxpr_eqn
from jax.interpreters.ad import Zero
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from jhost import errors
from jhost._jax.eqns import (
    Atom,
    ClosedJaxpr,
    close,
    constraint,
    like_closed,
    with_each_leaf,
)

_SHARDINGS = ("sharding", "out_sharding")
"""The parameters of primitives that say which type the user wants of the result."""


_WITH_RULES = ("custom_jvp_call", "custom_vjp_call")


def untyped(jaxpr: Any, mesh: AbstractMesh) -> Any:
    """A program, open or closed, whose types have no sharding, on an automatic mesh.

    Raises:
        UnsupportedError: types speak of sums that have still to be made, or the body of
            a `jax.shard_map` has explicit axes.
    """
    with jax.sharding.use_abstract_mesh(mesh):
        return _Untyped(mesh).program(jaxpr)


class _Untyped:
    """The variables of one program, without shardings, and its equations."""

    def __init__(self, mesh: AbstractMesh) -> None:
        self.mesh = mesh
        self.env: dict[Var, Atom] = {}
        self.eqns: list[JaxprEqn] = []

    def program(self, jaxpr: Any) -> Any:
        closed = close(jaxpr)
        variables = (*closed.constvars, *closed.invars)
        if not all(isinstance(var.aval, ShapedArray) for var in variables):
            return jaxpr  # a kernel, which works on references
        constvars, invars = map(self.define, closed.constvars), closed.invars
        parts = {"constvars": list(constvars), "invars": list(map(self.define, invars))}
        for eqn in closed.eqns:
            self.equation(eqn)
        outvars = list(map(self.read, closed.outvars))
        parts |= {"eqns": self.eqns, "outvars": outvars}
        if not closed.constvars:
            del parts["constvars"]  # JAX drops the values if it is given
        new = closed.jaxpr.replace(**parts, debug_info=closed.debug_info)
        return like_closed(new, closed) if isinstance(jaxpr, ClosedJaxpr) else new

    def define(self, var: Var) -> Var:
        self.env[var] = new = Var(_plain(var.aval))
        return new

    def read(self, atom: Atom) -> Atom:
        if isinstance(atom, Literal):
            return Literal(atom.val, _plain(atom.aval))
        return self.env[atom]

    def equation(self, eqn: JaxprEqn) -> None:
        if eqn.primitive.name == "reshard":
            return self.reshard(eqn, "dst_sharding")
        if eqn.primitive.name == "sharding_constraint" and _typed_axes(eqn):
            return self.reshard(eqn, "sharding")
        wanted = _wanted(eqn)
        specs = list(map(_constrained_to, wanted.values()))
        params = {
            name: None if name in wanted else self.value(value)
            for name, value in eqn.params.items()
        }
        if eqn.primitive.name == "shard_map":
            _check_shard_map(eqn)
            params["jaxpr"] = eqn.params["jaxpr"]
        if eqn.primitive.name in _WITH_RULES:
            params |= self.rules(eqn)
        ins, outs = (
            list(map(self.read, eqn.invars)),
            list(map(self.define, eqn.outvars)),
        )
        # An equation keeps the context in which it is made, and that has a mesh.
        with _outside_types(eqn, self.mesh):
            new = new_jaxpr_eqn(
                ins, outs, eqn.primitive, params, self.effects(eqn), eqn.source_info
            )
        self.eqns.append(new)
        for sharding in specs:
            self.env[eqn.outvars[0]] = self.constrained(outs[0], sharding, eqn)

    def effects(self, eqn: JaxprEqn) -> set[Any]:
        """The effects of an equation, which name the references that they are on."""

        def renamed(effect: Any) -> Any:
            reference = getattr(effect, "input", None)
            known = isinstance(reference, Var)
            return effect.replace(self.read(reference)) if known else effect

        return set(map(renamed, eqn.effects))

    def reshard(self, eqn: JaxprEqn, name: str) -> None:
        """A constraint, or nothing where axes only become automatic."""
        source, sharding = self.read(eqn.invars[0]), eqn.params[name]
        if not isinstance(sharding, NamedSharding):
            raise errors.UnsupportedError(f"jax.sharding.reshard to {sharding}")
        if AxisType.Explicit in sharding.mesh.axis_types:
            source = self.constrained(source, _constrained_to(sharding), eqn)
        self.env[eqn.outvars[0]] = source

    def constrained(self, atom: Atom, sharding: NamedSharding, like: JaxprEqn) -> Var:
        out = Var(atom.aval)
        self.eqns.append(constraint(atom, out, sharding, like))
        return out

    def value(self, value: Any) -> Any:
        """A parameter of an equation."""
        return with_each_leaf(value, self.leaf)

    def leaf(self, value: Any) -> Any:
        """A value in a parameter."""
        match value:
            case ClosedJaxpr() | Jaxpr():
                return _Untyped(self.mesh).program(value)
            case ShapedArray():
                return _plain(value)
            case Mesh() | AbstractMesh():
                return _automatic(value)
            case NamedSharding():
                return NamedSharding(_automatic(value.mesh), value.spec)
            case _:
                return value

    def rules(self, eqn: JaxprEqn) -> dict[str, Any]:
        """The user's rules for derivatives, which are traced when they are used."""
        rules = _Rules(eqn, self.mesh)
        names = {
            "jvp_jaxpr_fun": rules.forward,
            "fwd_jaxpr_thunk": rules.forward,
            "bwd": rules.backward,
        }
        return {
            name: linear_util.wrap_init(
                partial(rule, eqn.params[name]), debug_info=eqn.params[name].debug_info
            )
            for name, rule in names.items()
            if name in eqn.params
        }


class _Rules:
    """The user's rules of one call, on the types that its function was traced on."""

    def __init__(self, eqn: JaxprEqn, mesh: AbstractMesh) -> None:
        self.eqn = eqn
        self.mesh = mesh
        self.made: list[AbstractValue] = []  # of what the forward rule returns

    def forward(self, rule: Any, *zeros: Any) -> Sequence[Any]:
        with self.types():
            jaxpr, *rest = rule.call_wrapped(*zeros)
        self.made = [var.aval for var in jaxpr.outvars]
        return untyped(jaxpr, self.mesh), *rest

    def backward(self, rule: Any, *args: Any) -> Any:
        """The rule as a program, as its operands have other types than it wants."""
        kinds, held = self.operands(), list[Any]()

        def traced(arrays: Sequence[Any]) -> list[Any]:
            pairs = zip(arrays, kinds, strict=True)
            values = [SymbolicZero(kind) if x is None else x for x, kind in pairs]
            results = rule.call_wrapped(*values)
            leaves, tree = jax.tree.flatten(results, is_leaf=_is_zero)
            held.append((leaves, tree))
            return [leaf for leaf in leaves if not _is_zero(leaf)]

        arrays = [None if _is_zero(arg) else arg for arg in args]
        pairs = zip(arrays, kinds, strict=True)
        with self.types():
            typed = [None if array is None else kind for array, kind in pairs]
            jaxpr = untyped(jax.make_jaxpr(traced)(typed), self.mesh)
        ((leaves, tree),) = held
        made = iter(eval_jaxpr(jaxpr.jaxpr, jaxpr.consts, *jax.tree.leaves(arrays)))
        return jax.tree.unflatten(
            tree,
            [
                type(leaf)(_plain(leaf.aval)) if _is_zero(leaf) else next(made)
                for leaf in leaves
            ],
        )

    def operands(self) -> list[AbstractValue]:
        """The types of residuals (some of them are operands) and of cotangents."""
        call = close(self.eqn.params["call_jaxpr"])
        _, _, forwarded = self.eqn.params["out_trees"]()
        ins, made = call.in_avals, iter(self.made)
        residuals = [next(made) if f is None else ins[f] for f in forwarded]
        return [*residuals, *(aval.to_ct_aval() for aval in call.out_avals)]

    def types(self) -> Any:
        """The context of an equation's types."""
        return jax.sharding.use_abstract_mesh(self.eqn.ctx.cur_abstract_mesh)


def _is_zero(value: Any) -> bool:
    return isinstance(value, SymbolicZero | Zero)


@contextmanager
def _outside_types(eqn: JaxprEqn, mesh: AbstractMesh) -> Generator[None]:
    """The context of an equation with another mesh."""
    with eqn.ctx.manager, jax.sharding.use_abstract_mesh(mesh):
        yield


def _wanted(eqn: JaxprEqn) -> dict[str, NamedSharding]:
    """The types that the user asked for, for an equation's result."""
    if eqn.primitive.name in ("jhost", "sharding_constraint"):
        return {}
    given = {name: eqn.params.get(name) for name in _SHARDINGS}
    return {
        name: sharding
        for name, sharding in given.items()
        if isinstance(sharding, NamedSharding)
    }


def _typed_axes(eqn: JaxprEqn) -> bool:
    """Whether a constraint, on automatic axes, is for a mesh with explicit ones too."""
    sharding = eqn.params["sharding"]
    kinds = sharding.mesh.axis_types if isinstance(sharding, NamedSharding) else ()
    return AxisType.Explicit in kinds


def _constrained_to(kind: NamedSharding) -> NamedSharding:
    """The constraint that a type asks for; it leaves automatic axes open."""
    spec = kind.spec
    if spec.unreduced or spec.reduced:
        raise errors.UnsupportedError(
            f"A type asks for {spec}, but jhost decides where sums are made. Ask for "
            "the sharding of the sum."
        )
    some_automatic = AxisType.Auto in kind.mesh.axis_types
    free = PartitionSpec.UNCONSTRAINED if some_automatic else None
    entries = (free if entry is None else entry for entry in spec)
    return NamedSharding(_automatic(kind.mesh), PartitionSpec(*entries))


def _automatic(mesh: Any) -> Any:
    """A mesh with automatic axes in place of explicit ones."""
    kinds = tuple(
        AxisType.Auto if kind == AxisType.Explicit else kind for kind in mesh.axis_types
    )
    if kinds == mesh.axis_types:
        return mesh
    if isinstance(mesh, Mesh):
        return Mesh(mesh.devices, mesh.axis_names, axis_types=kinds)
    return mesh.update(axis_types=kinds)


def _plain(aval: AbstractValue) -> AbstractValue:
    if not isinstance(aval, ShapedArray):
        return aval
    return ShapedArray(aval.shape, aval.dtype, weak_type=aval.weak_type)


def _check_shard_map(eqn: JaxprEqn) -> None:
    """Refuses a body with axes that are not manual, because its types stay."""
    axes = set(eqn.params["mesh"].axis_names)
    if rest := sorted(axes - set(eqn.params["newly_manual_axes"])):
        raise errors.UnsupportedError(
            f"A jax.shard_map on an explicit mesh leaves {', '.join(rest)} to types in "
            "its body. Let it be over all axes."
        )
