"""The grammar of Host IR programs, and what is asked of them."""
