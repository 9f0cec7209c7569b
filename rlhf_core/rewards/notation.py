r"""One notation for mathematical answers: `½`, `1/2` and `\dfrac12` are read alike before anything is compared.

Signs of Unicode, plain text and LaTeX become one LaTeX. Nothing is computed here, and nothing is thrown away that
says something: a unit, a base, a doubt stay where they are. Regular expressions only, each linear in the text.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

LONGEST = 1000
"""Characters of an answer that is read; a longer one is compared letter by letter."""
OPENING, CLOSING = frozenset({"(", "[", "{", "\\{"}), frozenset({")", "]", "}", "\\}"})
_OF_MEMBERS = OPENING - {"{"}
_TOKEN = re.compile(r"\\\\|\\[A-Za-z]+|\\.|.", re.DOTALL)

_SIGNS = str.maketrans(
    dict.fromkeys("\u200b\u200c\u200d\u2060\ufeff\u00ad")  # shows as nothing; signs of direction are left, they do
    | dict.fromkeys("\u2212\u2010\u2011\u2013\ufe63", "-")
    | dict.fromkeys("\u00d7\u00b7\u22c5\u2219\u2217\u2022", "\\cdot ")
    | dict.fromkeys("\u2018\u2019", "'")
    | {"\u00f7": "/", "\u2044": "/", "\u2215": "/", "\u00b1": "\\pm ", "\u221e": "\\infty ", "\u00b0": "^{\\circ}"}
    | {
        "\u2264": "\\le ",
        "\u2265": "\\ge ",
        "\u2260": "\\ne ",
        "\u2208": "\\in ",
        "\u222a": "\\cup ",
        "\u2229": "\\cap ",
    }
    | {
        "\u2205": "\\emptyset ",
        "\u211d": "\\mathbb{R}",
        "\u221a": "\\sqrt",
        "\u221b": "\\sqrt[3]",
        "\u221c": "\\sqrt[4]",
    }
)
_RAISED = "\u2070\u00b9\u00b2\u00b3\u2074-\u207f\u2071"
_LOWERED = "\u2080-\u208e"
_SAME_LETTER = ("<wide>", "<narrow>", "<small>", "<font>")
"""Kinds of Unicode's variants that mean the plain sign; a raised, lowered or circled one means another."""

_BETWEEN_DIGITS = r"(?:[\u00a0\u2007\u2009\u202f']|\\,|\\;|\\ |\{,\})"
_GROUPS = re.compile(rf"(?<![\d.,'])\d{{1,3}}(?:{_BETWEEN_DIGITS}\d{{3}})+(?!{_BETWEEN_DIGITS}?\d)")
_SPACED_GROUPS = re.compile(r"[+-]?\d{1,3}(?: \d{3})+(?:\.\d+)?")
_COMMA_GROUPS = re.compile(r"(?<![\d.,])\d{1,3}(?:,\d{3})+(?!,?\d)")
_REPEATING = re.compile(r"(?<![\d.])(\d*)\.(\d*)\\overline\{(\d+)\}")
_ROOT = re.compile("([\u221a-\u221c])\\s*(\\d+(?:\\.\\d+)?)")
_MIXED = re.compile(r"(?<![\w.,/^}])(\d+) +(\d+)/(\d+)(?![\w./^])")
_MATH = (("**", "**"), ("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]"))
_BOX = re.compile(r"\\f?box(?:ed)?\s*(?=\{)")
_SAID = re.compile(
    r"(?:(?:so|thus|hence|therefore),?\s+)?(?:the\s+)?(?:final\s+)?answer\s*(?:is\s*:?|:|=)\s*", re.IGNORECASE
)
_STYLE = re.compile(r"\\(?:text|math|operatorname|mbox)(?:bf|it|rm|sf|tt|up|normal)?\s*\{([^{}]*)\}")
_BASES = "two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|thirteen|fourteen|fifteen|sixteen"

_Change = tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]]


def _changes(*pairs: tuple[str, str | Callable[[re.Match[str]], str]]) -> list[_Change]:
    return [(re.compile(pattern), into) for pattern, into in pairs]


_WORDS = _changes(
    (r"\\!", ""),
    (r"\\(?:left|right|[bB]igg?[lrm]?|displaystyle|textstyle|limits)(?![A-Za-z])", ""),
    (r"(?<!\\)\\[,;: ]|(?<=[\w})\].])~(?=\s*\S)|\\q?quad(?![A-Za-z])", " "),  # "~42" is a doubt
    (r"\\textcolor\s*\{[A-Za-z]+\}\s*(?=\{)", ""),
    (r"\\langle(?![A-Za-z])\s*", "("),
    (r"\s*\\rangle(?![A-Za-z])", ")"),
    (r"\{,\}", ","),
    (r"\\[lr]?vert(?![A-Za-z])", "|"),
    (r"\\lbrace(?![A-Za-z])", r"\\{"),
    (r"\\rbrace(?![A-Za-z])", r"\\}"),
    (r"\\[dtc]frac(?![A-Za-z])", r"\\frac"),
    (r"\\(?:leq(?:slant)?|le)(?![A-Za-z])|<=", r"\\le "),
    (r"\\(?:geq(?:slant)?|ge)(?![A-Za-z])|>=", r"\\ge "),
    (r"\\lt(?![A-Za-z])", "<"),
    (r"\\gt(?![A-Za-z])", ">"),
    (r"\\neq?(?![A-Za-z])", r"\\ne "),
    (r"\*\*", "^"),
    (r"\\(?:times|ast|cdot)(?![A-Za-z])|\*", r"\\cdot "),
    (r"\\div(?![A-Za-z])", "/"),
    (r"\\varnothing(?![A-Za-z])|\\\{\s*\\\}", r"\\emptyset "),
    (r"\\mathbb\s*\{?R\}?|\\R(?![A-Za-z])", r"(-\\infty ,\\infty )"),
    (r"\\infty(?![A-Za-z])|(?<![\\A-Za-z])infinity(?![A-Za-z])", r"\\infty "),
    (r"(^|[(\[,;{=<>]|\\(?:le|ge|ne|in)(?![A-Za-z]))\s*\+\s*(?=\\infty)", r"\1 "),
    (r"\\%|\s*(?<![A-Za-z])per ?cent(?![A-Za-z])", "%"),
    (r"(?<![\\A-Za-z])(pi|theta|alpha|beta|sin|cos|tan|log|ln)(?![A-Za-z])", r"\\\1 "),
    (r"(?<![\\A-Za-z])sqrt(?![A-Za-z])", r"\\sqrt"),
)
_ARGUMENTS = _changes(
    (r"\\\$", "$"),
    (r"(?<=[\d\s])([aApP])\.?\s?[mM]$", lambda match: f" {match[1].lower()}m"),
    (r"\(?\s*(?<![A-Za-z])base\s*(\d+)\s*\)?$", r"_{\1}"),
    (r"\\frac\s*([\dA-Za-z])\s*([\dA-Za-z])(?!\s*\d)", r"\\frac{\1}{\2}"),
    (r"\\frac\s*([\dA-Za-z])\s*(?=\{)", r"\\frac{\1}"),
    (r"\\frac\s*\\pi\s*", r"\\frac{\\pi}"),
    (r"\\frac\s*(\{[^{}]*\})\s*([\dA-Za-z])(?!\d)", r"\\frac\1{\2}"),
    (r"\{([^{}]*)\\over(?![A-Za-z])([^{}]*)\}|^([^{}]*)\\over(?![A-Za-z])([^{}]*)$", r"\\frac{\1\3}{\2\4}"),
    (r"\\sqrt((?:\[\d\])?)\s*\(([^()]*)\)", r"\\sqrt\1{\2}"),
    (r"\\sqrt((?:\[\d\])?)\s*([A-Za-z]|\\pi(?![A-Za-z])|\d(?!\d))", r"\\sqrt\1{\2}"),
    (r"\^\s*\(([^()]*)\)", r"^{\1}"),
    (r"\^\s*([+-]?\d+(?:\.\d+)?|[A-Za-z]|\\circ(?![A-Za-z]))", r"^{\1}"),
    (r"_\s*(\d+|[A-Za-z])", r"_{\1}"),
    (r"\{\s+", "{"),
    (r"\s+(?=\\?\})", ""),
    (r"\s+(?=[_^])", ""),
    (rf"_\{{({_BASES})\}}", lambda match: f"_{{{_BASES.split('|').index(match[1]) + 2}}}"),
    (_REPEATING.pattern, lambda match: _repeating(*match.groups())),
    (_MIXED.pattern, lambda match: _mixed(*match.groups())),
)


@lru_cache(maxsize=512)  # a group's responses are compared with one reference
def plain(text: str) -> str:
    r"""Return an answer in one notation; what it does not know it leaves.

    Minus signs are hyphens, digits are ASCII, groups of thousands are joined (a comma joins them outside brackets
    alone, so that `(1,200)` stays a pair), `½` is `\frac{1}{2}`, `3 1/2` is `3\frac{1}{2}`, `x²` is `x^{2}`, `√2` is
    `\sqrt{2}`. Mathematics' dollars, a box or brackets around the whole, `\text`, "the answer is" and a last full
    stop go; a dollar before a number stays.

    Example:
        >>> plain("\u2212 5"), plain("\\dfrac12"), plain("3½"), plain("1≤x²"), plain("\\boxed{1,200}")
        ('-5', '\\frac{1}{2}', '3\\frac{1}{2}', '1\\le x^{2}', '1200')
    """
    if len(text) > LONGEST:
        return text.strip()
    text = _peeled(_ascii(text).strip())
    text = _GROUPS.sub(lambda match: re.sub(r"\D", "", match[0]), text)
    for _ in range(3):  # styles in styles
        text = _STYLE.sub(r" \1 ", text)
    for pattern, into in _WORDS:
        text = pattern.sub(into, text)
    text = _peeled(" ".join(text.split()))
    for pattern, into in _ARGUMENTS:
        text = pattern.sub(into, text)
    text = re.sub(r"(?<=[^\w\\.,})\]]) (?=\S)|(?<=\S) (?=[^\w\\.$(])", "", " ".join(text.split()))
    if _SPACED_GROUPS.fullmatch(text):
        return text.replace(" ", "")
    return _without_commas(text)


def tokens(text: str) -> list[str]:
    """Return a text's commands and its other signs, one by one."""
    return _TOKEN.findall(text)


def split(text: str, *separators: str) -> list[str]:
    r"""Return the parts of a text between separators that stand outside all brackets; `\lor` counts as one token.

    Example:
        >>> split("(1,2),3", ",")
        ['(1,2)', '3']
    """
    parts, depth = [""], 0
    for token in tokens(text):
        depth += (token in OPENING) - (token in CLOSING)
        if not depth and token in separators:
            parts.append("")
        else:
            parts[-1] += token
    return [part.strip() for part in parts]


class Brackets(NamedTuple):
    """Brackets around a whole text, and what they hold."""

    opening: str
    inside: str
    closing: str


def brackets(text: str) -> Brackets | None:
    """Return the brackets that open at a text's first sign and close at its last; None if there are none."""
    signs = tokens(text)
    if not signs or signs[0] not in OPENING or signs[-1] not in CLOSING:
        return None
    depths = list(accumulate((sign in OPENING) - (sign in CLOSING) for sign in signs))
    if depths[-1] or 0 in depths[:-1]:
        return None
    return Brackets(signs[0], "".join(signs[1:-1]).strip(), signs[-1])


def _ascii(text: str) -> str:
    text = _ROOT.sub(lambda match: f"{match[1]}{{{match[2]}}}", text)  # no brace says how far the sign reaches
    text = re.sub(f"[{_RAISED}]+", lambda match: f"^{{{_compatible(match[0])}}}", text)
    text = re.sub(f"[{_LOWERED}]+", lambda match: f"_{{{_compatible(match[0])}}}", text)
    return "".join(map(_letter, text)).translate(_SIGNS)


def _compatible(text: str) -> str:
    return unicodedata.normalize("NFKC", text).translate(_SIGNS)


@lru_cache(maxsize=4096)
def _letter(letter: str) -> str:
    if letter < "\x80" or ord(letter) in _SIGNS:
        return letter
    kind, name = unicodedata.decomposition(letter), unicodedata.name(letter, "")
    if kind.startswith("<fraction>"):
        over, _, under = unicodedata.normalize("NFKC", letter).partition("\u2044")
        return f"\\frac{{{over}}}{{{under}}}" if under else letter
    if kind.startswith(_SAME_LETTER):
        return _letter(unicodedata.normalize("NFKC", letter))
    if greek := re.fullmatch("GREEK (SMALL|CAPITAL) LETTER ([A-Z]+)", name):
        spelt = greek[2].lower()
        return f"\\{spelt if greek[1] == 'SMALL' else spelt.capitalize()} "
    return str(unicodedata.decimal(letter, letter))


def _peeled(text: str) -> str:
    """Return the text without what may stand around the whole of an answer."""
    before = None
    while text != before:
        before = text
        text = _SAID.sub("", text, count=1) if _SAID.match(text) else text
        text = re.sub(r"(?<![.\s])\s*\.$", "", text)
        for start, end in _MATH:
            inside = text[len(start) : -len(end)]
            if len(text) > len(start + end) and text.startswith(start) and text.endswith(end) and start not in inside:
                text = inside.strip()
        box = _BOX.match(text)
        around = brackets(text[box.end() :] if box else text)
        if around is None:
            continue
        if box:
            text = around.inside
        elif (around.opening, around.closing) in {("(", ")"), ("{", "}")}:
            several = len(split(around.inside, ",", ";")) > 1
            if not several:
                text = around.inside
            elif around.opening == "{":
                text = f"\\{{{around.inside}\\}}"
    return text


def _without_commas(text: str) -> str:
    joined, start = "", 0
    for match in _COMMA_GROUPS.finditer(text):
        before = tokens(text[: match.start()])
        if not sum((sign in _OF_MEMBERS) - (sign in CLOSING - {"}"}) for sign in before):
            joined, start = joined + text[start : match.start()] + match[0].replace(",", ""), match.end()
    return joined + text[start:]


def _mixed(whole: str, over: str, under: str) -> str:
    return f"{whole}\\frac{{{over}}}{{{under}}}" if int(over) < int(under) else f"{whole} {over}/{under}"


def _repeating(whole: str, fixed: str, repeated: str) -> str:
    under = (10 ** len(repeated) - 1) * 10 ** len(fixed)
    over = int(whole + fixed + repeated) - int(whole + fixed or "0")
    return f"\\frac{{{over}}}{{{under}}}"
