"""What the benchmarks share. Scripts beside this folder import it: Python puts their folder on its path."""
