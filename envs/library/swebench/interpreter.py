"""Python inside the episode: the scripts and tests that an agent runs are interpreted, never executed.

An agent that repairs code runs it. The locked workers of `programs()` judge an edit when the episode is over; what the agent wants to see
before that is computed here, from the syntax tree, with the values and methods of a short list of harmless types. Nothing that a program
can name leads to this process: attributes that begin with an underscore exist only on the program's own classes, every callable is one
of `BUILTINS`, a listed method, or the program's own, and steps, sizes and depths are bounded. What is left out (async, metaclasses, most
of the standard library) ends with a message that says so. The verdict never comes from here, so a difference from CPython costs nobody
a reward.
"""

import ast
import functools
import operator


@functools.lru_cache(maxsize=64)
def parsed(source, path):
    """The syntax tree of a file; shared, since nothing changes it. Raises: SyntaxError, ValueError, RecursionError."""
    return ast.parse(source, path)


class Python(Statements, Expressions):
    """One run of a program over a tree `{absolute path: text}`, which `open` reads and writes."""

    def __init__(self, tree, cwd=ROOT, argv=(), steps=MAX_STEPS):
        self.tree, self.cwd, self.steps = tree, cwd, steps
        self.modules, self.frames, self.failed, self.trace, self.printed, self.out = {}, [], None, [], 0, []
        self.detail, self.handled = None, None
        self.table = {cls: getattr(self, name) for name, cls in vars(ast).items() if isinstance(cls, type) and hasattr(self, name)}
        self.system = {"argv": list(argv), "path": [cwd], "exit": self.leave, "version": "3.11", "stdout": None, "stderr": None}
        self.native = NATIVE_MODULES | {
            "sys": self.system,
            "os": {
                "path": NativeModule("os.path", PATHS | {"abspath": self.absolute, "exists": self.exists}),
                "getcwd": lambda: cwd,
                "environ": {},
            },
            "re": REGULAR,
            "pytest": {"raises": Raises},
            "pathlib": {"Path": lambda text=".": Path(self, text)},
        }
        self.builtins = {
            "open": self.open,
            "print": self.print,
            "getattr": self.getattr,
            "hasattr": lambda value, name: self.getattr(value, name, self) is not self,
            "setattr": lambda value, name, new: self.set_attribute(value, name, new),
            "super": None,
            "staticmethod": lambda f: self.kind(f, "static"),
            "classmethod": lambda f: self.kind(f, "class"),
            "property": lambda f: self.kind(f, "property"),
        }

    # What programs call
    def leave(self, code=0):
        raise Exit(code if isinstance(code, int) else 0 if code is None else 1)

    def absolute(self, path):
        return normal(path if path.startswith("/") else f"{self.cwd}/{path}")

    def exists(self, path):
        path = self.absolute(path)
        return path in self.tree or any(other.startswith(f"{path}/") for other in self.tree)

    def open(self, path, mode="r", encoding=None, newline=None):
        path = path.path if isinstance(path, Path) else path
        if not isinstance(path, str) or not isinstance(mode, str) or "b" in mode or "+" in mode:
            raise Unsupported("open() of text files for reading, writing or appending is all that is emulated")
        return File(self.tree, self.absolute(path), mode.replace("t", ""))

    def print(self, *values, sep=" ", end="\n", file=None, flush=False):
        text = (" " if sep is None else sep).join(map(str, bulk(values))) + ("\n" if end is None else end)
        if isinstance(file, File):
            file.write(text)
            return
        self.printed += len(text)
        if self.printed > MAX_SIZE:
            raise Unsupported("the program prints more than the sandbox allows")
        self.out.append(text)

    def getattr(self, value, name, *default):
        try:
            return self.attribute(value, name)
        except AttributeError:
            if default:
                return default[0]
            raise

    @staticmethod
    def kind(function, kind):
        function.kind = kind
        return function

    # Running
    def run_module(self, name, path, source):
        """Executes a file as a module; its variables are in `.env.vars`."""
        module = Module(name, path)
        self.modules[name] = module
        self.execute_in("<module>", parsed(source, path).body, module.env)
        return module

    def execute_in(self, name, body, env):
        if len(self.frames) > 60:
            raise RecursionError("maximum recursion depth exceeded")
        frame = [env.module.path, 0, name]
        self.frames.append(frame)
        try:
            self.block(body, env)
        except (_Break, _Continue):
            raise SyntaxError("'break' or 'continue' outside a loop") from None
        except _Return:
            if name != "<module>":
                raise
            raise SyntaxError("'return' outside function") from None
        except Exception as error:
            if self.failed is not error:
                self.failed, self.trace = error, [list(entry) for entry in self.frames]
            raise
        finally:
            self.frames.pop()

    def import_module(self, name):
        """A module of the tree, looked for from the working directory and sys.path, or one of the few native ones (a dict)."""
        if name in self.modules:
            return self.modules[name]
        if name in self.native:
            return self.native[name]
        parent = name.rpartition(".")[0]
        if parent:
            self.import_module(parent)
        for base in [self.cwd, *(self.absolute(str(entry)) for entry in self.system["path"]), ROOT]:
            for path in (f"{base}/{name.replace('.', '/')}.py", f"{base}/{name.replace('.', '/')}/__init__.py"):
                if path in self.tree:
                    module = self.run_module(name, path, self.tree[path])
                    if parent and isinstance(self.modules.get(parent), Module):
                        self.modules[parent].env.vars[name.rpartition(".")[2]] = module
                    return module
        if any(path.startswith(f"{ROOT}/{name.replace('.', '/')}/") for path in self.tree):
            self.modules[name] = Module(name, ROOT)
            return self.modules[name]
        if name.split(".")[0] in STANDARD:
            raise Unsupported(f"the module {name} is not emulated")
        raise ModuleNotFoundError(f"No module named {name!r}")

    def block(self, body, env):
        for node in body:
            self.frames[-1][1] = node.lineno
            self.evaluate(node, env)

    def evaluate(self, node, env):
        self.steps -= 1
        if self.steps < 0:
            raise Unsupported("the program takes more steps than the sandbox allows")
        method = self.table.get(type(node))
        if method is None:
            raise Unsupported(f"line {getattr(node, 'lineno', '?')}: {type(node).__name__} is not emulated")
        return method(node, env)

    def call_function(self, function, args, kwargs):
        node, env = function.node, Env(function.env.module, function.env)
        self.bind(function, args, kwargs, env.vars)
        if isinstance(node, ast.Lambda):
            return self.evaluate(node.body, env)
        if function.owner is not None:
            env.vars["__class__"] = function.owner
        if function.generator:
            env.yields = []
        result = None
        try:
            self.execute_in(function.name, node.body, env)
        except _Return as back:
            result = back.args[0]
        return iter(env.yields) if function.generator else result

    def bind(self, function, args, kwargs, variables):
        spec, name = function.node.args, function.name
        names = [a.arg for a in spec.posonlyargs + spec.args]
        kwargs = dict(kwargs)
        if len(args) > len(names) and spec.vararg is None:
            raise TypeError(f"{name}() takes {len(names)} positional arguments but {len(args)} were given")
        variables.update(zip(names, args, strict=False))
        for key in names[: len(args)]:
            if key in kwargs:
                raise TypeError(f"{name}() got multiple values for argument {key!r}")
        defaults = dict(zip(names[len(names) - len(function.defaults) :], function.defaults, strict=True)) | function.kw_defaults
        missing = []
        for key in names[len(args) :] + [a.arg for a in spec.kwonlyargs]:
            if key in kwargs:
                variables[key] = kwargs.pop(key)
            elif key in defaults:
                variables[key] = defaults[key]
            else:
                missing.append(key)
        if missing:
            listed = " and ".join(map(repr, missing))
            raise TypeError(f"{name}() missing {len(missing)} required positional argument{'s' * (len(missing) > 1)}: {listed}")
        if spec.vararg:
            variables[spec.vararg.arg] = tuple(args[len(names) :])
        if spec.kwarg:
            variables[spec.kwarg.arg] = kwargs
        elif kwargs:
            raise TypeError(f"{name}() got an unexpected keyword argument {next(iter(kwargs))!r}")

    # Attributes
    def attribute(self, value, name):
        if isinstance(value, Instance):
            if name in value.fields:
                return value.fields[name]
            if name == "__class__":
                return value.cls
            if name == "__dict__":
                return value.fields
            found = value.cls.find(name)
            if isinstance(found, Function):
                if found.kind == "property":
                    return found(value)
                return found if found.kind == "static" else Method(found, value.cls if found.kind == "class" else value)
            if found is not None:
                return found
        elif isinstance(value, Class):
            found = value.find(name)
            if found is not None:
                return Method(found, value) if isinstance(found, Function) and found.kind == "class" else found
            if name == "__name__":
                return value.name
        elif isinstance(value, Module):
            if name in value.env.vars:
                return value.env.vars[name]
            raise AttributeError(f"module {value.name!r} has no attribute {name!r}")
        elif isinstance(value, Super):
            return value.attribute(name)
        elif isinstance(value, Function) and name == "__name__":
            return value.name
        elif isinstance(value, NativeModule):
            if name in value.names:
                return value.names[name]
            raise Unsupported(f"{value.name}.{name} is not emulated")
        elif isinstance(value, type) and value in METHODS:
            if name == "__name__":
                return value.__name__
            if name in METHODS[value] and name not in LEFT_OUT | WIDE | {"format", "join", "replace"}:
                return getattr(value, name)
        elif isinstance(value, Exception):
            if name == "args":
                return value.args
        elif type(value) in NATIVE_ATTRIBUTES:
            if name in NATIVE_ATTRIBUTES[type(value)]:
                return getattr(value, name)
        elif name in METHODS.get(type(value), ()):
            self.weighed(value)
            if name in LEFT_OUT:
                raise Unsupported(f"{type(value).__name__}.{name} is not emulated")
            if name == "format" and isinstance(value, str):
                if value.count("{") > 100:
                    raise MemoryError("this format is more than the sandbox allows")
                return lambda *args, **kwargs: _Formatter().vformat(value, args, kwargs)
            if name in ("join", "replace") and isinstance(value, str):
                return grown(value, name)
            return bounded(getattr(value, name)) if name in WIDE else getattr(value, name)
        raise AttributeError(
            f"{(value.cls.name if isinstance(value, Instance) else type(value).__name__)!r} object has no attribute {name!r}"
        )

    def set_attribute(self, value, name, new):
        if isinstance(value, Instance):
            value.fields[name] = new
        elif isinstance(value, Class):
            value.namespace[name] = new
        elif isinstance(value, Module):
            value.env.vars[name] = new
        else:
            raise AttributeError(f"{type(value).__name__!r} object has no attribute {name!r}")


def normal(path):
    """An absolute path without `.`, `..` and double slashes."""
    parts = []
    for part in path.split("/"):
        if part == "..":
            parts = parts[:-1]
        elif part not in ("", "."):
            parts.append(part)
    return "/" + "/".join(parts)


def traceback(python, error):
    """The text that CPython would print, without the carets."""
    lines = ["Traceback (most recent call last):"]
    for path, number, name in python.trace if python.failed is error else []:
        lines.append(f'  File "{path}", line {number}, in {name}')
        source = python.tree.get(path, "").split("\n")
        if 0 < number <= len(source) and source[number - 1].strip():
            lines.append(f"    {source[number - 1].strip()}")
    return "\n".join([*lines, describe(error)])


def describe(error):
    name = error.value.cls.name if isinstance(error, Thrown) else type(error).__name__
    text = str(error)
    return f"{name}: {text}" if text else name


def run_script(tree, source, path, cwd, argv, steps):
    """Runs a program: (what it prints, exit status, steps that are left). The tree is changed by the files that it writes."""
    python, code, end = Python(tree, cwd, argv, steps), 0, ""
    try:
        python.run_module("__main__", path, source)
    except Exit as leave:
        code = leave.args[0] & 255
    except Unsupported as limit:
        code, end = 1, f"python: {limit} (scripts are emulated here; submit to have the change judged)\n"
    except SyntaxError as error:
        code, end = 1, f'  File "{path}", line {error.lineno or 1}\n    {(error.text or "").strip()}\n{type(error).__name__}: {error.msg}\n'
    except Exception as error:  # whatever the program raises is the program's
        code, end = 1, traceback(python, error) + "\n"
    return "".join(python.out) + end, code, python.steps
