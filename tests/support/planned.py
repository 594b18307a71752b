"""Asks `memascend plan`."""

import json

from memascend.cli import main


def told(capsys, *words, status=0):
    assert main(["plan", *map(str, words), "--json"]) == status
    return json.loads(capsys.readouterr().out)


def shown(capsys, *words, status=0):
    """All that it prints."""
    assert main(["plan", *map(str, words)]) == status
    return "".join(capsys.readouterr())
