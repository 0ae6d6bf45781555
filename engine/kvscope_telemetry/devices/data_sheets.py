"""Memory bandwidth of GPUs in GB/s, from the manufacturers' data sheets."""

from typing import Final

DATA_SHEET_GB_PER_S: Final = {
    "NVIDIA A10": 600,
    "NVIDIA A10G": 600,
    "NVIDIA A40": 696,
    "NVIDIA A100-PCIE-40GB": 1555,
    "NVIDIA A100-SXM4-40GB": 1555,
    "NVIDIA A100 80GB PCIe": 1935,
    "NVIDIA A100-SXM4-80GB": 2039,
    "NVIDIA B200": 8000,
    "NVIDIA GeForce RTX 3090": 936,
    "NVIDIA GeForce RTX 3090 Ti": 1008,
    "NVIDIA GeForce RTX 4080": 717,
    "NVIDIA GeForce RTX 4090": 1008,
    "NVIDIA GeForce RTX 5080": 960,
    "NVIDIA GeForce RTX 5090": 1792,
    "NVIDIA H100 80GB HBM3": 3350,
    "NVIDIA H100 NVL": 3938,
    "NVIDIA H100 PCIe": 2039,
    "NVIDIA H200": 4800,
    "NVIDIA L4": 300,
    "NVIDIA L40S": 864,
    "NVIDIA RTX 6000 Ada Generation": 960,
    "NVIDIA RTX A6000": 768,
    "NVIDIA RTX PRO 6000 Blackwell Workstation Edition": 1792,
}
"""Map from the full device name that the driver reports to the memory bandwidth in GB/s. A MIG instance has
another name and less bandwidth, so it is not found.
"""
