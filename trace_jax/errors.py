"""The error of bad input: what the user gave cannot be used, and one line says where and what to do."""


class InputError(Exception):
    """A flag, config or input file that cannot be used. The message is one line that names the file or field and the fix; exit code 2."""
