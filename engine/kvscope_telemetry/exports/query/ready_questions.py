"""Ready questions: named SQL queries that run on every recording."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class ReadyQuestion:
    name: str
    """Name on the command line."""
    title: str
    sql: str


_SLOWEST_FIRST_TOKENS: Final = """\
SELECT number, request_id, first_token_ns / 1e9 AS first_token_s, queue_ns / 1e9 AS queue_s,
       num_prompt_tokens, num_cached_tokens, num_preemptions
FROM requests
WHERE first_token_ns IS NOT NULL
ORDER BY first_token_ns DESC
LIMIT 20"""

_LATENCIES: Final = """\
SELECT latency, count(seconds) AS num_requests, quantile_cont(seconds, 0.5) AS p50_s,
       quantile_cont(seconds, 0.95) AS p95_s, quantile_cont(seconds, 0.99) AS p99_s, max(seconds) AS max_s
FROM (
    SELECT 'queue' AS latency, queue_ns / 1e9 AS seconds FROM requests
    UNION ALL SELECT 'first token', first_token_ns / 1e9 FROM requests
    UNION ALL SELECT 'total', total_ns / 1e9 FROM requests
    UNION ALL SELECT 'per output token',
        CASE WHEN num_output_tokens > 1 THEN (total_ns - first_token_ns) / 1e9 / (num_output_tokens - 1) END
    FROM requests WHERE state = 'finished'
)
GROUP BY latency
ORDER BY latency"""

_MOST_PREEMPTED: Final = """\
SELECT number, request_id, num_preemptions, preempted_ns / 1e9 AS preempted_s, total_ns / 1e9 AS total_s,
       num_prompt_tokens, num_output_tokens, state
FROM requests
WHERE num_preemptions > 0
ORDER BY num_preemptions DESC, preempted_ns DESC
LIMIT 20"""

_PREEMPTORS: Final = """\
SELECT events.other AS preemptor, requests.request_id, count(*) AS num_preempted,
       sum(events.num_blocks) AS num_blocks, any_value(events.cause) AS example
FROM events
LEFT JOIN requests ON requests.number = events.other AND requests.epoch = events.epoch
WHERE events.kind = 'preempted' AND events.other > 0
GROUP BY events.epoch, events.other, requests.request_id
ORDER BY num_preempted DESC
LIMIT 20"""

_PREFIX_HITS: Final = """\
SELECT CAST(floor(arrival_s / 60) AS BIGINT) AS minute, count(*) AS num_requests,
       sum(num_prompt_tokens) AS prompt_tokens, sum(num_cached_tokens) AS cached_tokens,
       sum(num_cached_tokens) / nullif(sum(num_prompt_tokens), 0) AS hit_rate
FROM requests
WHERE arrival_s >= 0 AND num_prompt_tokens IS NOT NULL
GROUP BY minute
ORDER BY minute"""

_FULLEST_SECONDS: Final = """\
SELECT second_s, peak_usage, num_running, num_waiting, preemptions, evicted_blocks, decode_tokens
FROM metrics
WHERE peak_usage IS NOT NULL
ORDER BY peak_usage DESC, num_waiting DESC
LIMIT 20"""

_MINUTES: Final = """\
SELECT CAST(floor(second_s / 60) AS BIGINT) AS minute, avg(usage) AS mean_usage, avg(num_running) AS mean_running,
       max(peak_waiting) AS peak_waiting, sum(finished) AS finished, sum(preemptions) AS preemptions,
       avg(prefill_tokens_per_s) AS prefill_tokens_per_s, avg(decode_tokens_per_s) AS decode_tokens_per_s
FROM metrics
GROUP BY minute
ORDER BY minute"""

_SLOWEST_STEPS: Final = """\
SELECT second_s, step, total_ns / 1e6 AS total_ms, schedule_ns / 1e6 AS schedule_ms, run_ns / 1e6 AS run_ms,
       commit_ns / 1e6 AS commit_ms, num_requests, num_prefill_tokens, num_decode_tokens
FROM steps
WHERE total_ns IS NOT NULL
ORDER BY total_ns DESC
LIMIT 20"""

_STEP_SIZES: Final = """\
SELECT CAST(pow(2, floor(log2(num_prefill_tokens + num_decode_tokens))) AS BIGINT) AS tokens_from,
       count(*) AS num_steps, avg(num_requests) AS mean_requests, median(total_ns) / 1e6 AS median_ms,
       1e9 * sum(num_prefill_tokens + num_decode_tokens) / nullif(sum(total_ns), 0) AS tokens_per_s
FROM steps
WHERE num_prefill_tokens + num_decode_tokens > 0
GROUP BY tokens_from
ORDER BY tokens_from"""

_ENDS: Final = """\
SELECT state, regexp_replace(end_reason, '[0-9,]*[0-9]', 'N', 'g') AS reason, count(*) AS num_requests,
       sum(num_output_tokens) AS output_tokens, avg(total_ns) / 1e9 AS mean_total_s
FROM requests
GROUP BY state, reason
ORDER BY num_requests DESC"""

READY_QUESTIONS: Final = (
    ReadyQuestion(
        "slowest-first-tokens", "Which requests waited longest for their first token?", _SLOWEST_FIRST_TOKENS
    ),
    ReadyQuestion("latencies", "What are the percentiles of queue time, first token and total time?", _LATENCIES),
    ReadyQuestion("most-preempted", "Which requests were preempted most often?", _MOST_PREEMPTED),
    ReadyQuestion("preemptors", "For which requests were others preempted?", _PREEMPTORS),
    ReadyQuestion("prefix-hits", "How many prompt tokens came from the prefix cache, per minute?", _PREFIX_HITS),
    ReadyQuestion("fullest-seconds", "In which seconds was the KV cache fullest?", _FULLEST_SECONDS),
    ReadyQuestion("minutes", "How did usage, load and throughput develop, per minute?", _MINUTES),
    ReadyQuestion("slowest-steps", "Which steps took longest, and where?", _SLOWEST_STEPS),
    ReadyQuestion("step-sizes", "How does the duration of a step depend on its number of tokens?", _STEP_SIZES),
    ReadyQuestion("ends", "How and why did requests end?", _ENDS),
)
QUESTIONS_BY_NAME: Final = {question.name: question for question in READY_QUESTIONS}
