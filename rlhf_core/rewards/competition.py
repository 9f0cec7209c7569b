"""Is a mathematical answer right? coati's function for competitions over text, with math-verify behind it.

Imports sympy by way of math-verify, at once: a response's time limit is not for imports. No torch.
"""

from __future__ import annotations

import re
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import NamedTuple

from rlhf_core.rewards.formulas import is_formula, same_formula
from rlhf_core.rewards.math_answers import graded, number, same_number
from rlhf_core.rewards.notation import CLOSING, LONGEST, OPENING, brackets, plain, split, tokens
from rlhf_core.rewards.structure import Tags

LIMIT_S = 2
"""Longest time of one comparison, where a signal can end it."""
_DEEPEST, _MOST_MEMBERS = 20, 30


def math_competition_score(prompt: str, response: str, answer: str | None, *, tags: Tags | None = None) -> float:
    r"""Return 10 for the right answer in the right form, 1 for the form alone, else 0.

    Answers are equal if they are the same in `notation.plain`, the same number (as by `gsm8k_score`), or the same by
    parts: members of lists, sets, tuples and intervals, entries of matrices, sides of equations, bounds of
    inequalities. Two formulas are equal if math-verify finds them so; `\frac 1 2` is 0.5. Whatever is not a formula
    throughout (words, bases, times of day, ratios) is compared as text, but for capitals and white space. Units that
    differ make other answers; a unit that one side alone has does not. `docs/judges.md` has the rules.

    Args:
        prompt: not looked at.
        response: without its stop token.
        answer: the reference; None and a blank one score 0.
        tags: the form, in coati's notation.
    """
    del prompt
    return graded(response, answer, tags, same_answer)


def same_answer(reference: str, given: str) -> bool:
    """Return whether two answers are the same number, formula, collection of these, or text."""
    wanted, found = plain(reference), plain(given)
    if not wanted or not found:
        return False
    try:
        with _at_most(LIMIT_S):
            return _same(wanted, found)
    except (_TooLongError, RecursionError):
        return False


class _TooLongError(BaseException):
    """The time is over; no `except Exception` on the way takes it for its own."""


@contextmanager
def _at_most(limit_s: float) -> Iterator[None]:
    """End what takes longer by an alarm signal, which the main thread alone gets; elsewhere the caller limits the time.

    The alarm comes again and again: what is raised while garbage is collected is printed, and lost. (math-verify's own
    `timeout` rings once, and takes the alarm of whoever had set one before.)
    """

    def ring(*_: object) -> None:
        raise _TooLongError

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    began, (left_s, every_s) = time.monotonic(), signal.setitimer(signal.ITIMER_REAL, 0)
    handler = signal.signal(signal.SIGALRM, ring)
    try:
        signal.setitimer(signal.ITIMER_REAL, limit_s, limit_s)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)  # once more: the alarm may have come before the first
        signal.signal(signal.SIGALRM, handler)
        if left_s:  # an alarm that the caller had set: it comes when it was due
            signal.setitimer(signal.ITIMER_REAL, max(left_s - (time.monotonic() - began), 1e-3), every_s)


def _same(wanted: str, found: str) -> bool:
    if wanted == found:
        return True
    if any(len(text) > LONGEST or _deepest(text) > _DEEPEST for text in (wanted, found)):
        return False
    if number(wanted) is not None and number(found) is not None:
        return same_number(wanted, found)
    for reading in (_same_relations, _same_lists, _same_quantities, _same_collections):
        verdict = reading(wanted, found)
        if verdict is not None:
            return verdict
    if _bare(_time(wanted)) == _bare(_time(found)):
        return True
    wanted, found = _fraction(wanted), _fraction(found)
    return is_formula(wanted) and is_formula(found) and same_formula(wanted, found)


def _same_part(wanted: str, found: str) -> bool:
    """Return whether two parts of answers are equal; a letter is no choice there and keeps its capital."""
    letters = all(len(text) == 1 and text.isalpha() for text in (wanted, found))
    return wanted == found if letters else _same(wanted, found)


def _fraction(text: str) -> str:
    """Return a number as a fraction; any other text, and a share in per cent, as it is."""
    value = None if "%" in text else number(text)
    return text if value is None else f"\\frac{{{value.numerator}}}{{{value.denominator}}}"


def _deepest(text: str) -> int:
    steps = ((token in OPENING) - (token in CLOSING) for token in tokens(text))
    return max(accumulate(steps), default=0)


# --- lists: their members, in any order unless they are words


_ALTERNATIVE = re.compile(r"\s*,?\s*(?<![\\A-Za-z])or(?![A-Za-z])\s*")
_AND = re.compile(r"\s*,?\s*(?<![\\A-Za-z])and(?![A-Za-z])\s*")


def _same_lists(wanted: str, found: str) -> bool | None:
    """Return whether two lists without brackets, or a list and a set, are equal; None if neither is a list."""
    lists = [_members(text) for text in (wanted, found)]
    if all(len(members) == 1 for members in lists):
        return None
    if any(_is_set(text) for text in (wanted, found)):
        lists = [
            _inside(text) if _is_set(text) else members for text, members in zip((wanted, found), lists, strict=True)
        ]
    unions = [_union(text) for text in (wanted, found)]
    if None not in unions:
        lists = [list(union or ()) for union in unions]
    words = any(_is_words(member) for member in lists[0])
    joined = [(bool(_ALTERNATIVE.search(text)), bool(_AND.search(text))) for text in (wanted, found)]
    names = [{claim.name for claim in map(_claim, members) if claim} for members in lists]
    several = any(len(each) > 1 for each in names)
    if (words or several or _claims_sets(lists)) and sorted(joined) == [(False, True), (True, False)]:
        return False
    if words:
        return _in_order(*lists)
    if names[0] != names[1] and several:
        return False  # "x=1, y=2" says more than "1, 2"
    return _in_any_order(lists[0], lists[1])


def _claims_sets(lists: Sequence[Sequence[str]]) -> bool:
    return any(claim is not None and claim.relation != "=" for members in lists for claim in map(_claim, members))


def _members(text: str) -> list[str]:
    members = [part for each in _ALTERNATIVE.split(_AND.sub(",", text)) for part in split(each, ",", ";")]
    if len(members) > 1 and "" in members:
        return [text]
    return [signed for member in members for signed in _signed(member)]


def _signed(member: str) -> list[str]:
    if member.count("\\pm") != 1 or split(member, "\\pm") == [member]:
        return [member]
    return [re.sub(r"^\+", "", re.sub(r"\\pm\s*", sign, member)) for sign in "+-"]


def _in_order(wanted: Sequence[str], found: Sequence[str]) -> bool:
    return len(wanted) == len(found) and all(map(_same_part, wanted, found))


def _in_any_order(wanted: Sequence[str], found: Sequence[str]) -> bool:
    if len(wanted) != len(found) or len(wanted) > _MOST_MEMBERS:
        return False
    left = list(found)
    for member in wanted:
        same = next((other for other in left if _same_part(member, other)), None)
        if same is None:
            return False
        left.remove(same)
    return True


# --- quantities: a value and its unit


_PREFIXES = {"": "", "milli": "m", "centi": "c", "deci": "d", "kilo": "k", "mega": "M"}
_METRIC = {
    "meter": "m",
    "metre": "m",
    "gram": "g",
    "liter": "L",
    "litre": "L",
    "watt": "W",
    "joule": "J",
    "hertz": "Hz",
}
_NAMES = {prefix + name: short + unit for prefix, short in _PREFIXES.items() for name, unit in _METRIC.items()} | {
    "inch": "in", "inche": "in", "foot": "ft", "feet": "ft", "yard": "yd", "mile": "mi", "ton": "t", "tonne": "t",
    "ounce": "oz", "lb": "lb", "gallon": "gal", "second": "s", "sec": "s", "minute": "min", "min": "min", "hour": "h",
    "hr": "h", "day": "day", "week": "week", "month": "month", "year": "year", "yr": "year", "mph": "mi/h",
    "ml": "mL", "l": "L", "kmh": "km/h", "kph": "km/h", "newton": "N", "volt": "V", "degree": "degree",
    "deg": "degree", "radian": "rad", "dollar": "$", "usd": "$", "cent": "\u00a2", "euro": "\u20ac", "eur": "\u20ac",
    "pound": "\u00a3", "gbp": "\u00a3", "yen": "\u00a5", "rupee": "rupee", "unit": "unit", "people": "person",
    "person": "person", "student": "student", "point": "point", "way": "way", "coin": "coin", "apple": "apple",
    "tile": "tile", "digit": "digit", "side": "side",
}  # fmt: skip
"""Names without capitals and a last s."""
_SYMBOLS = {*_NAMES.values(), "Pa", "kPa"}
"""As they are written: mW is not MW."""
_POWERS = {"square": "2", "sq": "2", "cubic": "3", "cu": "3", None: "1"}
_MONEY = "$\u20ac\u00a3\u00a5\u00a2"
_MONEY_FIRST = re.compile(rf"([+-]?)([{_MONEY}]) ?([+-]?)(.+)")
_UNIT_LAST = re.compile(
    rf"(.*?[\w}})|.])( ?)(?:(%|[{_MONEY}])|(?:\^\{{\\circ\}}|(?<= )degrees) ?([CF]|Celsius|Fahrenheit)?|"
    r"(?:(square|sq|cubic|cu)\.? )?([A-Za-z]+)(?:\^\{(\d)\})?(?:(?: ?/ ?| per )([A-Za-z]+)(?:\^\{(\d)\})?)?)"
)


class _Quantity(NamedTuple):
    value: str
    unit: str
    """Blank where there is none."""


def _quantity(text: str) -> _Quantity:
    money = _MONEY_FIRST.fullmatch(text)
    if money and _is_value(money[4]):
        return _Quantity(f"{money[1] or money[3]}{money[4]}", money[2])
    match = _UNIT_LAST.fullmatch(text)
    if match is None:
        return _Quantity(text, "")
    value, space, sign, scale, power, name, raised, per, per_raised = match.groups()
    if name is None:
        unit = sign or f"degree{(scale or '')[:1]}"
    elif (len(name) == 1 and not space) or (power and raised):
        return _Quantity(text, "")  # "5m" may be a product
    else:
        parts = [(_unit(name), raised or _POWERS[power])] + ([(_unit(per), per_raised or "1")] if per else [])
        known = all(each for each, _ in parts)
        unit = "/".join(each if high == "1" else f"{each}^{high}" for each, high in parts) if known else ""
    return _Quantity(value.strip(), unit) if unit and _is_value(value.strip()) else _Quantity(text, "")


def _unit(name: str) -> str:
    return name if name in _SYMBOLS else _NAMES.get(name.lower().removesuffix("s"), "")


def _is_value(text: str) -> bool:
    return number(text) is not None or is_formula(text)


def _same_quantities(wanted: str, found: str) -> bool | None:
    """Return whether two values are equal, and their units where both have one; None if neither has."""
    sides = [_quantity(text) for text in (wanted, found)]
    units = {side.unit for side in sides} - {""}
    if not units:
        return None
    if len(units) > 1 or ("%" in units and not all(side.unit for side in sides)):  # "x%" is not "x"
        return False
    alone = not all(side.unit for side in sides)
    if alone and "degree" in units and any(number(side.value) is None for side in sides):
        return False  # "\\sin 20" is of radians
    return _same(*(plain(side.value) for side in sides))


# --- relations: equations, inequalities, membership


_NAME = re.compile(
    r"(?:\\angle ?)?(?:[A-Za-z]|[A-Z]{2,4}|\\(?:alpha|beta|gamma|theta|lambda|mu|phi))"
    r"(?:_\{\w+\})?(?:\(\w+(?:,\w+)*\))?"
    r"|\([A-Za-z](?:, ?[A-Za-z])+\)"
)
_VARIABLE = re.compile(r"(?<![\\A-Za-z])[A-Za-z]")
_RELATION = ("=", "<", ">", "\\le", "\\ge", "\\ne", "\\in")
_TURNED = {"<": ">", ">": "<", "\\le": "\\ge", "\\ge": "\\le", "=": "=", "\\ne": "\\ne"}


class _Claim(NamedTuple):
    """What a relation says of one name: that it is a value, is not, or lies in a set."""

    name: str
    relation: str
    value: str


def _related(text: str) -> list[str]:
    """Return the sides of a relation with the signs between them; the text alone if it is none."""
    sides = split(text, *_RELATION)
    if "" in sides:
        return [text]
    signs, depth = [], 0
    for token in tokens(text):
        depth += (token in OPENING) - (token in CLOSING)
        if not depth and token in _RELATION:
            signs.append(token)
    return [sides[0], *(part for sign, side in zip(signs, sides[1:], strict=True) for part in (sign, side))]


def _claim(text: str) -> _Claim | None:
    match _related(text):
        case [left, sign, right]:
            sides = (left, sign, right) if _NAME.fullmatch(left) else (right, _TURNED.get(sign, ""), left)
            return _claim_of(*sides) if _NAME.fullmatch(sides[0]) else None
        case [name, "=", value, "=", last] if _NAME.fullmatch(name) and _same(plain(value), plain(last)):
            return _Claim(name, "=", last)
        case [low, first, name, second, high] if _NAME.fullmatch(name):
            if {first, second} <= {">", "\\ge"}:
                low, first, second, high = high, _TURNED[second], _TURNED[first], low
            if {first, second} <= {"<", "\\le"}:
                ends = "[" if first == "\\le" else "(", "]" if second == "\\le" else ")"
                return _Claim(name, "\\in", f"{ends[0]}{low},{high}{ends[1]}")
    return None


def _claim_of(name: str, sign: str, value: str) -> _Claim:
    rays = {"<": f"(-\\infty,{value})", "\\le": f"(-\\infty,{value}]"}
    rays |= {">": f"({value},\\infty)", "\\ge": f"[{value},\\infty)"}
    return _Claim(name, "\\in", rays[sign]) if sign in rays else _Claim(name, sign, value)


def _same_relations(wanted: str, found: str) -> bool | None:
    """Return whether two relations say the same, or one says of a name what the other is; None if neither is one."""
    related = [len(_related(text)) > 1 and len(_members(text)) == 1 for text in (wanted, found)]
    if all(related):
        return _same_claims(wanted, found)
    claim = _claim(wanted if related[0] else found) if any(related) else None
    if claim:
        other = found if related[0] else wanted
        no_set = claim.relation == "\\in" and _is_value(claim.value)
        return not no_set and claim.relation != "\\ne" and _same_part(plain(claim.value), other)
    match _related(found) if related[1] else []:
        case [computed, "=", value] if not _VARIABLE.search(computed):
            return _same(wanted, value) and _same(computed, value)  # "2+3=5"
    return False if any(related) else None


def _same_claims(wanted: str, found: str) -> bool:
    claims = [_claim(text) for text in (wanted, found)]
    first, second = claims
    if first and second and first[:2] == second[:2]:
        return _same_part(plain(first.value), plain(second.value))
    if any(claim and not _VARIABLE.search(claim.value) for claim in claims):
        return False  # "x=18" is an answer, "2x=36" a problem
    formulas = all(is_formula(side) for text in (wanted, found) for side in _related(text)[::2])
    return formulas and same_formula(wanted, found)


def _union(text: str) -> list[str] | None:
    """Return the parts of a union, or of inequalities of one name with "or" between them; None for anything else."""
    parts = split(text, "\\cup")
    if len(parts) > 1:
        return parts
    claims = [_claim(part) for part in _ALTERNATIVE.split(text)]
    rays = [claim for claim in claims if claim and claim.relation == "\\in"]
    one_name = len(rays) == len(claims) and len({ray.name for ray in rays}) == 1
    return [ray.value for ray in rays] if one_name else None


# --- collections: sets, tuples, intervals, unions, matrices


_MATRIX = re.compile(r"\\begin\{[pb]?matrix\}((?:(?!\\begin).)*)\\end\{[pb]?matrix\}")


def _is_set(text: str) -> bool:
    around = brackets(text)
    return around is not None and around.opening == "\\{"


def _inside(text: str) -> list[str]:
    around = brackets(text)
    return split(around.inside, ",", ";") if around else [text]


def _same_collections(wanted: str, found: str) -> bool | None:
    """Return whether two collections of one kind have the same members; None if neither is a collection."""
    unions = [split(text, "\\cup") for text in (wanted, found)]
    if any(len(parts) > 1 for parts in unions):
        return _in_any_order(*unions)
    matrices = [_MATRIX.fullmatch(text) for text in (wanted, found)]
    if any(matrices):
        rows = [[split(row, "&") for row in split(each[1], "\\\\")] for each in matrices if each]
        return all(matrices) and len(rows[0]) == len(rows[1]) and all(map(_in_order, *rows))
    around = [brackets(text) for text in (wanted, found)]
    if not any(around):
        return None
    first, second = around
    if first is None or second is None or (first.opening, first.closing) != (second.opening, second.closing):
        return False
    members = [_inside(text) for text in (wanted, found)]
    return _in_any_order(*map(_distinct, members)) if first.opening == "\\{" else _in_order(*members)


def _distinct(members: Sequence[str]) -> list[str]:
    kept: list[str] = []
    for member in members[: _MOST_MEMBERS + 1]:
        if not any(_same(member, other) for other in kept):
            kept.append(member)
    return kept


# --- text: what is left


def _is_words(text: str) -> bool:
    if re.fullmatch(r"[A-Za-z ]+", text):
        return True
    known = number(text) is not None or brackets(text) or _quantity(text).unit or len(_related(text)) > 1
    return not known and not is_formula(text)


_CHOICE = re.compile(r"\(?([A-Za-z])[).]")
_GAP = re.compile(r"(?<=[0-9])\s+(?=[0-9])")
_SPACE = re.compile(r"(?<![0-9])\s+|\s+(?![0-9])")
_SYMBOLIC = re.compile(r"[0-9\\_^()\[\]{}|+/*=<>-]")
_DIGITS_OF_BASE = re.compile(r"[0-9A-Fa-f]+_\{[0-9]+\}")
_SHORT_WORDS = {"no", "am", "pm"}
"""Other texts of two letters are products, in which a capital is another letter."""
_NOON = 12
_TIME = re.compile(r"(\d{1,2})(?::(\d\d))?( [ap]m)?")


def _bare(text: str) -> str:
    """Return the text without white space, of which one space stays between digits; words go without capitals too."""
    choice = _CHOICE.fullmatch(text)
    bare = choice[1] if choice else _SPACE.sub("", _GAP.sub(" ", text))
    folded = bare.casefold()
    if _DIGITS_OF_BASE.fullmatch(bare):
        return folded
    product = len(folded) == len("Rr") and folded not in _SHORT_WORDS
    return bare if product or _SYMBOLIC.search(bare) else folded


def _time(text: str) -> str:
    """Return a time of day with 24 hours where that says the same: "3:30 pm" is "15:30"."""
    match = _TIME.fullmatch(text)
    if match is None or not (match[2] or match[3]) or (match[3] and int(match[1]) > _NOON):
        return text
    hour, minute, half = int(match[1]), match[2] or "00", (match[3] or "").strip()
    if half and (half == "pm") != (hour == _NOON):  # half past twelve in the night is 0:30
        hour, half = (hour + _NOON) % 24, ""
    return f"{hour}:{minute}{half}"
