"""The `xla` implementation: lax collectives and loops with static shapes, for any platform; the CPU's default."""
