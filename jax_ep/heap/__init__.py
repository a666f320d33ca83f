"""Symmetric memory: who owns it, how processes meet, and what may write to a peer's."""
