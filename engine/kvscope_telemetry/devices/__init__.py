"""Samples GPUs, host memory and cores from NVML and `/proc`, and adds the process's memory outside torch to the
engine's memory breakdown. Must not depend on torch or Qt.
"""
