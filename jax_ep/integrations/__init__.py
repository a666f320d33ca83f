"""Adapters that put the expert layer into other libraries. Each imports its library on demand."""
