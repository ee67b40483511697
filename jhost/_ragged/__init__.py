"""Products with groups of rows: the function, its primitive, its kernels for GPUs."""
