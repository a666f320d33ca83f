"""What `python -m jax_ep` runs: a look at the machine."""
