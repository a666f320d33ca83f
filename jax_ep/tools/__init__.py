"""What `python -m jax_ep` runs: a look at the machine, measurements, and recordings of what kernels do."""
