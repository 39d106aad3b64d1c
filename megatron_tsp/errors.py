"""The error that a user's own command line or configuration causes."""


class TSPError(ValueError):
    """What was asked for cannot be run; the message says which flag, and what to do instead.

    The entries print it as one message, without a traceback, and exit with code 2.
    """
