"""How each value is spread over the mesh, and what moves for it."""
