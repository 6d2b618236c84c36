"""Formats by role, numerics profiles, checkpoints and adapters: what trainer and engine must agree on."""
