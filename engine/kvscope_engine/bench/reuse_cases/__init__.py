"""What `bench reuse` measures: prefixes that come back, preempted requests that come back, completions that share."""
