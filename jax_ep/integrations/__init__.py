"""Adapters for other libraries. Each imports its library on demand."""
