"""Which encoding is a file written in?"""

from __future__ import annotations

import codecs
import re


def detect_encoding(head: bytes, complete: bool = True) -> str:
    """Python's name of the encoding of `head`. `complete`: it is the whole file, so not cut inside a letter."""
    for mark, name in (
        (codecs.BOM_UTF8, "utf-8-sig"),
        (codecs.BOM_UTF32_LE, "utf-32"),
        (codecs.BOM_UTF32_BE, "utf-32"),
        (codecs.BOM_UTF16_LE, "utf-16"),
        (codecs.BOM_UTF16_BE, "utf-16"),
    ):
        if head.startswith(mark):
            return name
    # JSON and CSV begin with ASCII letters, whose other bytes are NUL in the wide encodings (RFC 4627, section 3).
    zeros_first = tuple(byte == 0 for byte in head[:4])
    for pattern, name in (
        ((False, True, True, True), "utf-32-le"),
        ((True, True, True, False), "utf-32-be"),
        ((False, True, False, True), "utf-16-le"),
        ((True, False, True, False), "utf-16-be"),
    ):
        whole = head[: len(head) // 4 * 4 - 4] or head
        if zeros_first == pattern and _decodes(whole, name):
            return name
    sample = head[:4096]
    if len(sample) >= 4 and sample.count(0) > len(sample) // 4:
        zeros = [sample[offset::4].count(0) * 4 / len(sample) for offset in range(4)]
        if zeros[1] > 0.5 and zeros[2] > 0.5 and zeros[3] > 0.5 and zeros[0] < 0.2:
            return "utf-32-le"
        if zeros[0] > 0.5 and zeros[1] > 0.5 and zeros[2] > 0.5 and zeros[3] < 0.2:
            return "utf-32-be"
        if zeros[1] > 0.3 and zeros[3] > 0.3 and zeros[0] < 0.2:
            return "utf-16-le"
        if zeros[0] > 0.3 and zeros[2] > 0.3 and zeros[1] < 0.2:
            return "utf-16-be"
    try:
        head.decode("utf-8")
        return "utf-8"
    except UnicodeDecodeError as error:
        if not complete and error.start > len(head) - 4:
            return "utf-8"
        # Some valid multi-byte letters before the first bad byte: UTF-8 with damage, not another encoding.
        if not head[: error.start].isascii():
            return "utf-8"
    # Judge by the lines that are not ASCII; a file with one damaged line and much healthy UTF-8 stays UTF-8.
    foreign = [line for line in head.split(b"\n")[: None if complete else -1] if not line.isascii()]
    healthy = sum(1 for line in foreign if _decodes(line, "utf-8"))
    if healthy * 2 > len(foreign):
        return "utf-8"
    return guess_encoding(b"\n".join(foreign)) or "utf-8"


def _decodes(data: bytes, encoding: str) -> bool:
    try:
        data.decode(encoding)
    except (UnicodeDecodeError, LookupError):
        return False
    return True


# Letters that make up most of ordinary text in each encoding; a wrong decoding lands on rare ones instead.
_COMMON = {
    "gb18030": re.compile(
        "[\u7684\u4e00\u662f\u4e0d\u4e86\u5728\u4eba\u6709\u6211\u4ed6\u8fd9\u4e2a\u4eec\u4e2d\u6765\u4e0a\u5927\u4e3a"
        "\u548c\u56fd\u5730\u5230\u4ee5\u8bf4\u65f6\u8981\u5c31\u51fa\u4f1a\u53ef\u4e5f\u4f60\u5bf9\u751f\u80fd\u800c"
        "\u5b50\u90a3\u5f97\u4e8e\u7740\u4e0b\u81ea\u4e4b\u5e74\u8fc7\u53d1\u540e\u4f5c\u91cc\u7528\u9053\u884c\u6240"
        "\u7136\u5bb6\u79cd\u4e8b\u6210\u65b9\u591a\u7ecf\u4e48\u53bb\u6cd5\u5b66\u5982\u90fd\u540c\u73b0\u5f53\u6ca1"
        "\u52a8\u9762\u8d77\u770b\u5b9a\u5929\u5206\u8fd8\u8fdb\u597d\u5c0f\u90e8\u5176\u4e9b\u4e3b\u6837\u7406\u5fc3"
        "\u5979\u672c\u524d\u5f00\u4f46\u56e0\u53ea\u4ece\u60f3\u5b9e\u65e5\u519b\u8005\u610f\u65e0\u529b\u5b83\u4e0e"
        "\u957f\u628a\u673a\u5341\u6c11\u7b2c\u516c\u6b64\u5df2\u5de5\u4f7f\u60c5\u660e\u6027\u77e5\u5168\u4e09\u53c8"
        "\u5173\u70b9\u6b63\u4e1a\u5916\u5c06\u4e24\u9ad8\u95f4\u7531\u95ee\u5f88\u6700\u91cd\u5e76\u7269\u624b\u5e94"
        "\u6218\u5411\u5934\u6587\u4f53\u653f\u7f8e\u76f8\u89c1\u88ab\u5229\u4ec0\u4e8c\u7b49\u4ea7\u6216\u65b0\u5df1"
        "\u5236\u8eab\u679c\u52a0\u897f\u65af\u6708\u8bdd\u5408\u56de\u7279\u4ee3\u5185\u4fe1\u8868\u5316\u8001\u7ed9"
        "\u4e16\u4f4d\u6b21\u5ea6\u95e8\u4efb\u5e38\u5148\u6d77\u901a\u6559\u513f\u539f\u4e1c\u58f0\u63d0\u7acb\u53ca"
        "\u8bf7\u6570\u636e\u56de\u7b54\u95ee\u9898\u4f8b\u5b57\u8bed\u53e5\u5199\u8bd1\u8bd7\uff0c\u3002\uff1f\u3001"
        "\u60a8\u5417\u5462\u5427\u6bcf\u6c34\u706b\u5c71\u82f1\u4eac\u5317\u5357\u57ce\u5e02\u5929\u6c14\u4eca\u660e]"
    ),
    "big5": re.compile(
        "[\u7684\u4e00\u662f\u4e0d\u4e86\u5728\u4eba\u6709\u6211\u4ed6\u9019\u500b\u5011\u4e2d\u4f86\u4e0a\u5927\u70ba"
        "\u548c\u570b\u5230\u4ee5\u8aaa\u6642\u8981\u5c31\u51fa\u6703\u53ef\u4e5f\u4f60\u5c0d\u80fd\u5f97\u65bc\u8457"
        "\u5f8c\u904e\u767c\u554f\u984c\u5b78\u73fe\u7576\u6c92\u52d5\u9762\u8d77\u770b\u9084\u9032\u597d\u9ebc\u6a23"
        "\u60f3\u958b\u95dc\u9ede\u9ad8\u9593\u7531\u5f88\u8acb\u5929\u6c23\uff0c\u3002\uff1f\u3001]"
    ),
    "shift_jis": re.compile("[\u3041-\u3096\u30a1-\u30fc\u3001\u3002]"),
    "euc_jp": re.compile("[\u3041-\u3096\u30a1-\u30fc\u3001\u3002]"),
    "euc_kr": re.compile("[\uac00-\ud7a3]"),
    "windows-1251": re.compile("[\u0430-\u044f]"),
    "koi8-r": re.compile("[\u0430-\u044f]"),
    "windows-1252": re.compile(
        "[\u00e0-\u00f6\u00f8-\u00fd\u00c4\u00d6\u00dc\u00c9\u2019\u201c\u201d\u2013\u2014\u20ac\u00b0\u00ab\u00bb]"
    ),
    "windows-1250": re.compile(
        "[\u0105\u0107\u0119\u0142\u0144\u00f3\u015b\u017a\u017c\u0161\u010d\u0159\u017e\u00fd\u00e1\u00ed\u00e9\u016f"
        "\u011b]"
    ),
}  # fmt: skip


def guess_encoding(data: bytes) -> str | None:
    """The most plausible encoding of bytes that are not UTF-8, by how common the resulting letters are; None when
    nothing fits. A guess: the caller says so."""
    best, best_score = None, 0.0
    for encoding, common in _COMMON.items():
        if not _decodes(data, encoding):
            continue
        foreign = [character for character in data.decode(encoding) if not character.isascii()]
        if not foreign:
            continue
        text = "".join(foreign)
        score = len(common.findall(text)) / len(foreign)
        if encoding.startswith(("windows-125", "koi8")):
            score *= _plausible_words(data.decode(encoding), encoding)
        if score > best_score:
            best, best_score = encoding, score
    return best if best_score >= 0.12 else None


def _plausible_words(text: str, encoding: str) -> float:
    """The share of foreign letters in words that look right: Cyrillic words hold no ASCII letters, while accents stand
    singly among ASCII letters."""
    words = [word for word in re.findall(r"[^\W\d_]+", text) if not word.isascii()]
    cyrillic = encoding in ("windows-1251", "koi8-r")
    right = 0
    for word in words:
        foreign = sum(not character.isascii() for character in word)
        if cyrillic:
            right += foreign == len(word) and word[1:].islower()
        else:
            right += foreign <= 1 + len(word) // 3
    return right / len(words) if words else 0.5
