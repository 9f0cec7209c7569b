"""Responses in another language than their set, by the script, and by the small words of Latin languages."""

from __future__ import annotations

import re
from collections import Counter
from typing import TYPE_CHECKING

from rlhf_core.data.linting.findings import Accused, quoted

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rlhf_core.data.linting.rows import LintRow, LintSet

MOSTLY = 0.8
"""Share of a set's texts that must be in one language, so that the others stand out."""
_LOOKED_AT = 600
"""Characters of a text that tell its language."""
_SCRIPTS = {
    "Cyrillic": re.compile("[\u0400-\u052f]"),
    "Greek": re.compile("[\u0370-\u03ff\u1f00-\u1fff]"),
    "Arabic": re.compile("[\u0600-\u06ff\u0750-\u077f]"),
    "Hebrew": re.compile("[\u0590-\u05ff]"),
    "Devanagari": re.compile("[\u0900-\u097f]"),
    "Bengali": re.compile("[\u0980-\u09ff]"),
    "Tamil": re.compile("[\u0b80-\u0bff]"),
    "Thai": re.compile("[\u0e00-\u0e7f]"),
    "Georgian": re.compile("[\u10a0-\u10ff]"),
    "Korean": re.compile("[\u1100-\u11ff\uac00-\ud7af]"),
    "Japanese": re.compile("[\u3040-\u30ff]"),
    "Chinese": re.compile("[\u3400-\u9fff]"),
}
_SMALL_WORDS = {
    "English": "the and of to is that you it in for with this are have not be was what your can will would i "
    "a on my we do they if how",
    "German": "der die das und ist nicht ich du sie es ein eine einen mit für auf zu den dem von wie aber auch wir "
    "kann haben wird sind bitte sich",
    "French": "le la les des et est une un que pas je vous il elle pour dans avec sur qui ne nous mais ce cette sont "
    "du au plus être",
    "Spanish": "el la los las que de y es un una no en por con para se lo como más pero su está esto usted muy "
    "puede hay si",
    "Italian": "il lo la gli che di e è un una non per con sono del della come più ma anche questo si può ho nel "
    "alla mi",
    "Portuguese": "o os as que de e é um uma não em por com para se como mais mas você está isso são ao da do na no "
    "muito",
    "Dutch": "de het een en van is dat niet ik je zijn met voor op te maar ook hij wij kan naar deze wordt bij er "
    "heeft als",
    "Swedish": "och att det är som en ett inte jag du på för med av till om men kan har den vi så var från ska",
    "Polish": "i w nie na to się z że jest do jak co ale o tak czy dla po już być może tego mnie są",
    "Turkish": "ve bir bu için değil ne ben sen çok ama da de ile var yok daha gibi olarak mı nasıl",
    "Indonesian": "yang dan di ini itu tidak untuk dengan dari saya anda akan ada bisa pada ke adalah juga atau kamu",
    "Vietnamese": "và là của không có cho được một những này tôi bạn các trong với để người khi như thì",
}
_LANGUAGES = {
    word: [language for language, words in _SMALL_WORDS.items() if word in words.split()]
    for word in " ".join(_SMALL_WORDS.values()).split()
}
_ANY_SCRIPT = re.compile("[\u0370-\u1fff\u3040-\ud7af]")
_WORD = re.compile(r"[^\W\d_]+")
_FEWEST = 3
"""Different small words of one language that a text must have."""
_NAMES = "|".join(
    [*_SMALL_WORDS, *_SCRIPTS, "Russian", "Ukrainian", "Hindi", "Latin", "Mandarin", "another", "foreign"]
)
_ASKS_FOR_ANOTHER = re.compile(
    rf"translat|übersetz|tradui|tradu[cz]|\b(?:in|into|to|from|speak|learn|write)\s+(?:an?\s+)?(?:{_NAMES})\b",
    re.IGNORECASE,
)


def language_of(text: str) -> str | None:
    """Return the language of a text, or its script where that tells enough; None where it is too short to say.

    Example:
        >>> language_of("Ich kann dir dabei nicht helfen."), language_of("Я не знаю."), language_of("Ok!")
        ('German', 'Cyrillic', None)
    """
    text = text[:_LOOKED_AT]
    if _ANY_SCRIPT.search(text):
        letters = sum(map(str.isalpha, text))
        counts = {script: len(pattern.findall(text)) for script, pattern in _SCRIPTS.items()}
        most = max(counts, key=lambda script: counts[script])
        if counts["Japanese"] and most == "Chinese":
            most = "Japanese"
        if sum(counts.values()) > letters / 2:
            return most
    words = set(_WORD.findall(text.casefold()))
    found = Counter(each for word in words for each in _LANGUAGES.get(word, ())).most_common(2)
    if not found or found[0][1] < _FEWEST or (len(found) > 1 and found[1][1] == found[0][1]):
        return None
    return found[0][0]


def language(given: LintSet) -> Iterator[Accused]:
    """Yield the rows in another language than nearly all of the set, unless their prompt asks for it."""
    spoken = [_spoken(row) for row in given.rows]
    counts = Counter(found for texts in spoken for _, _, found in texts if found is not None)
    if not counts:
        return
    [(usual, count)] = counts.most_common(1)
    if count < MOSTLY * counts.total():
        return
    for place, texts in enumerate(spoken):
        other = next(((name, text, found) for name, text, found in texts if found not in {None, usual}), None)
        if other is not None and not _ASKS_FOR_ANOTHER.search(given.rows[place].prompt):
            name, text, found = other
            yield Accused(place, f"{name} is {found}, not {usual}: {quoted(text)}")


def _spoken(row: LintRow) -> list[tuple[str, str, str | None]]:
    """Return the texts of a row that somebody wrote for it, with their languages."""
    texts = [("prompt", row.asked), *row.named_responses()]
    return [(name, text, language_of(text)) for name, text in texts]
