"""Imports what a driven scheduler needs of vLLM, so that `WarmPython` forks it instead of importing it for each test.

Only imports: plugins are loaded after the fork, with the environment of the test.
"""

import vllm.engine.arg_utils
import vllm.plugins
import vllm.utils.hashing
import vllm.v1.core.sched.scheduler
import vllm.v1.kv_cache_interface
import vllm.v1.outputs
import vllm.v1.structured_output

__all__ = ["vllm"]
