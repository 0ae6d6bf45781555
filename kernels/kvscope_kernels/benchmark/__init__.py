"""`python -m kvscope_kernels.benchmark`: the kernels on this machine's GPU, against what its memory can do."""
