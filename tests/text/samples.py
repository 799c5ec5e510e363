"""Texts that tokenizers get wrong: several scripts, emoji, digits, code, white space."""

from __future__ import annotations

TEXTS = (
    "Hello, world!",
    "The quick brown fox   jumps\tover\n\n\nthe lazy dog.  ",
    " leading and trailing ",
    "1234567890 3.14159 2024-01-02 ٣٤٥ ⅷ ²³",
    "def f(x):\n    return x**2  # comment\n\n\tif a<b:\n        pass\r\n",
    "Привет, мир! Как дела?",
    "你好，世界。今天天气很好！",
    "こんにちは世界、カタカナ",
    "안녕하세요 세계",
    "مرحبا بالعالم، كيف حالك؟",
    "नमस्ते दुनिया, कैसे हो?",
    "สวัสดีชาวโลก",
    "Ελληνικά και τόνοι ἄλφα",
    "👩‍👩‍👧‍👦 🏳️‍🌈 👍🏽 é e\u0301 ñ",
    "I'm you're HE'S they'll WE'VE don't",
    "<html><body>&nbsp;</body></html>",
    "a" * 50 + " " * 20 + "\n" * 9 + "!" * 30,
    "\u00a0nbsp\u2003emspace\u3000ideographic\u200bzw",
    "﷽ ﷺ Ǆǅǆ ﬁ ſ İı",
    "\ufffd\ufeffBOM",
    '{"a": [1, 2.5e-3, null], "b": "\\u00e9"}',
    "x" * 300,
    "",
    " ",
    "\n",
)
