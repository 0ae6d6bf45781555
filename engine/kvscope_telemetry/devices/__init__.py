"""Samples GPUs, host memory and cores from NVML and `/proc`, and combines them with the engine's memory breakdown. Uses
no torch and no Qt."""
