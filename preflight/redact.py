"""Takes out of a text what identifies a person or a machine, because reports and recordings get pasted."""

from __future__ import annotations

import os
import re
import socket
from functools import lru_cache
from typing import Any

_UUID = r"[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{12}"

# (pattern, replacement), applied in this order.
_RULES: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        # secrets
        (r"\bhf_[A-Za-z0-9]{16,}", "<token>"),
        (r"\b(?:sk|pk|rk)-[A-Za-z0-9_-]{16,}", "<token>"),
        (r"\b(?:gh[pousr]_[A-Za-z0-9]{20,}|github_pat_[A-Za-z0-9_]{20,}|glpat-[A-Za-z0-9_-]{16,})", "<token>"),
        (r"\bpypi-[A-Za-z0-9_-]{16,}", "<token>"),
        (r"\bAKIA[0-9A-Z]{16}\b", "<token>"),
        (r"\bAIza[0-9A-Za-z_-]{30,}", "<token>"),
        (r"\beyJ[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]+", "<token>"),
        (r"(?i)\b(bearer|basic)\s+[A-Za-z0-9._~+/=-]{12,}", r"\1 <token>"),
        (r"\b([A-Z0-9_]*(?:TOKEN|SECRET|PASSWORD|PASSWD|API_KEY|ACCESS_KEY))=([^\s\"']+)", r"\1=<token>"),
        (
            r"(?i)\b((?:api[_-]?key|access[_-]?token|auth[_-]?token|client[_-]?secret|password|passwd)[\"']?\s*[=:]\s*"
            r"[\"']?)[^\s\"',}]{6,}",
            r"\1<token>",
        ),
        (r"(?<=://)[^/\s:@]+:[^/\s@]+@", "<token>@"),
        (r"(?<=://)[A-Za-z0-9_-]{16,}@", "<token>@"),
        # GPU and machine identities
        (rf"\bMIG-GPU-{_UUID}", "MIG-GPU-<uuid>"),
        (rf"\b(GPU|MIG)-{_UUID}", r"\1-<uuid>"),
        (rf"\b{_UUID}\b", "<uuid>"),
        (r"(<(?:serial|uuid|board_serial)>)(?!N/A)[^<]+(</)", r"\1<redacted>\2"),
        (
            r"(?i)(\b(?:serial(?:[ _]?(?:number|no\.?))?|machine[_ ]id|boot[_ ]id)\"?[ \t]*[:=][ \t]*\"?)"
            r"(?!N/A|\[N/A|None|unknown)[A-Za-z0-9-]{4,}",
            r"\1<serial>",
        ),
        (r"\b0x[0-9a-fA-F]{16}\b", "<unique-id>"),
        (r"\b(?:[0-9a-fA-F]{2}:){5}[0-9a-fA-F]{2}\b", "<mac>"),
        # people
        (r"(?<![\w.])/(home|Users)/(?!<user>)[^/\s\"':;,)\]}>]+", r"/\1/<user>"),
        (r"(?i)\b([A-Z]:\\+Users\\+)(?!<user>)[^\\\s\"':;,)\]}>]+", r"\1<user>"),
        (r"(?<![\w./-])/root(?=/|\b)(?![\w-])", "~"),
        (r"\b[A-Za-z0-9._%+-]+@[A-Za-z0-9-]+(?:\.[A-Za-z0-9-]+)*\.[A-Za-z]{2,}\b", "<email>"),
    )
)
_UNAME = re.compile(r"(?m)^((?:Linux|Darwin|FreeBSD) )(\S+)( \d+\.\S+ )")
_JOURNAL_HOST = re.compile(r"(?m)^([A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d )(?!kernel:)(\S+)( \S+?:)")


@lru_cache(maxsize=1)
def _names_of_this_machine() -> tuple[tuple[re.Pattern[str], str], ...]:
    rules: list[tuple[re.Pattern[str], str]] = []
    home = os.path.expanduser("~")
    if len(home) > 4:
        rules.append((re.compile(re.escape(home) + r"(?![\w-])"), "~"))
    try:
        host = socket.gethostname()
    except OSError:
        host = ""
    # A host name that is also an ordinary word ("python", "gpu") cannot be replaced without spoiling sentences.
    if len(host) >= 5 and re.search(r"[\d.-]", host):
        rules.append((re.compile(rf"(?<![\w.-]){re.escape(host)}(?![\w-])"), "<host>"))
    user = os.environ.get("USER") or os.environ.get("USERNAME") or ""
    if user:
        rules.append((re.compile(rf"(?<![\w.-]){re.escape(user)}@[\w.-]+"), "<user>@<host>"))
    return tuple(rules)


def redact(text: str) -> str:
    """The text without UUIDs, serials, host and user names, home paths, e-mail addresses and secrets."""
    for pattern, replacement in (*_names_of_this_machine(), *_RULES):
        text = pattern.sub(replacement, text)
    text = _UNAME.sub(r"\1<host>\3", text)
    return _JOURNAL_HOST.sub(r"\1<host>\3", text)


def redacted(value: Any) -> Any:
    """The same JSON value with every string in it (keys included) redacted, and NaN or infinity turned into None."""
    if isinstance(value, str):  # half a surrogate pair (JSON can hold one) cannot be written as UTF-8
        return redact(value).encode("utf-8", "replace").decode("utf-8")
    if isinstance(value, dict):
        return {redact(str(key)): redacted(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [redacted(item) for item in value]
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return None
    return value
