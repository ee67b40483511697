"""How a function is made, traced, compiled and called."""
