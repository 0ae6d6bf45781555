"""What blocks hold as text, for every view: one place that knows whether the engine tells it or what was recorded."""
