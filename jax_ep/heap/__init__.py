"""Symmetric memory: allocation, the rendezvous of processes, and peer access."""
