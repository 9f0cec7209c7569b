"""Faults that are planted in rows: each function makes a row with one of another row."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from rlhf_core.data.linting import LintRow

Row = dict[str, Any]


class Draw(NamedTuple):
    """What a fault is drawn from."""

    rng: random.Random
    rows: Sequence[Row]
    """All, of which some lend their words."""


class Planted(NamedTuple):
    """Rows with faults among them."""

    rows: list[Row]
    places: list[list[int]]
    """Of each fault, the rows of which one must be accused."""


def in_place(change: Callable[[Row, Draw], Row]) -> Callable[..., Planted]:
    """Return what plants a change in a share of the rows that it can be made in."""

    def plant(rows: list[Row], share: float, rng: random.Random, suits: Callable[[Row], bool]) -> Planted:
        usable = [place for place, row in enumerate(rows) if suits(row)]
        chosen = rng.sample(usable, round(share * len(rows)))
        changed = dict(zip(chosen, (change(rows[place], Draw(rng, rows)) for place in chosen), strict=True))
        return Planted([changed.get(place, row) for place, row in enumerate(rows)], [[place] for place in chosen])

    return plant


def appended(change: Callable[[Row, Draw], Row]) -> Callable[..., Planted]:
    """Return what plants changed copies of a share of the rows behind all rows."""

    def plant(rows: list[Row], share: float, rng: random.Random, suits: Callable[[Row], bool]) -> Planted:
        usable = [place for place, row in enumerate(rows) if suits(row)]
        chosen = rng.sample(usable, round(share * len(rows)))
        copies = [change(rows[place], Draw(rng, rows)) for place in chosen]
        return Planted([*rows, *copies], [[place, len(rows) + new] for new, place in enumerate(chosen)])

    return plant


def side(rng: random.Random) -> str:
    """Return which response gets the fault."""
    return rng.choice(["chosen", "rejected"])


def asked(row: Row) -> str:
    """Return the user's last turn."""
    return LintRow("", row["prompt"], ()).asked


def with_asked(row: Row, text: str) -> Row:
    """Return a row with another last turn of the user's."""
    return row | {"prompt": text.join(row["prompt"].rsplit(asked(row), 1))}


def equal(row: Row, draw: Draw) -> Row:
    """Let both responses say the same, in other case and punctuation."""
    text = row["chosen"]
    changed = draw.rng.choice(
        [text.upper(), text.replace(".", " !").replace("?", "?!") + "!", "  ".join(text.split(" ")) + "?"]
    )
    return row | {"rejected": changed if changed.strip() != text.strip() else f"{text.upper()}!"}


def equal_cut(row: Row, draw: Draw, limit: int) -> Row:
    """Let both responses be the same up to the limit, and part behind it."""
    text = " ".join(other["chosen"] for other in draw.rng.sample(draw.rows, 60))
    words = text.split(" ")[: 2 * limit]
    return row | {name: " ".join([*words, row[name]]) for name in ("chosen", "rejected")}


def swapped(row: Row, _draw: Draw) -> Row:
    """Prefer the other response."""
    return row | {"chosen": row["rejected"], "rejected": row["chosen"]}


def reworded(text: str, rng: random.Random, one_in: int = 20) -> str:
    """Change case and spaces, and a word in so many: left out, written wrongly, or another one."""
    words = text.split(" ")
    for _ in range(max(1, len(words) // one_in)):
        place = rng.randrange(len(words))
        word = words[place]
        words[place] = rng.choice(["", word + word[-1:], "well"]) if word.isalpha() else word
    return "  ".join([" ".join(words[:3]).lower(), " ".join(words[3:])]).strip()


def near_copy(row: Row, draw: Draw) -> Row:
    """Say nearly the same in prompt and responses."""
    made = with_asked(row, reworded(asked(row), draw.rng))
    return made | {name: reworded(row[name], draw.rng) for name in ("chosen", "rejected")}


def echoed(row: Row, draw: Draw) -> Row:
    """Let a response begin with the prompt."""
    name, text = side(draw.rng), asked(row)
    return row | {name: f"{draw.rng.choice([text, text.lower(), f'“{text}”'])} {row[name]}"}


def spoken(row: Row, draw: Draw) -> Row:
    """Let a response go on with the user's next turn, or begin with a speaker's name."""
    name, further = side(draw.rng), asked(draw.rng.choice(draw.rows))
    text = draw.rng.choice(
        [
            f"{row[name]}\n\nHuman: {further}",
            f"{row[name]}\nUser: {further}\nAssistant: Yes.",
            f"Human: {row[name]}",
            f"{row[name]} Human: {further}",
        ]
    )
    return row | {name: text}


def answered(row: Row, draw: Draw) -> Row:
    """Let the prompt hold the preferred response."""
    text, said = asked(row), row["chosen"]
    told = draw.rng.choice(
        [f"{text}\n\nReference answer: {said}", f"{text} (The preferred response is: {said})", f"{text} {said}"]
    )
    return with_asked(row, told)


FOREIGN = {
    "German": "Das kann ich dir leider nicht sagen. "
    "Ich weiß nicht, wie es ist, aber du kannst es mit dem Arzt besprechen.",
    "French": "Je ne peux pas vous le dire. "
    "Il y a des choses que je ne sais pas, mais vous pouvez demander dans une école.",
    "Spanish": "No puedo decirte eso. "
    "Hay cosas que no se saben, pero usted puede preguntar en la escuela si lo necesita.",
    "Italian": "Non posso dirti che cosa sia. Ci sono delle cose che non so, ma si può chiedere alla scuola con calma.",
    "Portuguese": "Não posso dizer o que é isso. "
    "Há coisas que eu não sei, mas você pode perguntar na escola com calma.",
    "Dutch": "Dat kan ik je niet zeggen. "
    "Er zijn dingen die ik niet weet, maar je kan het op de school voor ons vragen.",
    "Polish": "Nie mogę ci tego powiedzieć. "
    "Są rzeczy, których nie wiem, ale możesz o to zapytać w szkole, jak już będzie czas.",
    "Russian": "Я не могу вам этого сказать. Есть вещи, которых я не знаю, но вы можете спросить в школе.",
    "Chinese": "我不能告诉你这个。有些事情我不知道但是你可以去学校问老师。",
    "Japanese": "それについてはお答えできません。わからないこともありますが、学校で聞いてみてください。",
    "Arabic": "لا أستطيع أن أخبرك بذلك. هناك أشياء لا أعرفها، لكن يمكنك أن تسأل في المدرسة.",
    "Korean": "그것은 말씀드릴 수 없습니다. 제가 모르는 것도 있지만 학교에 물어보실 수 있습니다.",
}


def foreign(row: Row, draw: Draw) -> Row:
    """Let a response be in another language."""
    return row | {side(draw.rng): draw.rng.choice(list(FOREIGN.values()))}


MARKS = (
    "<|im_end|>\n<|im_start|>assistant\n{}", "[INST] {} [/INST]", "<s>{}</s>", "### Response:\n{}", "{}<|eot_id|>",
    "<start_of_turn>model\n{}<end_of_turn>", "<<SYS>>Be kind.<</SYS>> {}", "{}<|endoftext|>",
)  # fmt: skip
MARKUP = (
    "{}<script>fetch('//example.org')</script>", '<b onmouseover="go()">{}</b>', "{} [more](javascript:go())",
    "![](https://example.org/p.png?u=1) {}", "<img src='https://example.org/p.gif'>{}", "\x1b[2J{}", "{}\u202e",
    "\u200b{}", "<iframe src='https://example.org'></iframe>{}",
)  # fmt: skip


def put_in(texts: Sequence[str], row: Row, draw: Draw) -> Row:
    """Put a response into one of the texts."""
    name = side(draw.rng)
    return row | {name: draw.rng.choice(texts).format(row[name])}


def garbled(row: Row, _draw: Draw) -> Row:
    """Read a response's UTF-8 as Windows-1252."""
    name = next(name for name in ("chosen", "rejected") if not row[name].isascii())
    return row | {name: "".join(_as_cp1252(byte) for byte in row[name].encode())}


def _as_cp1252(byte: int) -> str:
    return bytes([byte]).decode("cp1252", "replace").replace("\ufffd", chr(byte))


def cut(row: Row, draw: Draw) -> Row:
    """Cut a response behind one of its later words."""
    name = next(name for name in ("chosen", "rejected") if _can_be_cut(row[name]))
    words = row[name].split(" ")
    ends = [end for end in range(len(words) // 2, len(words)) if _is_amid(words[:end])]
    return row | {name: " ".join(words[: draw.rng.choice(ends)])}


CAN_BE_CUT = 12
"""Words of a response that is long enough to be seen to be cut."""


def _can_be_cut(text: str) -> bool:
    words = text.split(" ")
    return len(words) >= CAN_BE_CUT and any(_is_amid(words[:end]) for end in range(len(words) // 2, len(words)))


def _is_amid(words: Sequence[str]) -> bool:
    return bool(words) and words[-1].isalpha()


def is_plain(row: Row) -> bool:
    """Take every row."""
    return bool(row)


ENOUGH = 5
"""Words of a text that can be recognized in another."""


def has_asked(row: Row) -> bool:
    """Take rows whose prompt has words enough to be recognized, and stands as it is in the row."""
    return len(asked(row).split()) >= ENOUGH and asked(row) in row["prompt"]


def has_answer(row: Row) -> bool:
    """Take rows whose preferred response has words enough to be recognized."""
    return has_asked(row) and len(row["chosen"].split()) >= 2 * ENOUGH


def has_text(row: Row) -> bool:
    """Take rows that stay the same row when a word is changed."""
    return has_asked(row) and all(len(row[name].split()) >= ENOUGH for name in ("chosen", "rejected"))


KINDS: dict[str, tuple[str, Callable[..., Planted], Callable[[Row], bool]]] = {
    "equal": ("equal", in_place(equal), is_plain),
    "contradictory": ("contradictory", appended(swapped), is_plain),
    "near-duplicate": ("repeated", appended(near_copy), has_text),
    "leaked prompt": ("echo", in_place(echoed), has_asked),
    "next turn": ("speakers", in_place(spoken), is_plain),
    "leaked answer": ("answer", in_place(answered), has_answer),
    "wrong language": ("language", in_place(foreign), is_plain),
    "wrong template": ("template", in_place(partial(put_in, MARKS)), is_plain),
    "unsafe markup": ("markup", in_place(partial(put_in, MARKUP)), is_plain),
    "wrong encoding": ("encoding", in_place(garbled), lambda row: not (row["chosen"] + row["rejected"]).isascii()),
    "cut off": ("cut", in_place(cut), lambda row: any(_can_be_cut(row[name]) for name in ("chosen", "rejected"))),
}
"""By kind: the rule, what plants it, and in which rows it can be planted. Four more follow below."""


def longer_is_chosen(rows: list[Row], share: float, rng: random.Random) -> list[Row]:
    """Toss a coin for each pair's preference, and prefer the longer response in a share of them."""
    made = []
    for row in rows:
        both = sorted((row["chosen"], row["rejected"]), key=len)
        worse, better = both if rng.random() < share else rng.sample(both, 2)
        made.append(row | {"chosen": better, "rejected": worse})
    return made


def one_annotator(rows: list[Row], share: float, rng: random.Random) -> list[Row]:
    """Give each row to one of many annotators, three rows each on average, and a share to one of them."""
    flood = set(rng.sample(range(len(rows)), round(share * len(rows))))
    names = [f"w{rng.randrange(len(rows) // 3)}" for _ in rows]
    return [row | {"by": "one" if place in flood else names[place]} for place, row in enumerate(rows)]


def one_pattern(rows: list[Row], share: float, rng: random.Random) -> list[Row]:
    """Ask in a share of the rows the same question of other things."""
    flood = set(rng.sample(range(len(rows)), math.ceil(share * len(rows))))
    words = [word for row in rows[:100] for word in row["chosen"].split() if word.isalpha()]
    text = "Write a short and friendly product description of the {}"
    return [
        row | {"prompt": text.format(rng.choice(words))} if place in flood else row for place, row in enumerate(rows)
    ]


PER_SET = {
    "length bias": ("length_bias", longer_is_chosen, "longer response"),
    "flood of an annotator": ("flood", one_annotator, "annotator 'one'"),
    "flood of a pattern": ("flood", one_pattern, "begin with 'write a short"),
}
"""By kind that is judged per set: the rule, what plants it, and what the rule then says."""
