"""Recordings: an engine's telemetry in an MCAP file, written while it comes and read at any time of it."""
