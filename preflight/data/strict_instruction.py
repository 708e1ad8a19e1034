"""The instruction that asks for JSON and nothing else, put into a conversation once."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

OPENING = "Answer with one JSON value and nothing else: no code fence, no explanation, no text before or after it."
_INLINE = "It must be valid against this JSON Schema:"
_BY_NAME = "It must be valid against the JSON Schema"


@dataclass(frozen=True)
class StrictInstruction:
    """The text and where it goes. `turn`: "system" or "user" (the first user turn)."""

    text: str
    turn: str = "system"

    def add_to(self, messages: list[dict[str, Any]]) -> bool:
        """Put the instruction in; False when it is there already (or an earlier one was brought up to date).

        Only text turns of role system or user are touched: never a tool's result, never an answer.
        """
        for message in messages:
            content = message.get("content")
            if message.get("role") in ("system", "user") and isinstance(content, str) and OPENING in content:
                before, _, after = content.partition(OPENING)
                ending = after.partition("\n\n")[2] if "\n\n" in after else ""
                renewed = "\n\n".join(part for part in (before.rstrip(), self.text, ending.strip()) if part)
                changed = renewed != content
                message["content"] = renewed
                return changed
        if self.turn == "user":
            for message in messages:
                if message.get("role") == "user":
                    return self._append(message)
            return False
        if messages and messages[0].get("role") == "system":
            return self._append(messages[0])
        messages.insert(0, {"role": "system", "content": self.text})
        return True

    def _append(self, message: dict[str, Any]) -> bool:
        content = message.get("content")
        if isinstance(content, list):  # text beside images
            message["content"] = [*content, {"type": "text", "text": self.text}]
            return True
        message["content"] = f"{content.rstrip()}\n\n{self.text}" if content else self.text
        return True


def strict_instruction(schema: Any, turn: str = "system", by_name: str | None = None) -> StrictInstruction:
    """The instruction for a schema: the schema written out on one line, or (`by_name`) only named."""
    if by_name is not None:
        return StrictInstruction(f'{OPENING} {_BY_NAME} "{by_name}".', turn)
    written = json.dumps(schema, ensure_ascii=False, separators=(",", ":"))
    return StrictInstruction(f"{OPENING} {_INLINE}\n{written}", turn)
