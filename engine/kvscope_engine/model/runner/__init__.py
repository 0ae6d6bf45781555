"""Runs steps on the device, and makes the decisions that precede the first step: KV groups, pool size, backends."""
