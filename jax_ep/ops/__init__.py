"""The operations: public functions with their checks and their VJPs, and the registry of implementations."""
