"""The `xla` implementation: lax collectives and loops with static shapes, for any platform; the default on CPU."""
