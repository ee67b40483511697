"""Products with groups of rows, and rows in another order."""
