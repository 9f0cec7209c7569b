"""Conversations of several turns: coati's templates, and which tokens of them the assistant said."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Self

from rlhf_core.config import TemplateConfig
from rlhf_core.config.data import TagConfig
from rlhf_core.data.reading.places import existing_file
from rlhf_core.data.template import PromptTemplate
from rlhf_core.errors import ConfigError, DataError
from rlhf_core.rewards.structure import check_tags

ASSISTANT = "assistant"
_KEYS = ("chat_template", "system_message", "stop_ids", "end_of_assistant", "response_format_tags")
_UNUSED = ("step_score_signal", "reward_signal")  # of process reward models, in some of coati's templates


class EncodedConversation(NamedTuple):
    """Token ids, and which of them the assistant said."""

    ids: list[int]
    loss_mask: list[bool]


@dataclass
class Conversation:
    """coati's conversation template, and the turns of one conversation.

    Attributes:
        tokenizer: of the model.
        system_message: what the system turn says; None has no such turn.
        chat_template: Jinja; also the tokenizer's own from here on.
        stop_ids: tokens that end a response.
        end_of_assistant: text with which the template ends an assistant's turn.
        response_format_tags: the form that reward functions want of a response; None is theirs.
        messages: the turns so far.
    """

    tokenizer: Any
    system_message: str | None
    chat_template: str
    stop_ids: list[int]
    end_of_assistant: str
    response_format_tags: dict[str, dict[str, Any]] | None = None
    messages: list[dict[str, str]] = field(default_factory=list)

    def append_message(self, role: str, message: str) -> None:
        """Add a turn of `role` (user or assistant)."""
        self.messages.append({"role": role, "content": message})

    def clear(self) -> None:
        """Forget the turns."""
        self.messages.clear()

    def copy(self) -> Self:
        """Return the same template without turns."""
        return type(self)(**{**vars(self), "messages": []})

    def get_prompt(self, length: int | None = None, add_generation_prompt: bool = False) -> str:
        """Return the first `length` turns (None: all) as the template writes them, the system turn before them."""
        return self.template().render(self.messages[:length], for_answer=add_generation_prompt)

    def template(self) -> PromptTemplate:
        """Return what puts prompts to the model and reads its responses by this template."""
        tags = self.response_format_tags
        config = TemplateConfig(
            chat_template=self.chat_template,
            system_message=self.system_message,
            stop_ids=tuple(self.stop_ids),
            tags=None if tags is None else {name: TagConfig(**tag) for name, tag in tags.items()},
        )
        return PromptTemplate(self.tokenizer, config)


def setup_conversation_template(
    tokenizer: Any,
    chat_template_config: Mapping[str, Any] | str | Path | None = None,
    save_path: str | Path | None = None,
) -> Conversation:
    """Return the conversation template that a configuration of coati's form describes.

    What the configuration leaves out or null is the tokenizer's: its chat template, its end-of-sequence token to
    stop at and to end the assistant's turns. The chat template becomes the tokenizer's own, so that it is
    stored with the model.

    Args:
        tokenizer: of transformers.
        chat_template_config: {chat_template, system_message, stop_ids, end_of_assistant, response_format_tags}, or
            a file of it.
        save_path: where to write the whole template as JSON; None writes nothing.

    Raises:
        ConfigError: if the configuration has another form, or neither it nor the tokenizer has a chat template.
    """
    given = read_template(chat_template_config)
    chat_template = given.get("chat_template") or tokenizer.chat_template
    if not chat_template:
        raise ConfigError(
            "neither the conversation template nor the tokenizer has a chat_template; write one into the first"
        )
    end = given.get("end_of_assistant") or tokenizer.eos_token
    stop_ids = list(given.get("stop_ids") or ([] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]))
    if not end or not stop_ids:
        raise ConfigError(
            "the tokenizer has no end-of-sequence token; name stop_ids and end_of_assistant in the template"
        )
    _check_known(stop_ids, tokenizer, where=_named(chat_template_config))
    made = Conversation(
        tokenizer, given.get("system_message"), chat_template, stop_ids, end, given.get("response_format_tags")
    )
    tokenizer.chat_template = chat_template
    if save_path is not None:
        whole = {key: getattr(made, key) for key in _KEYS}
        Path(save_path).parent.mkdir(parents=True, exist_ok=True)
        Path(save_path).write_text(json.dumps(whole, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    return made


def encode_conversation(
    messages: Sequence[Mapping[str, str]], template: PromptTemplate | Conversation | Any
) -> EncodedConversation:
    """Return a conversation's token ids, and a mask that is True on what the assistant said, its end token included.

    What the template writes around the assistant's words (its name, the line's end after the end token) is not
    the assistant's. Ids up to a turn are those that the model is given when it is to say that turn.

    Args:
        messages: role and content of each turn, at least one of them the assistant's.
        template: a prompt template, a conversation template, or a tokenizer with a chat template.

    Raises:
        DataError: if no turn is the assistant's; or the template writes a turn differently once others follow, so
            that what the model would have seen cannot be told.
        ConfigError: if there is no chat template.
    """
    end: str | None = None
    prompts: PromptTemplate
    if isinstance(template, Conversation):
        end, prompts = template.end_of_assistant, template.template()
    else:
        prompts = template if isinstance(template, PromptTemplate) else PromptTemplate(template, TemplateConfig())
    ends = [end] if end else prompts.tokenizer.convert_ids_to_tokens(list(prompts.stop_ids))
    turns = [index for index, message in enumerate(messages) if message["role"] == ASSISTANT]
    if not turns:
        raise DataError(
            f"a conversation of {len(messages)} turns has none of the assistant's; there is nothing to learn"
        )
    encoded, written, whole = EncodedConversation([], []), "", prompts.render(messages)
    for turn in turns:
        before = prompts.render(messages[:turn], for_answer=True)
        after = prompts.render(messages[: turn + 1])
        if not (before.startswith(written) and after.startswith(before) and whole.startswith(after)):
            raise DataError(
                f"the chat template writes turn {turn + 1} of {len(messages)} differently once other turns follow, so "
                "its words cannot be told from the prompt; train on single turns, or take another chat template"
            )
        said = _until_end(after[len(before) :], ends)
        _extend(encoded, prompts.tokenizer, written, before, learn=False)
        _extend(encoded, prompts.tokenizer, before, before + said, learn=True)
        written = before + said
    _extend(encoded, prompts.tokenizer, written, whole, learn=False)
    return encoded


def _until_end(said: str, ends: Sequence[str]) -> str:
    """Return an assistant's turn up to its end token, without what the template writes behind it."""
    places = [place + len(end) for end in ends if (place := said.rfind(end)) >= 0]
    return said[: max(places)] if places else said


def _extend(encoded: EncodedConversation, tokenizer: Any, before: str, after: str, *, learn: bool) -> None:
    """Add the ids of what stands in `after` behind `before`, a boundary that no token crosses."""
    if after == before:
        return
    ids = tokenizer(after, add_special_tokens=False).input_ids
    known = len(encoded.ids)
    # where a token would cross the boundary, generation still starts behind it: so does the text here
    fresh = (
        ids[known:]
        if ids[:known] == encoded.ids
        else tokenizer(after[len(before) :], add_special_tokens=False).input_ids
    )
    encoded.ids.extend(fresh)
    encoded.loss_mask.extend([learn] * len(fresh))


def read_template(config: Mapping[str, Any] | str | Path | None) -> Mapping[str, Any]:
    """Return a template configuration of coati's form, after a check of its keys and their types.

    Args:
        config: the configuration, or a file of it; None is an empty one.

    Raises:
        ConfigError: if it has another form; the message names the file and the key.
    """
    where, found = _named(config), config
    if isinstance(config, str | Path):
        try:
            found = json.loads(existing_file(config).read_text(encoding="utf-8"))
        except (ValueError, OSError, DataError) as error:
            raise ConfigError(f"{where} cannot be read: {error}") from error
    if found is None:
        return {}
    if not isinstance(found, Mapping):
        raise ConfigError(f"{where} must be an object with {', '.join(_KEYS)}, but is {type(found).__name__}")
    unknown = sorted(set(found) - {*_KEYS, *_UNUSED})
    if unknown:
        raise ConfigError(f"{where} has the unknown key {unknown[0]!r}; it may have {', '.join(_KEYS)}")
    for key in ("chat_template", "system_message", "end_of_assistant"):
        if not isinstance(found.get(key), str | None):
            raise ConfigError(f"{key} of {where} must be a text or null, but is {found[key]!r:.80}")
    ids = found.get("stop_ids") or []
    if not isinstance(ids, list) or not all(isinstance(token, int) and not isinstance(token, bool) for token in ids):
        raise ConfigError(f"stop_ids of {where} must be a list of token ids, but is {ids!r:.80}")
    if found.get("response_format_tags") is not None:
        check_tags(found["response_format_tags"], where=f" of {where}")
    return found


def _check_known(stop_ids: Sequence[int], tokenizer: Any, *, where: str) -> None:
    beyond = [token for token in stop_ids if not 0 <= token < len(tokenizer)]
    if beyond:
        raise ConfigError(
            f"stop_ids of {where} names token {beyond[0]}, but the tokenizer has {len(tokenizer)} tokens; take stop "
            "ids of this tokenizer"
        )


def _named(config: Mapping[str, Any] | str | Path | None) -> str:
    return str(config) if isinstance(config, str | Path) else "the conversation template"
