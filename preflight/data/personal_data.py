"""Does a text hold what looks like personal data or a secret? Looks only for forms that can be checked."""

from __future__ import annotations

import re

_EMAIL = re.compile(r"[A-Za-z0-9._%+-]{1,64}@[A-Za-z0-9-]{1,63}(?:\.[A-Za-z0-9-]{1,63})*\.[A-Za-z]{2,24}\b")
_DIGITS = re.compile(r"(?<![\w.])\+?\(?[0-9](?:[ ().-]{0,2}[0-9]){8,18}(?![\w])")
_IBAN = re.compile(r"\b[A-Z]{2}\d{2}(?: ?[A-Z0-9]{4}){3,7}(?: ?[A-Z0-9]{1,3})?\b")
_SSN = re.compile(r"(?<![\w-])(?!000|666|9\d\d)\d{3}-(?!00)\d{2}-(?!0000)\d{4}(?![\w-])")
_IP = re.compile(r"(?<![\w.])(?:\d{1,3}\.){3}\d{1,3}(?![\w.])")
_SECRET = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{20,}|sk-[A-Za-z0-9_-]{20,}|gh[pousr]_[A-Za-z0-9]{20,}|AKIA[0-9A-Z]{16}|AIza[0-9A-Za-z_-]{30,}"
    r"|xox[abpr]-[A-Za-z0-9-]{10,})|-----BEGIN (?:[A-Z]+ )?PRIVATE KEY-----"
)
_ANY_DIGITS = re.compile(r"[0-9][0-9 .()-]{7}")
KINDS = ("email", "phone", "payment_card", "iban", "us_social_security", "ip_address", "secret")


def personal_data(text: str) -> set[str]:
    """Which KINDS of personal data the text seems to hold. Card numbers and IBANs must pass their check digits."""
    found: set[str] = set()
    if "@" in text and _EMAIL.search(text):
        found.add("email")
    if ("_" in text or "-" in text or "AKIA" in text or "AIza" in text) and _SECRET.search(text):
        found.add("secret")
    if not _ANY_DIGITS.search(text):
        return found
    if _SSN.search(text):
        found.add("us_social_security")
    if "." in text and any(_is_public_address(match.group()) for match in _IP.finditer(text)):
        found.add("ip_address")
    if any(_is_iban(match.group()) for match in _IBAN.finditer(text)):
        found.add("iban")
    for match in _DIGITS.finditer(text):
        written = match.group()
        digits = re.sub(r"\D", "", written)
        if 13 <= len(digits) <= 19 and digits[0] in "3456" and _passes_luhn(digits):
            found.add("payment_card")
        elif len(digits) <= 15 and not _SSN.search(written) and (written.startswith("+") or _looks_like_phone(written)):
            found.add("phone")
    return found


def _looks_like_phone(written: str) -> bool:
    """Grouped as telephone numbers are; a bare run of digits may be any number."""
    groups = re.findall(r"\d+", written)
    return (
        len(groups) >= 3
        and all(2 <= len(group) <= 5 for group in groups)
        and not re.fullmatch(r"(?:19|20)\d\d[-. ]\d\d[-. ]\d\d.*", written)
    )


def _passes_luhn(digits: str) -> bool:
    total = 0
    for index, digit in enumerate(reversed(digits)):
        value = int(digit) * (2 if index % 2 else 1)
        total += value - 9 if value > 9 else value
    return total % 10 == 0 and len(set(digits)) > 1


def _is_iban(written: str) -> bool:
    text = written.replace(" ", "")
    if not 15 <= len(text) <= 34:
        return False
    moved = text[4:] + text[:4]
    return int("".join(str(int(character, 36)) for character in moved)) % 97 == 1


def _is_public_address(written: str) -> bool:
    parts = [int(part) for part in written.split(".")]
    if any(part > 255 for part in parts) or parts[0] in (0, 10, 127) or parts[0] >= 224:
        return False
    return not (parts[:2] == [192, 168] or (parts[0] == 172 and 16 <= parts[1] <= 31))
