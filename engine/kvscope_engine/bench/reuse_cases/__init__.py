"""The cases of `bench reuse`: prefixes found again, preempted requests that resume, completions that share a prompt."""
