"""Tensor parallel: one model on several ranks (processes, each with a device), each with its heads of every block."""
