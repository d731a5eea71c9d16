"""The two errors that a user of the command line can cause or meet."""


class InputError(ValueError):
    """Something the user gave cannot be used. The message is one line: what is wrong and what to do.

    The command line prints it without a traceback and exits with code 2, before any expensive work.
    """


class RewardError(RuntimeError):
    """A reward failed or broke its contract (wrong count, NaN, infinity). It never becomes a reward of 0."""
