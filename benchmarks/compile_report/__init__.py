"""What each kernel takes of each GPU architecture, without a GPU: `python -m benchmarks.compile_report`."""
