"""Chunks that go from one recording into another byte for byte: how they are taken and what must hold for it."""
