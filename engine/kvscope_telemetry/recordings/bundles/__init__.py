"""Frames of a second as they lie in a recording: their columns side by side, each told by what went before."""
