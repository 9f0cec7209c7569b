"""How a prompt is put to the model, and how a response begins, ends and is read."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any, NamedTuple

from jinja2 import TemplateError

from rlhf_core.data.transcripts import ASSISTANT, TOOL, Message, conversation, further_keys, is_plain, turns, turns_of
from rlhf_core.errors import ConfigError, DataError
from rlhf_core.rewards.structure import answer_tags, is_of_tag

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rlhf_core.config import TemplateConfig

SYSTEM = "system"
PLACE = "{prompt}"


class Said(NamedTuple):
    """A response of the assistant's, as the model writes it."""

    text: str
    """Without what ends the turn."""
    keys: tuple[str, ...]
    """Those of the message's further keys that the text shows."""


class PromptTemplate:
    r"""Turns prompts and responses into token ids, and back.

    A prompt stands where the template says `{prompt}`. Without a template, it is the user's turn in the
    tokenizer's chat template (which may add a system turn of its own).

    A transcript ("\n\nHuman: ...\n\nAssistant:", as HH-RLHF's prompts are) becomes turns of the chat
    template. With a template of the configuration, which has one place, a transcript of one turn puts that
    turn there, and a longer one itself, speakers' names and all.

    The configuration may bring a chat template of its own, and a system turn to begin with.
    """

    def __init__(self, tokenizer: Any, config: TemplateConfig) -> None:
        """Check the template against the tokenizer.

        Args:
            tokenizer: a tokenizer of transformers.
            config: the template's text, stop tokens and answer tag.

        Raises:
            ConfigError: if the text has not one `{prompt}`, a stop token is none of the tokenizer's tokens,
                or there is no token to end a response.
        """
        self.tokenizer = tokenizer
        self._config = config
        self._chat_template = config.chat_template or getattr(tokenizer, "chat_template", None)
        self.answer_tag = config.answer_tag
        self.stop_strings = config.stop_strings
        self.tags = None if config.tags is None else {name: tag.model_dump() for name, tag in config.tags.items()}
        """The form of a response as reward functions take it; None is the answer's two tags."""
        self.stop_ids = self._find_stop_ids()
        self.pad_id = self._find_pad_id()

    def _find_stop_ids(self) -> tuple[int, ...]:
        stops = list(self._config.stop_ids)
        beyond = [token for token in stops if not 0 <= token < len(self.tokenizer)]
        if beyond:
            raise ConfigError(
                f"template.stop_ids names token {beyond[0]}, but the tokenizer has {len(self.tokenizer)} tokens; "
                "take stop ids of this tokenizer"
            )
        for token in self._config.stop:
            ids = self._ids(token)
            if len(ids) != 1:
                raise ConfigError(
                    f"template.stop names {token!r}, which is not one token of this model but {len(ids)}; "
                    "name a single token"
                )
            stops += ids
        if self.tokenizer.eos_token_id is not None:
            stops.append(self.tokenizer.eos_token_id)
        if not stops:
            raise ConfigError("the tokenizer has no end-of-sequence token; name one in template.stop")
        return tuple(dict.fromkeys(stops))

    def _find_pad_id(self) -> int:
        """Return a token that ends no response, if there is one: padded text is then easier to read."""
        tokenizer = self.tokenizer
        candidates = (tokenizer.pad_token_id, tokenizer.unk_token_id, *tokenizer.all_special_ids, 0)
        usable = [token for token in candidates if token is not None and token not in self.stop_ids]
        return int(usable[0]) if usable else self.stop_ids[-1]

    @property
    def writes_turns(self) -> bool:
        """Whether a chat template puts prompts, which writes every turn of a conversation."""
        return self._config.prompt is None

    def prompt_ids(self, prompt: str) -> list[int]:
        """Return the token ids that the model is given before it answers.

        Raises:
            ConfigError: if neither the configuration nor the tokenizer says how prompts are put.
        """
        return self._ids(self.prompt_text(prompt))

    def prompt_text(self, prompt: str) -> str:
        """Return the text that the model is given before it answers, special tokens spelt out."""
        if self._config.prompt is None:
            return self.render(turns_of(prompt), for_answer=True)
        said = turns(prompt)
        if said is None:
            return self._config.prompt.replace(PLACE, prompt)
        if not is_plain(said):
            said = self.shown(said)
            prompt = conversation(said)
        whole = said[0]["content"] if len(said) == 1 else prompt.removesuffix(ASSISTANT).strip()
        return self._config.prompt.replace(PLACE, whole)

    def shown(self, messages: Sequence[Mapping[str, Any]]) -> list[Message]:
        """Return turns without those of their further keys that the model is not shown.

        A key is shown if the template writes another text without it. So a key may be shown in one turn and not in
        another, and of two keys that change the text alike one is kept.

        Args:
            messages: turns; unless the last one is the assistant's, they await the assistant.

        Raises:
            ConfigError: if there is no chat template.
            DataError: if the chat template refuses the turns, or nothing shows what a tool says.
        """
        kept = [dict(message) for message in messages]
        if is_plain(kept):
            return kept
        tools = [place for place, message in enumerate(kept) if message["role"] == TOOL]
        if not self.writes_turns:
            if tools:
                raise DataError("template.prompt is a plain text, which has no turn for a tool; take a chat template")
            return [{"role": message["role"], "content": message["content"]} for message in kept]
        for_answer = kept[-1]["role"] != "assistant"
        whole = self.render(kept, for_answer=for_answer)

        def is_written_by(fewer: Sequence[Message]) -> bool:
            try:
                return self.render(fewer, for_answer=for_answer) == whole
            except DataError:
                return False

        if any(is_written_by(kept[:place] + kept[place + 1 :]) for place in tools):
            raise DataError("the chat template does not write what a tool says; take one that does")
        for key in sorted({key for message in kept for key in further_keys(message)}):
            places = [place for place, message in enumerate(kept) if key in message]
            for some in (*([places] if len(places) > 1 else []), *([place] for place in places)):
                fewer = [_without(key, turn) if place in some else turn for place, turn in enumerate(kept)]
                if fewer != kept and is_written_by(fewer):
                    kept = fewer
        return kept

    def said(self, before: Sequence[Mapping[str, Any]], message: Mapping[str, Any]) -> Said:
        """Return the text of an assistant's message as the model is to say it.

        It is the content, if no further key of the message is shown. Else it is all that the chat template writes for
        the message: from where the prompt ends to where the turn ends.

        Args:
            before: the turns that the message answers.
            message: the assistant's.

        Raises:
            ConfigError: as `shown`.
            DataError: as `shown`.
        """
        shown = self.shown([*before, message])[-1]
        keys = tuple(further_keys(shown))
        if not keys:
            return Said(message["content"], ())
        awaited, whole = self.render(before, for_answer=True), self.render([*before, shown])
        if not whole.startswith(awaited):  # where the message begins cannot be told
            return Said(message["content"], ())
        text = whole.removeprefix(awaited)
        plain = self.render([*before, {"role": "assistant", "content": PLACE}])
        end = plain.rpartition(PLACE)[2]
        if end and text.endswith(end):
            return Said(text.removesuffix(end), keys)
        # some templates end a call of a tool with another token than an answer; what only mentions one is not cut
        ends = [token for token in self.tokenizer.convert_ids_to_tokens(list(self.stop_ids)) if token]
        stop = next((token for token in ends if text.rstrip().endswith(token)), "")
        return Said(text.rstrip().removesuffix(stop) if stop else text, keys)

    def count_tokens(self, texts: Sequence[str]) -> list[int]:
        """Return the number of tokens of each text, special tokens in it included and none added."""
        if not texts:
            return []
        return [len(ids) for ids in self.tokenizer(list(texts), add_special_tokens=False).input_ids]

    def digest(self) -> str:
        """Return what names the tokens of every prompt and response: tokenizer and configuration together."""
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        words = backend.to_str() if backend is not None else repr(sorted(self.tokenizer.get_vocab().items()))
        facts = (words, self._config.model_dump_json(), str(self._chat_template), repr(self.stop_ids))
        return hashlib.sha256("\0".join(facts).encode("utf-8", "surrogatepass")).hexdigest()

    def render(self, messages: Sequence[Mapping[str, Any]], *, for_answer: bool = False) -> str:
        """Return turns as the chat template writes them, the system turn first if the configuration has one.

        Args:
            messages: role, content and further keys of each turn.
            for_answer: end where the assistant begins to speak.

        Raises:
            ConfigError: if there is no chat template.
            DataError: if the chat template refuses the turns.
        """
        if not self._chat_template:
            raise ConfigError(
                "the tokenizer has no chat template, so nothing says how a prompt is put to this model; set "
                "template.prompt (a text around {prompt}) or template.chat_template, or take a model that has one"
            )
        system = self._config.system_message
        opened = messages
        if system is not None and (not messages or messages[0]["role"] != SYSTEM):
            opened = [{"role": SYSTEM, "content": system}, *messages]
        try:
            text: str = self.tokenizer.apply_chat_template(
                list(opened), tokenize=False, add_generation_prompt=for_answer, chat_template=self._chat_template
            )
        except RecursionError as error:
            raise DataError("a message has a key that is nested too deeply for a chat template") from error
        except (TemplateError, TypeError, KeyError, ValueError, AttributeError) as error:
            roles = ", ".join(message["role"] for message in opened)
            raise DataError(f"the chat template refuses the turns {roles}: {error}") from error
        return text

    def response_ids(self, text: str) -> list[int]:
        """Return the token ids of a response, the stop token included."""
        return [*self._ids(text), self.stop_ids[0]]

    def answer_text(self, answer: str) -> str:
        """Return the response that demonstrates an answer."""
        return f"<{self.answer_tag}>{answer}</{self.answer_tag}>"

    def decode_response(self, ids: Sequence[int], *, stop_ids: Sequence[int] = ()) -> str:
        """Return the text of a response without the stop token at its end; other special tokens are spelt out.

        A stop token that is a tag, as where generation stops at `</answer>`, is a part of the response.

        Args:
            ids: the response.
            stop_ids: tokens that may have ended it, besides the template's.
        """
        tokens = list(ids)
        tags = answer_tags(self.answer_tag) if self.tags is None else self.tags
        if tokens and tokens[-1] in {*self.stop_ids, *stop_ids} and not is_of_tag(tokens[-1], self.tokenizer, tags):
            tokens.pop()
        text: str = self.tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text

    def _ids(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer(text, add_special_tokens=False).input_ids
        return ids


def _without(key: str, message: Message) -> Message:
    return {name: value for name, value in message.items() if name != key}
