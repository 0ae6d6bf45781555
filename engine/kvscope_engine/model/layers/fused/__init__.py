"""Parts of a model in fewer operations: fused and packed projections, fused layers."""
