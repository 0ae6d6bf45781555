"""Recordings: telemetry of an engine in an MCAP file, written as it arrives and readable from any time."""
