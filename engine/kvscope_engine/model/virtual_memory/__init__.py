"""Memory for the allocator `virtual`: addresses reserved at the start, pages put behind them as blocks are used."""
