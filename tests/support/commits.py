"""Gives an engine another commit: one that fails, or is interrupted."""


class Commits:
    """An engine with a commit of its own."""

    def __init__(self, engine, commit):
        self.engine = engine
        self.commit = commit

    def __getattr__(self, name):
        return getattr(self.engine, name)
