"""From a jaxpr to a program; what is refused before."""
