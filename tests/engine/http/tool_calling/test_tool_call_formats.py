"""Which tool-call format a chat template uses."""

from __future__ import annotations

import pytest

from kvscope_engine.http.tool_calling.tool_call_formats import FORMATS_BY_NAME, format_of
from kvscope_telemetry.errors import BadInput

TEMPLATES = [
    (None, "auto"),
    ("{{ messages[0].content }}", "auto"),
    ('return a json object within <tool_call></tool_call> XML tags:\n<tool_call>\n{"name": …}', "hermes"),
    ("<tool_call>\n<function=example>\n<parameter=p>\nvalue\n</parameter>", "qwen3_coder"),
    ("<tool_call>{function-name}\n<arg_key>{key}</arg_key>", "glm45"),
    ("{{ '[TOOL_CALLS] [' }}", "mistral"),
    ('{"name": function name, "parameters": dictionary of argument name and its value} <|python_tag|>', "llama3_json"),
    ("[func_name1(params_name1=params_value1), func_name2(params)]", "pythonic"),
    ("[func_name1(params)] <|python_start|>", "llama4_pythonic"),
    ("'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + tool.type + '<｜tool▁sep｜>' + '\\n```json'", "deepseek_v3"),
    ("'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + name + '<｜tool▁sep｜>' + arguments", "deepseek_v31"),
    ("<|tool_call_begin|>{{ id }}<|tool_call_argument_begin|>{{ arguments }}", "kimi_k2"),
    ("answer with <|tool_call|> and a list", "granite"),
    ("<|system|><|tool|>{{ tools }}<|/tool|>", "phi4_mini_json"),
    ("<tool_calls>[ … ]</tool_calls>", "jamba"),
    ("<function_calls>", "olmo3"),
    ("<|tool_call>call:{{ name }}{", "gemma4"),
    ("<start_function_call>call:{{ name }}{", "functiongemma"),
    ("<|start|>assistant<|channel|>analysis<|message|>", "openai"),
    ("<｜DSML｜function_calls>", "deepseek_v32"),
    ("<minimax:tool_call>", "minimax_m2"),
    ("<seed:tool_call>\n<function=f>\n<parameter=p>", "seed_oss"),
    ("<|tool_call_start|>", "lfm2"),
    ("<|tools_prefix|>", "apertus"),
    ("<|START_ACTION|>", "cohere_command3"),
]


@pytest.mark.parametrize(("template", "name"), TEMPLATES)
def test_format_is_detected_from_the_template(template: str | None, name: str) -> None:
    assert format_of(template).name == name
    assert format_of(template, "auto").name == name


def test_explicit_tool_call_format_is_used_and_an_unknown_one_refused() -> None:
    assert all(format_of("<tool_call>", name).name == name for name in FORMATS_BY_NAME if name != "auto")
    with pytest.raises(BadInput, match="'xlam' is not accepted: must be one of auto, hermes"):
        format_of(None, "xlam")
