"""Chat templates: whatever a template does, rendering ends in time with a text or a TemplateError.

Oracle: what renders within the budget renders to the same text in jinja2's own sandbox, where that renders too.
"""

from __future__ import annotations

import json
import random
import re
import signal
from types import FrameType
from typing import Any

from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from kvilt.errors import TemplateError
from kvilt.text.budget import TemplateLimits
from kvilt.text.sandbox import CompiledTemplate

from .driver import main
from .target import Finding, Target, label

_LIMITS = TemplateLimits(seconds=1.0)
_VARIABLES: dict[str, Any] = {
    "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi <b> 5 % of {x}", "n": 3},
        {
            "role": "assistant",
            "content": "Ünï 🧵\n  line",
            "tool_calls": [{"function": {"name": "f", "arguments": {"a": 1}}}],
        },
    ],
    "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
    "add_generation_prompt": True,
    "bos_token": "<s>",
    "eos_token": "</s>",
}


class _Late(BaseException):
    """The reference has no limits of its own."""


def _reference(source: str) -> str | None:
    """What jinja2 makes of it; None where it does not, or not soon."""

    def end(_number: int, _frame: FrameType | None) -> None:
        raise _Late

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.filters["tojson"] = _tojson
    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, 0.5)
    try:
        return environment.from_string(source).render(**_VARIABLES)
    except (Exception, _Late):
        return None
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    """As Hugging Face's chat templates have it."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def check(data: bytes) -> str:
    source = data.decode("utf-8", "replace")
    try:
        compiled = CompiledTemplate(source, _LIMITS)
    except TemplateError as error:
        return f"not compiled: {label(error)}"
    try:
        text = compiled.render(_VARIABLES)
    except TemplateError as error:
        return f"not rendered: {label(error)}"
    if len(text) > _LIMITS.text_chars:
        raise Finding(f"rendered {len(text)} characters")
    # An address or an order of no meaning differs between two runs of anything.
    if re.search(r"random|strftime_now|\bgeneration\b|lipsum", source) or " at 0x" in text:
        return "rendered"
    expected = _reference(source)
    if expected is not None and " at 0x" in expected:  # a generator, which is a list here
        return "rendered"
    if expected is not None and expected != text:
        raise Finding(f"{source[:300]!r} renders as {text[:200]!r}, in jinja2 as {expected[:200]!r}")
    return "rendered, the same" if expected is not None else "rendered, not in jinja2"


_PIECES = (
    *("{% for m in messages %}", "{% endfor %}", "{% if m.role == 'user' %}", "{% elif loop.first %}", "{% else %}"),
    *(
        "{% endif %}",
        "{{ m.content }}",
        "{{ m['content'] | trim }}",
        "{{ bos_token + 'x' }}",
        "{% set ns = namespace(a=0) %}",
    ),
    *(
        "{% set ns.a = ns.a + 1 %}",
        "{{ ns.a }}",
        "{% macro f(x) %}{{ x }}{% endmacro %}",
        "{{ f(3) }}",
        "{{ tools | tojson }}",
    ),
    *(
        "{{ '%s-%d' % ('a', 3) }}",
        "{{ '{}'.format(2) }}",
        "{{ messages[1:] | length }}",
        "{{ messages | map(attribute='role') | list }}",
    ),
    *(
        "{% for i in range(3) %}{{ loop.index }}{% if i == 1 %}{% break %}{% endif %}{% endfor %}",
        "{{ 7 // 2 }}",
        "{{ 2 ** 9 }}",
    ),
    *(
        "{{ 'a,b'.split(',') }}",
        "{{ m.content.replace('i', 'j') }}",
        "{{ 'x' * 5 }}",
        "{{ [1, 2] + [3] }}",
        "{{ 'f' | int(0, 16) }}",
    ),
    *(
        "{{ none is none }}",
        "{{ m.x is defined }}",
        "{{ messages | selectattr('role', 'equalto', 'user') | first }}",
        "{{ 1 / 3 }}",
    ),
    *(
        "{%- set x = m.content.strip() -%}",
        "{{ x ~ '!' }}",
        "{{ x | upper }}",
        "{{ 'a' in 'abc' }}",
        "{{ messages | last }}",
    ),
    *("{{ raise_exception('no') }}", "{{ x[::-1] }}", "{{ {'a': 1} | items | list }}", "{{ 10 | string | center(7) }}"),
    *(
        "{{ '9' * 2000 | int }}",
        "{{ ('9' * 4000) | int }}",
        "{{ '%(a)s' % {'a': 1} }}",
        "{{ '%(' * 50 }}",
        "{{ 3.7 | round }}",
    ),
)


def seeds() -> list[bytes]:
    chatml = (
        "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>'"
        " + '\\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
    )
    whole = "".join(_PIECES[:2]) + "".join(_PIECES[9:12])
    return [text.encode() for text in (chatml, whole, *_PIECES)]


def mutate(data: bytes, dice: random.Random) -> bytes:
    """Pieces of templates that fit together more often than bytes do."""
    picked = [dice.choice(_PIECES) for _ in range(dice.randrange(1, 8))]
    if dice.random() < 0.5:
        picked = ["{% for m in messages %}", *picked, "{% endfor %}"]
    if dice.random() < 0.3:
        picked.append(data.decode("utf-8", "replace")[:2000])
    return "".join(picked).encode()


WORDS = (
    *(
        b"{{",
        b"}}",
        b"{%",
        b"%}",
        b"{#",
        b"#}",
        b" | ",
        b"(",
        b")",
        b"[",
        b"]",
        b"'",
        b"~",
        b"**",
        b"//",
        b"range(10**9)",
    ),
    *(
        b"__class__",
        b"|attr('a')",
        b"|tojson",
        b"|join(',')",
        b"|replace('a','b')",
        b"|indent",
        b"|sort",
        b"|groupby('role')",
    ),
    *(
        b"loop.index",
        b"namespace()",
        b"|batch(2)",
        b"|format(1)",
        b"|int",
        b"|list",
        b"|sum",
        b"|default(1)",
        b".items()",
    ),
)
TARGET = Target("templates", check, seeds, WORDS, mutate, most_bytes=1 << 13)

if __name__ == "__main__":
    main(TARGET)
