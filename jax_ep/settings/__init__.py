"""Settings of kernel launches and the file of the fastest measured ones; independent of the kernels."""
