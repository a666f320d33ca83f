"""What all layers use and what knows nothing of operations: argument checks, mesh axes, layout arithmetic."""
