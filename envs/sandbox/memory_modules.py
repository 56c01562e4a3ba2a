"""Modules and a program from text, inside a worker that can open no file.

The host starts a process for one program alone (`envs.sandbox.programs`). Its files are modules as if they lay beside a script: `a/b.py` is
`a.b`, a folder without `__init__.py` is a namespace package, and a file hides a module of the standard library that has its name. The
standard library alone is used: the worker loads this file by its path.
"""

import linecache
import sys
import traceback
import types
from importlib.abc import SourceLoader
from importlib.machinery import ModuleSpec

CODE = "<program>"
FRAMES = 6  # of a traceback, the innermost ones
MESSAGE = 2000  # characters of a message, the last ones


class Files(SourceLoader):
    """A finder and loader of modules in `files`, {path: text}."""

    def __init__(self, files):
        self.files = files
        for path, text in {**files}.items():
            linecache.cache[path] = (len(text), None, text.splitlines(True), path)
        for name in list(sys.modules):
            if self._path(name.partition(".")[0]):
                del sys.modules[name]

    def find_spec(self, name, path=None, target=None):
        found = self._path(name)
        if found is None:
            return None
        if found.endswith("/"):
            spec = ModuleSpec(name, None, is_package=True)
        else:
            spec = ModuleSpec(name, self, origin=found, is_package=found.endswith("/__init__.py"))
            spec.has_location = True
        if spec.submodule_search_locations is not None:
            spec.submodule_search_locations.append(name.replace(".", "/"))
        return spec

    def get_filename(self, name):
        return self._path(name)

    def get_data(self, path):
        if path not in self.files:
            raise FileNotFoundError(path)
        return self.files[path].encode()

    def _path(self, name):
        """The file of a module, its folder with a slash, or None."""
        folder = name.replace(".", "/")
        for path in (f"{folder}/__init__.py", f"{folder}.py"):
            if path in self.files:
                return path
        return f"{folder}/" if any(path.startswith(f"{folder}/") and path.endswith(".py") for path in self.files) else None


def run(files, code):
    """Runs `code` among `files`.

    Returns:
      [what it left in `result`, None], or [None, the end of the traceback, without frames that are not the program's].
    """
    sys.meta_path.insert(0, Files(files))
    linecache.cache[CODE] = (len(code), None, code.splitlines(True), CODE)
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    main.FILES = files
    try:
        exec(compile(code, CODE, "exec", dont_inherit=True), main.__dict__)
    except BaseException as error:  # SystemExit too: it is the program's result
        own = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == CODE or frame.filename in files]
        lines = traceback.format_list(own[-FRAMES:]) + traceback.format_exception_only(error)
        return [None, "".join(lines)[-MESSAGE:]]
    return [main.__dict__.get("result"), None]
