"""Chat templates in the manner of well-known families, written for these tests, and conversations for them."""

# ruff: noqa: E501

from __future__ import annotations

from typing import Any

LLAMA3 = """{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = '' %}
{%- endif %}
{{- '<|im_start|>system\\n' }}
{%- if tools is not none %}{{- 'Environment: ipython\\n' }}{%- endif %}
{{- 'Today Date: ' ~ (date_string | default('26 Jul 2024')) ~ '\\n\\n' ~ system_message ~ '<|im_end|>' }}
{%- for message in messages %}
    {%- if 'tool_calls' in message and message.tool_calls %}
        {%- if message.tool_calls | length != 1 %}
            {{- raise_exception('This model only supports single tool-calls at once!') }}
        {%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|im_start|>assistant\\n\\n' }}
        {{- '{"name": "' + call.name + '", ' }}
        {{- '"parameters": ' }}{{- call.arguments | tojson }}{{- '}' }}{{- '<|im_end|>' }}
    {%- elif message.role == 'tool' %}
        {{- '<|im_start|>ipython\\n\\n' }}
        {%- if message.content is mapping or message.content is iterable and message.content is not string %}
            {{- message.content | tojson }}
        {%- else %}{{- message.content }}{%- endif %}
        {{- '<|im_end|>' }}
    {%- else %}
        {{- '<|im_start|>' + message['role'] + '\\n\\n' + message['content'] | trim + '<|im_end|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n\\n' }}{%- endif %}
"""

GEMMA = """{{ bos_token }}{% if messages[0]['role'] == 'system' %}{% set first_user_prefix = messages[0]['content'] + '

' %}{% set loop_messages = messages[1:] %}{% else %}{% set first_user_prefix = '' %}{% set loop_messages = messages %}{% endif %}
{%- for message in loop_messages -%}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
        {{ raise_exception("Conversation roles must alternate user/assistant/user/assistant/...") }}
    {%- endif -%}
    {%- if (message['role'] == 'assistant') -%}{%- set role = "model" -%}{%- else -%}{%- set role = message['role'] -%}{%- endif -%}
    {{ '<|im_start|>' + role + '
' + (first_user_prefix if loop.first else "") }}
    {%- if message['content'] is string -%}{{ message['content'] | trim }}
    {%- elif message['content'] is iterable -%}
        {%- for item in message['content'] -%}
            {%- if item['type'] == 'text' -%}{{ item['text'] | trim }}{%- endif -%}
        {%- endfor -%}
    {%- endif -%}
    {{ '<|im_end|>
' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>model
' }}{%- endif -%}
"""

MISTRAL = """{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{%- set user_messages = loop_messages | selectattr("role", "equalto", "user") | list %}
{%- set ns = namespace(index=0) %}
{%- for message in loop_messages %}
    {%- if not (message.role == "tool" or (message.tool_calls is defined and message.tool_calls is not none)) %}
        {%- if (message["role"] == "user") != (ns.index % 2 == 0) %}
            {{- raise_exception("After the optional system message, conversation roles must alternate") }}
        {%- endif %}
        {%- set ns.index = ns.index + 1 %}
    {%- endif %}
{%- endfor %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if message["role"] == "user" %}
        {%- if tools is not none and (message == user_messages[-1]) %}
            {{- "[AVAILABLE_TOOLS] [" }}
            {%- for tool in tools %}
                {%- set tool = tool.function %}
                {{- '{"type": "function", "function": {' }}
                {%- for key, val in tool.items() if key != "return" %}
                    {%- if val is string %}{{- '"' + key + '": "' + val + '"' }}
                    {%- else %}{{- '"' + key + '": ' + val|tojson }}{%- endif %}
                    {%- if not loop.last %}{{- ", " }}{%- endif %}
                {%- endfor %}
                {{- "}}" }}{%- if not loop.last %}{{- ", " }}{%- else %}{{- "]" }}{%- endif %}
            {%- endfor %}
            {{- "[/AVAILABLE_TOOLS]" }}
        {%- endif %}
        {%- if loop.last and system_message is defined %}
            {{- "[INST] " + system_message + "\\n\\n" + message["content"] + "[/INST]" }}
        {%- else %}{{- "[INST] " + message["content"] + "[/INST]" }}{%- endif %}
    {%- elif message.tool_calls is defined and message.tool_calls is not none %}
        {{- "[TOOL_CALLS] [" }}
        {%- for tool_call in message.tool_calls %}
            {%- set out = tool_call.function|tojson %}{{- out[:-1] }}
            {{- ', "id": "' + tool_call.id + '"}' }}
            {%- if not loop.last %}{{- ", " }}{%- else %}{{- "]" + eos_token }}{%- endif %}
        {%- endfor %}
    {%- elif message["role"] == "assistant" %}{{- " " + message["content"]|trim + eos_token}}
    {%- elif message["role"] == "tool" %}
        {{- '[TOOL_RESULTS] {"content": ' + message.content|string + ", " }}
        {{- '"call_id": "' + message.tool_call_id + '"}[/TOOL_RESULTS]' }}
    {%- endif %}
{%- endfor %}
"""

QWEN3 = """{%- if tools %}
    {{- '<|im_start|>system\\n# Tools\\n<tools>' }}
    {%- for tool in tools %}{{- "\\n" }}{{- tool | tojson }}{%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- endif %}
{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" and not(message.content.startswith('<tool_response>') and message.content.endswith('</tool_response>')) %}
        {%- set ns.multi_step_tool = false %}
        {%- set ns.last_query_index = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == "user" or message.role == "system" %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {%- set content = message.content or '' %}
        {%- set reasoning_content = '' %}
        {%- if message.reasoning_content is defined and message.reasoning_content is not none %}
            {%- set reasoning_content = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set reasoning_content = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.last_query_index and (loop.last or reasoning_content) %}
            {{- '<|im_start|>' + message.role + '\\n<think>\\n' + reasoning_content.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') }}
        {%- else %}{{- '<|im_start|>' + message.role + '\\n' + content }}{%- endif %}
        {%- for tool_call in message.tool_calls or [] %}
            {%- if (loop.first and content) or (not loop.first) %}{{- '\\n' }}{%- endif %}
            {%- if tool_call.function %}{%- set tool_call = tool_call.function %}{%- endif %}
            {{- '<tool_call>\\n{"name": "' }}{{- tool_call.name }}{{- '", "arguments": ' }}
            {%- if tool_call.arguments is string %}{{- tool_call.arguments }}
            {%- else %}{{- tool_call.arguments | tojson }}{%- endif %}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {%- generation %}{{- '<|im_end|>\\n' }}{%- endgeneration %}
    {%- elif message.role == "tool" %}
        {%- if loop.first or (messages[loop.index0 - 1].role != "tool") %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}
"""

# The headers of harmony, and its variables.
HARMONY = """{%- macro typed(name, spec) -%}
  {{ name }}: {% if spec.enum %}"{{ spec.enum | join('" | "') }}"{% elif spec.type is string %}{{ spec.type }}
  {%- else %}{{ spec.type | join(' | ') }}{% endif %},
{% endmacro -%}
{%- set effort = reasoning_effort if reasoning_effort is defined else 'medium' -%}
<|start|>system<|message|>{{ model_identity | default('You are a model.') }}\nReasoning: {{ effort }}<|end|>
{%- set first = messages[0].content if messages[0].role in ('system', 'developer') else '' -%}
{%- if first or tools %}<|start|>developer<|message|>{{ first }}
  {%- for tool in tools or [] %}
type {{ tool.function.name }} = (_: {
{% for name, spec in tool.function.parameters.properties.items() %}{{ typed(name, spec) }}{% endfor -%}
}) => any;
  {%- endfor %}<|end|>{% endif %}
{%- set ns = namespace(called=none) -%}
{%- for message in (messages[1:] if first else messages) %}
  {%- if message.role == 'assistant' and message.tool_calls %}
    {%- set function = message.tool_calls[0].function %}{% set ns.called = function.name %}
    {%- if message.thinking %}<|start|>assistant<|channel|>analysis<|message|>{{ message.thinking }}<|end|>{% endif %}
    {{- '<|start|>assistant to=functions.' + function.name + '<|channel|>commentary json<|message|>' }}
    {{- function.arguments | tojson }}<|call|>
  {%- elif message.role == 'assistant' %}<|start|>assistant<|channel|>final<|message|>{{ message.content }}<|end|>
  {%- elif message.role == 'tool' %}
    {%- if not ns.called %}{{ raise_exception('a tool answers without a call') }}{% endif %}
    {{- '<|start|>functions.' + ns.called + ' to=assistant<|channel|>commentary<|message|>' }}
    {{- message.content | tojson }}<|end|>
  {%- else %}<|start|>{{ message.role }}<|message|>{{ message.content }}<|end|>{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|start|>assistant{% endif %}
"""

MACROS = """{%- macro typed(spec, level) -%}
  {%- if spec.type == 'object' -%}
    {%- for name, inner in spec.properties | dictsort -%}
      {{ '  ' * level }}{{ name }}{{ '' if name in (spec.required or []) else '?' }}: {{ typed(inner, level + 1) }}
    {%- endfor -%}
  {%- elif spec.type is sequence and spec.type is not string -%}{{ spec.type | join(' | ') }}
  {%- else -%}{{ spec.type | default('any') | upper }}{%- endif -%}
{%- endmacro -%}
{%- for tool in tools or [] -%}
{{ loop.index }}. {{ tool.function.name }}({{ typed(tool.function.parameters, 1) | replace('  ', ' ') | indent(2) }})
{%- endfor -%}
{%- set names = messages | map(attribute='role') | unique | list -%}
{{ names | tojson(indent=2) }} {{ '%s-%03d' % ('n', messages | length) }} {{ '{} of {}'.format(1, 2) }}
{%- for message in messages -%}
  {%- if message.role == 'tool' -%}{%- continue -%}{%- endif -%}
  {%- set text -%}<{{ message.role }}>{{ message.content or '' }}{%- endset -%}
  {{ text }}{{ loop.cycle('|', '#') }}
  {%- if loop.index > 20 -%}{%- break -%}{%- endif -%}
{%- endfor -%}
"""

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": 'The weather in a city, in °C & "quotes" <b>',
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "enum": ["Zürich", "東京"]},
                    "days": {"type": ["integer", "null"]},
                },
                "required": ["city"],
            },
        },
    }
]

PLAIN: list[dict[str, Any]] = [
    {"role": "system", "content": "You answer briefly."},
    {"role": "user", "content": "  Why is the sky blue? 你好 👩‍👧 <b>1 < 2</b>\n\n"},
    {"role": "assistant", "content": "Because of Rayleigh scattering."},
    {"role": "user", "content": "> quoted\nAnd at night?"},
]

CALLS: list[dict[str, Any]] = [
    {"role": "user", "content": "Weather in Zürich?"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {
                "id": "abc123def",
                "type": "function",
                "function": {"name": "get_weather", "arguments": {"city": "Zürich"}},
            }
        ],
    },
    {"role": "tool", "tool_call_id": "abc123def", "name": "get_weather", "content": '{"celsius": 21.5}'},
    {"role": "assistant", "content": "It is 21.5 °C."},
    {"role": "user", "content": "Thanks!"},
]

THINKING: list[dict[str, Any]] = [
    {"role": "user", "content": "2+2?"},
    {"role": "assistant", "content": "<think>\nEasy.\n</think>\n\n4"},
    {"role": "user", "content": "3+3?"},
    {"role": "assistant", "content": "6", "reasoning_content": "Also easy."},
]
