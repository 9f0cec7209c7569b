r"""Formulas: what math-verify is asked to compare, and nothing else, since it is sure of nothing else.

math-verify reads something in almost any text: `no` and `on` are one product of two letters to it, `2516_8` and
`2516_9` are 2516, `42?` is 42. So a text is handed over only if each of its signs belongs to a formula.

Imports sympy by way of math-verify.
"""

from __future__ import annotations

import logging
import re
from dataclasses import replace
from typing import Any

import math_verify
import sympy
from sympy.core.evalf import PrecisionExhausted

_USUAL = math_verify.LatexExtractionConfig()
_VERBATIM = replace(
    _USUAL,
    normalization_config=replace(
        _USUAL.normalization_config, basic_latex=False, units=False, malformed_operators=False, nits=False, boxed="none"
    ),
)
"""math-verify reads the formula that it is handed: it takes no unit away and looks for no answer in a sentence."""

logging.getLogger("math_verify").setLevel(logging.CRITICAL)  # what it cannot read is no news

_FUNCTIONS = "log|ln|sin|cos|tan|cot|sec|csc|arcsin|arccos|arctan|sinh|cosh|tanh"
_COMMANDS = (
    f"{_FUNCTIONS}|frac|sqrt|binom|cdot|pi|infty|lfloor|rfloor|lceil|rceil|"
    "alpha|beta|gamma|delta|epsilon|theta|lambda|mu|nu|rho|sigma|tau|phi|psi|omega|Delta"
)
_PARTS = re.compile(  # found one after another: one pattern for all of a text would try "1.5" in two ways, for ever
    rf"\d+(?:\.\d*)?|\.\d+|\\(?:{_COMMANDS})(?![A-Za-z])|(?<![A-Za-z])[A-Za-z]{{1,3}}(?![A-Za-z])"
    r"|[-+/^_{}()\[\]|! ]+"
)
_UNSURE = re.compile(
    rf"""
      ^(?=.*[A-Za-z]{{2}})[A-Za-z\ /-]+$           # words: "no" is not n times o
    | \d\ [\d.] | \.\d*\.                          # two numbers, which math-verify adds
    | \d\ ?\\frac\{{\d+\}}\{{\d+\}}                # so it does here, be it a mixed number or a product
    | \d\ [A-Za-z]{{2}}                            # a number and a word
    | (?<![\\A-Za-z])[A-Za-z]+\ [A-Za-z]           # two words
    | (?<![\\A-Za-z])[A-Za-z]+\d                   # "x2" is x^2 to some
    | [\d)}}]\ ?_                                  # the base of a number
    | [-+/^]\ ?[-+/] | [-+/^_]$ | ^[/^_]           # a sign without its number
    | \\(?:frac|sqrt|binom)(?!\ ?[\[{{]) | \{{\}} | \\frac\{{[^{{}}]*\}}(?!\ ?\{{)
    | (?<!sqrt)\[ | (?:^|[\d(+/\ -])\{{ | \^\{{[^{{}}]*\}}\{{  # brackets that are not round
    | /\ ?(?:\d+|[A-Za-z]|\\[a-z]+)\ ?(?:[A-Za-z(]|\\(?!cdot))  # "1/2x"
    | \\(?:{_FUNCTIONS})(?![A-Za-z])[^()+-]*\\cdot  # "\cos 0 \cdot 2"
    | \^\{{[^}}]*\^ | \}}\ ?\^\{{[^{{}}]*\}}\ ?\^  # a tower of powers
    | \.\d{{13}} | [{{/]\d{{14}} | \d\^\{{-(?:1[3-9]|[2-9]\d|\d{{3}})  # beyond what is compared of a decimal
    | (?:/\ ?|\}}\ ?\{{)10\^\{{(?:1[3-9]|[2-9]\d|\d{{3}})
    | .\\infty | \\infty\ ?[^\ ]                   # a sum with it is worth it too
    | ^(?:\(\d\d+\)\ ?){{2,}}$                     # a permutation, perhaps
    | \\binom(?!\ ?\{{[^{{}}^!]*\}}\ ?\{{[^{{}}^!]*\}}) | (?:![^!]*){{5}}
    | !! | \|\|\| | [)}}|]\ ?! | \d{{4}}! | \\binom.*\d{{4}} | \d{{4}}.*\\binom
    """,
    re.VERBOSE,
)
_SIDE_BY_SIDE = re.compile(
    rf"(\\(?:{_FUNCTIONS})\ ?(?:[_^]\{{[^{{}}]*\}})+\ ?.|[A-Za-z]_\{{[^{{}}]*\}}\ ?.)"  # no factor follows
    r"|(?<=[\d)}])\ ?(?=\(|\\binom|e(?![A-Za-z]))|(?<=[)}])\ ?(?=\d|\\frac)"
)
_POWER = re.compile(r"\^\{([^{}]*(?:\{[^{}]*\}[^{}]*)*)\}")
_SMALL_POWER = re.compile(r"[+-]?(\d{1,4})(?:\.\d{1,4}|/\d{1,4})?|[+-]?\\frac\{(\d{1,4})\}\{\d{1,4}\}")
_HIGHEST_POWER, _HIGHEST_OF_SUM = 10**4, 999
_LARGE = re.compile(r"\d{5}")
_LETTER = re.compile(r"(?<![\\A-Za-z])[A-Za-z]")
_CAPITAL = re.compile(r"(\\Delta(?![A-Za-z])|(?<!\\)[A-HJ-Z])|\\[A-Za-z]+")
_IMAGINARY = re.compile(r"(?<![\\A-Za-z])I(?![A-Za-z])")


def is_formula(text: str) -> bool:
    r"""Return whether a text in the notation of `plain` is a formula throughout, whose value is found in a moment.

    Example:
        >>> [is_formula(text) for text in ("x^{2}+1", "\\frac{1}{2}", "no", "2516_{8}", "42?", "9^{9^{9}}")]
        [True, True, False, False, False, False]
    """
    if not text or _PARTS.sub("", text) or _UNSURE.search(text):
        return False
    highest, powers = 1, list(_POWER.finditer(text))
    if len(powers) != text.count("^"):
        return False
    for match in powers:
        small = _SMALL_POWER.fullmatch(match[1])
        if small is None and (_LARGE.search(match[1]) or not _LETTER.search(match[1])):  # the letter may cancel out
            return False
        if small is not None and text[: match.start()].rstrip().endswith((")", "}")):  # a power of a power, perhaps
            power = int(small[1] or small[2])
            highest *= max(1, power)
            if power > _HIGHEST_OF_SUM and _LETTER.search(text[: match.start()]):
                return False
    return highest <= _HIGHEST_POWER


def same_formula(wanted: str, found: str) -> bool:
    """Return whether math-verify finds two formulas, or relations of formulas, equal; it takes the time it takes.

    The alarm that ends it is for the main thread, and does not interrupt a power of whole numbers.
    """
    first, second = (_parsed(text) for text in _without_capitals(wanted, found))
    if first is None or second is None:
        return False
    if math_verify.verify(first, second, timeout_seconds=None):
        return True
    letter = any(isinstance(each, sympy.Symbol) for each in (first, second))  # it compares a letter by its name alone
    if not letter or not all(isinstance(each, sympy.Expr) for each in (first, second)):
        return False
    try:
        return bool(sympy.simplify(first - second) == 0)
    except (ValueError, ArithmeticError, TypeError, NotImplementedError, PrecisionExhausted):
        return False


def _without_capitals(*texts: str) -> list[str]:
    """Return the texts with small letters that none has for their capitals: math-verify takes R for r."""
    used = set("".join(texts).lower())
    free = [letter for letter in "zyxwvutsrqponmlkhgcba" if letter not in used]
    capitals = dict.fromkeys(match[1] for text in texts for match in _CAPITAL.finditer(text) if match[1])
    if len(capitals) > len(free):
        return ["", ""]  # nothing to read
    small = dict(zip(capitals, free, strict=False))
    return [_CAPITAL.sub(lambda match: small.get(match[1], match[0]), text) for text in texts]


def _parsed(text: str) -> Any:
    """Return a formula as sympy has it, its decimals as the fractions that they are; None if it cannot be read."""
    text = _IMAGINARY.sub("i", text)  # it would read "I^{2}" as "I", and "2(9)" as 11
    text = _SIDE_BY_SIDE.sub(lambda match: match[1] or "\\cdot ", text)
    read = math_verify.parse(f"${text}$", [_VERBATIM], fallback_mode="no_fallback", parsing_timeout=None)
    if not read:
        return None
    exact = {each: sympy.Rational(str(each)) for each in read[0].atoms(sympy.Float)}
    exact |= {each: sympy.I for each in read[0].atoms(sympy.Symbol) if each.name == "i"}
    return read[0].xreplace(exact) if exact else read[0]
