"""Fused counterparts of model parts: fused and packed projections, fused layers."""
