"""Helpers of all layers, independent of operations: argument checks, mesh axes, layout arithmetic."""
