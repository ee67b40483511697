"""From a jaxpr to a program; refusals come before."""
