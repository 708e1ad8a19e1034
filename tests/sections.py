"""What a script prints with --json, and looking into it: shared by the tests of recorded cases."""

import json


def section_of(main, arguments, capsys):
    """The section that `main(arguments)` prints; the exit code must be the one of its level."""
    code = main([*arguments, "--json"])
    section = json.loads(capsys.readouterr().out)
    assert code == {"ok": 0, "warn": 0, "unknown": 3, "fail": 1}[section["level"]]
    return section


def finding(section, code):
    """The one finding of that code."""
    found = [one for one in section["findings"] if one["code"] == code]
    assert len(found) == 1, [one["code"] for one in section["findings"]]
    return found[0]


def codes(section):
    return {one["code"] for one in section["findings"]}


def words(section):
    """Everything that is said to people."""
    return "\n".join(" ".join([one["what"], one["why"], *one["fix"]]) for one in section["findings"])
