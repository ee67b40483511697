"""The grammar of Host IR programs, and questions about them."""
