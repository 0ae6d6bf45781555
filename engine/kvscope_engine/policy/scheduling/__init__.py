"""Who runs in a step, with how many tokens: admission, preemption, block tables, and the words for what happened."""
