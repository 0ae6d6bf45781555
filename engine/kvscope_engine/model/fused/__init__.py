"""Parts of a model in fewer operations: joined and packed projections, fused layers."""
