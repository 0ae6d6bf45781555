"""The scheduler and the block pool on a clock of their own: workloads, a cost model, a report. No tensors."""
