"""Resources of each kernel on each GPU architecture, without a GPU: `python -m benchmarks.compile_report`."""
