"""The two errors that are not a fault of this program. Each message is one line that says where and what to do."""


class InputError(Exception):
    """A flag, config or input file that cannot be used. The message names the file or field and the fix; exit code 2."""


class Unfinished(Exception):
    """Not all that was asked for could be done, though nothing is wrong here: a model gave no answer, an environment never passed.

    What was done is saved; the message names what is missing and how to go on; exit code 1.
    """
