"""From a jaxpr to a Host IR program, and from there to JAX again."""
