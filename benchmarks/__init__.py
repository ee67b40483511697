"""The benchmarks of jhost against its peers; `python -m benchmarks` runs them."""
