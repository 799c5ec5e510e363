"""How each `tokenizer.ggml.pre` name cuts text into words before byte-level BPE.

A table of facts about published tokenizers; it refuses to guess for a name that is not in it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from types import MappingProxyType
from typing import TYPE_CHECKING

from ..errors import TokenizerError

if TYPE_CHECKING:
    from tokenizers.pre_tokenizers import PreTokenizer


@dataclass(frozen=True, slots=True)
class PreTokenizerRule:
    """Regular expressions applied one after the other, and what the name says about merges and BOS."""

    splits: tuple[str, ...]
    ignore_merges: bool = False  # a word that is a token as a whole is taken without merging
    add_bos: bool = False  # what holds when the file does not say
    nfc: bool = False  # letters and their accents are composed first, as the published tokenizer does


_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_WORDS = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|"
_MARKS = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|"
_LLAMA3 = _WORDS + r"\p{N}{1,3}" + _MARKS + _TAIL
_QWEN2 = _WORDS + r"\p{N}" + _MARKS + _TAIL
_QWEN35 = (
    _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|" + _TAIL
)  # combining marks stay with their letters
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED_FIRST = r"[^\r\n\p{L}\p{N}]?" + _UPPER + "*" + _LOWER + "+"
_CASED_SECOND = r"[^\r\n\p{L}\p{N}]?" + _UPPER + "+" + _LOWER + "*"
_SLASHED = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|"
_TEKKEN = _CASED_FIRST + "|" + _CASED_SECOND + r"|\p{N}" + _SLASHED + _TAIL
_GPT4O = _CASED_FIRST + _CONTRACTIONS + "?|" + _CASED_SECOND + _CONTRACTIONS + r"?|\p{N}{1,3}" + _SLASHED + _TAIL
_NO_HAN_FIRST, _NO_HAN_SECOND = (
    part.replace(r"\p{M}]", r"\p{M}&&[^\p{Han}]]") for part in (_CASED_FIRST, _CASED_SECOND)
)  # Chinese characters are words of their own
_KIMI_K2 = (
    r"[\p{Han}]+|"
    + _NO_HAN_FIRST
    + _CONTRACTIONS
    + "?|"
    + _NO_HAN_SECOND
    + _CONTRACTIONS
    + r"?|\p{N}{1,3}"
    + _MARKS
    + _TAIL
)
_DEEPSEEK3 = (
    r"\p{N}{1,3}",
    "[一-龥\u3040-\u309f\u30a0-\u30ff]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    r"""| ?[\p{P}\p{S}]+[\r\n]*|""" + _TAIL,
)
_HAN_HANGUL = "[一-龥\u0800-一가-\ud7ff]+"
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _HAN_HANGUL, r"\p{N}")
# Letters of scripts with case, as that tokenizer lists them.
_DEEPSEEK_LETTERS = (
    "A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-\u1f7dᾀ-ᾴᾶ-ᾼ"
    "\u1fbeῂ-ῄῆ-ῌῐ-\u1fd3ῖ-\u1fdbῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤ\u2126ℨ\u212a-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿ"
    "ﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃"
)
_DEEPSEEK_LLM = (
    r"[\r\n]",
    r"\s?[" + _DEEPSEEK_LETTERS + "]+",
    r"\s?[!-/:-~！-／：-～‘-‟" + "\u3000-。]+",
    r"\s+$",
    _HAN_HANGUL,
    r"\p{N}",
)
_FALCON = (r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, r"[0-9][0-9][0-9]")
_DEFAULT = (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")

_GPT2_RULE = PreTokenizerRule((_GPT2,))
_DIGITS_RULE = PreTokenizerRule((r"\p{N}", _GPT2))  # each digit on its own, then as GPT-2
_LLAMA3_RULE = PreTokenizerRule((_LLAMA3,), ignore_merges=True, add_bos=True)
_QWEN2_RULE = PreTokenizerRule((_QWEN2,))
_GPT4O_RULE = PreTokenizerRule((_GPT4O,))


def _named(rule: PreTokenizerRule, names: str) -> dict[str, PreTokenizerRule]:
    return dict.fromkeys(names.split(), rule)


PRE_RULES: Mapping[str, PreTokenizerRule] = MappingProxyType(
    {
        **_named(PreTokenizerRule(_DEFAULT), "default"),
        **_named(_GPT2_RULE, "gpt-2 phi-2 mpt jais gigachat a.x-4.0 mellum exaone4 trillion granite-docling"),
        **_named(_GPT2_RULE, "jina-es jina-de jina-v2-es jina-v2-de jina-v1-en jina-v2-code roberta-bpe modern-bert"),
        **_named(PreTokenizerRule((_GPT2,), nfc=True), "olmo"),
        **_named(_DIGITS_RULE, "smollm starcoder refact codeshell exaone minerva-7b"),
        **_named(PreTokenizerRule(_DIGITS_RULE.splits, nfc=True), "command-r"),
        **_named(_LLAMA3_RULE, "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano"),
        **_named(PreTokenizerRule((_LLAMA3,)), "smaug-bpe dbrx chatglm-bpe glm4"),
        **_named(PreTokenizerRule((_QWEN2,), nfc=True), "qwen2"),
        **_named(_QWEN2_RULE, "deepseek-r1-qwen kormo f2llmv2 megrez stablelm2 hunyuan grok-2 solar-open"),
        **_named(PreTokenizerRule((_QWEN35,)), "qwen35"),
        **_named(PreTokenizerRule((_TEKKEN,), ignore_merges=True, add_bos=True), "tekken"),
        **_named(_GPT4O_RULE, "gpt-4o llama4 kanana2 minimax-m2"),
        **_named(PreTokenizerRule((_KIMI_K2,)), "kimi-k2"),
        **_named(PreTokenizerRule(_DEEPSEEK3), "deepseek-v3 hunyuan-dense"),
        **_named(PreTokenizerRule(_DEEPSEEK_LLM), "deepseek-llm"),
        **_named(PreTokenizerRule(_DEEPSEEK_CODER), "deepseek-coder"),
        **_named(PreTokenizerRule(_FALCON), "falcon"),
    }
)

GPT2_SPLIT = _GPT2  # what ByteLevel cuts by itself
# Patterns that cut a word from the space before the next one, and a line break from the word after it.
WORD_SPLITS = frozenset({_GPT2, _LLAMA3, _QWEN2, _QWEN35, _TEKKEN, _GPT4O, _KIMI_K2, _DEEPSEEK3[-1]})
KNOWN_SPLITS = frozenset(split for rule in PRE_RULES.values() for split in rule.splits)


def rule_for(name: str) -> PreTokenizerRule:
    """The rule of a `tokenizer.ggml.pre` name; an unknown name is refused, since a wrong cut degrades every answer."""
    try:
        return PRE_RULES[name]
    except KeyError:
        known = sorted(PRE_RULES)
        nearest = get_close_matches(name, known, n=1, cutoff=0)[0]
        raise TokenizerError(
            f"tokenizer.ggml.pre is {name[:64]!r}, which kvilt does not know; "
            f"the nearest it knows is {nearest!r} (all of them: {', '.join(known)})"
        ) from None


def pre_tokenizer(rule: PreTokenizerRule) -> PreTokenizer:
    """The rule as a `tokenizers` pipeline that ends in bytes."""
    from tokenizers import Regex, pre_tokenizers

    cuts = [pre_tokenizers.Split(Regex(split), "isolated") for split in rule.splits]
    return pre_tokenizers.Sequence([*cuts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
