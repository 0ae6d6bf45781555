"""Memory planning: form with a model's options, child process that computes the plan, and dialog that shows it."""
