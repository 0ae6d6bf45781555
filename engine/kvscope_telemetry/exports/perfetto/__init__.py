"""Traces for Perfetto, written by hand: some twenty fields of its protobuf messages."""
