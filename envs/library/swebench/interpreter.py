"""Python inside the episode: the scripts and tests that an agent runs are interpreted, never executed.

An agent that repairs code runs it. The locked workers of `programs()` judge an edit when the episode is over; what the agent wants to see
before that is computed here, from the syntax tree, with the values and methods of a short list of harmless types. Nothing that a program
can name leads to this process: attributes that begin with an underscore exist only on the program's own classes, every callable is one of
`BUILTINS`, a listed method, or the program's own, and steps, sizes and depths are bounded. What is left out (async, metaclasses, most of
the standard library) ends with a message that says so. The verdict never comes from here, so a difference from CPython costs nobody a reward.
"""

import ast
import collections
import datetime
import functools
import math
import operator
import string

MAX_STEPS = 300_000  # about a second; the tests of a package need some thousands
MAX_SIZE = 200_000  # characters or items of one value
MAX_BITS = 4_000
ROOT = "/testbed"


class Unsupported(BaseException):
    """The program needs something that is not emulated; no `except` of the program may catch it."""


class Exit(BaseException):
    """sys.exit(code)."""


class Thrown(Exception):
    """An exception whose class the program defined itself; `value` is the instance."""

    def __init__(self, value):
        super().__init__(str(value))
        self.value = value


class _Return(BaseException):
    pass


class _Break(BaseException):
    pass


class _Continue(BaseException):
    pass


class Env:
    """Variables of a module, class body, function call or comprehension."""

    __slots__ = ("vars", "parent", "module", "foreign", "is_class", "yields")

    def __init__(self, module, parent=None, is_class=False):
        self.vars, self.parent, self.module, self.is_class = {}, parent, module, is_class
        self.foreign, self.yields = {}, None

    def get(self, name):
        env = self
        while env is not None:
            if name in env.vars:
                return env.vars[name]
            env = env.parent
        if name in BUILTINS:
            return BUILTINS[name]
        raise NameError(f"name {name!r} is not defined")

    def set(self, name, value):
        self.foreign.get(name, self).vars[name] = value


class Module:
    def __init__(self, name, path):
        self.name, self.path = name, path
        self.env = Env(self)
        self.env.vars["__name__"] = name
        self.env.vars["__file__"] = path

    def __repr__(self):
        return f"<module {self.name!r}>"


class Function:
    """A def or a lambda; calling it natively (sorted's key, map) comes back to the interpreter."""

    def __init__(self, python, name, node, env, defaults, kw_defaults):
        self.python, self.name, self.node, self.env = python, name, node, env
        self.defaults, self.kw_defaults, self.kind, self.owner = defaults, kw_defaults, None, None
        self.generator = not isinstance(node, ast.Lambda) and any(
            isinstance(inner, ast.Yield | ast.YieldFrom) for inner in own_nodes(node.body)
        )

    def __call__(self, *args, **kwargs):
        return self.python.call_function(self, args, kwargs)

    def __repr__(self):
        return f"<function {self.name}>"


class Method:
    def __init__(self, function, owner):
        self.function, self.owner = function, owner

    def __call__(self, *args, **kwargs):
        return self.function(self.owner, *args, **kwargs)

    def __repr__(self):
        return f"<bound method {self.function.name}>"


class Class:
    def __init__(self, name, bases, namespace):
        self.name, self.bases, self.namespace = name, bases, namespace
        self.native = next((base for base in bases if isinstance(base, type)), None)
        for base in bases:
            self.native = self.native or getattr(base, "native", None)

    def find(self, name):
        if name in self.namespace:
            return self.namespace[name]
        for base in self.bases:
            if isinstance(base, Class) and (found := base.find(name)) is not None:
                return found
        return None

    def derives(self, other):
        return self is other or any(
            base.derives(other) if isinstance(base, Class) else isinstance(other, type) and issubclass(base, other) for base in self.bases
        )

    def __call__(self, *args, **kwargs):
        instance = Instance(self)
        instance.fields["args"] = args
        init = self.find("__init__")
        if isinstance(init, Function):
            init(instance, *args, **kwargs)
        elif self.native is None and (args or kwargs):
            raise TypeError(f"{self.name}() takes no arguments")
        if self.native is None and instance.fields.get("args") is args:
            del instance.fields["args"]
        return instance

    def __repr__(self):
        return f"<class {self.name!r}>"


class Instance:
    def __init__(self, cls):
        self.cls, self.fields = cls, {}

    def __repr__(self):
        method = self.cls.find("__repr__")
        return method(self) if method else f"<{self.cls.name} object>"

    def __str__(self):
        method = self.cls.find("__str__")
        if method is None and self.cls.native is not None:
            args = self.fields.get("args", ())
            return "" if not args else str(args[0]) if len(args) == 1 else str(args)
        return method(self) if method else repr(self)

    def __eq__(self, other):
        method = self.cls.find("__eq__")
        return method(self, other) if method else self is other

    def __hash__(self):
        method = self.cls.find("__hash__")
        return method(self) if method else id(self)

    def __bool__(self):
        method = self.cls.find("__bool__") or self.cls.find("__len__")
        return bool(method(self)) if method else True


def _delegate(name, binary):
    def special(self, *args):
        method = self.cls.find(name)
        if method is not None:
            return method(self, *args)
        if binary:
            return NotImplemented
        raise TypeError(f"{self.cls.name!r} object does not support {name}")

    return special


for _name in "add radd sub rsub mul rmul truediv floordiv mod lt le gt ge and or".split():
    setattr(Instance, f"__{_name}__", _delegate(f"__{_name}__", True))
for _name in "len getitem setitem delitem contains iter next call enter exit neg".split():
    setattr(Instance, f"__{_name}__", _delegate(f"__{_name}__", False))


def own_nodes(body):
    """The nodes of a function's body without those of functions and classes inside it."""
    stack = list(body)
    while stack:
        node = stack.pop()
        yield node
        if not isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Lambda | ast.AsyncFunctionDef):
            stack.extend(ast.iter_child_nodes(node))


# --- What programs may reach ---------------------------------------------------------------------------------------------------------
def bounded(function):
    """A native function that makes its result as large as a number says."""

    @functools.wraps(function, assigned=("__name__",))
    def call(*args, **kwargs):
        if any(isinstance(arg, int) and abs(arg) > 10_000 for arg in args):
            raise OverflowError("this width is more than the sandbox allows")
        return function(*args, **kwargs)

    return call


class _Formatter(string.Formatter):
    def get_field(self, field_name, args, kwargs):
        if "." in field_name or "[" in field_name:
            raise ValueError("attributes and indices in format strings are not emulated; use an f-string")
        return super().get_field(field_name, args, kwargs)

    def format_field(self, value, format_spec):
        return spell(value, format_spec)


def spell(value, spec):
    if any(len(digits) > 3 for digits in "".join(c if c.isdigit() else " " for c in spec).split()):
        raise ValueError("this width is more than the sandbox allows")
    return format(str(value) if isinstance(value, Instance) else value, spec)


def _range(*args):
    made = range(*args)
    if len(made) > MAX_SIZE:
        raise OverflowError(f"a range of {len(made)} is more than the sandbox allows")
    return made


def _type(value):
    cls = value.cls if isinstance(value, Instance) else type(value)
    return cls if isinstance(cls, Class) or cls in METHODS else Class(cls.__name__, [], {})


def _isinstance(value, classes):
    for cls in classes if isinstance(classes, tuple) else (classes,):
        if isinstance(value, Instance):
            if value.cls.derives(cls):
                return True
        elif isinstance(cls, type) and isinstance(value, cls):
            return True
    return False


def _issubclass(cls, classes):
    pairs = classes if isinstance(classes, tuple) else (classes,)
    return any(cls.derives(c) if isinstance(cls, Class) else isinstance(c, type) and issubclass(cls, c) for c in pairs)


EXCEPTIONS = (
    Exception, ArithmeticError, AssertionError, AttributeError, FileNotFoundError, ImportError, IndexError, KeyError, LookupError, NameError,
    NotImplementedError, OSError, OverflowError, RecursionError, RuntimeError, StopIteration, TypeError, ValueError, ZeroDivisionError,
)  # fmt: skip
TYPES = (
    str, int, float, bool, list, dict, tuple, set, frozenset, range, slice, type(None), collections.deque, collections.Counter,
    collections.defaultdict, collections.OrderedDict, datetime.date, datetime.timedelta,
    type({}.keys()), type({}.values()), type({}.items()), *EXCEPTIONS,
)  # fmt: skip
METHODS = {cls: frozenset(name for name in dir(cls) if not name.startswith("_")) for cls in TYPES}
LEFT_OUT = {"today", "fromtimestamp", "strftime", "format_map", "encode", "translate", "maketrans", "to_bytes", "from_bytes"}
WIDE = {"center", "ljust", "rjust", "zfill", "expandtabs"}
MATH = {name: getattr(math, name) for name in "ceil floor sqrt gcd lcm isclose pi e inf nan hypot log log2 log10 fabs trunc fsum".split()}
NATIVE_MODULES = {
    "math": MATH,
    "collections": {name: getattr(collections, name) for name in ("deque", "Counter", "defaultdict", "OrderedDict")},
    "datetime": {"date": datetime.date, "timedelta": datetime.timedelta},
    "functools": {"reduce": functools.reduce},
    "operator": {name: getattr(operator, name) for name in ("add", "sub", "mul", "itemgetter")},
    "typing": dict.fromkeys("Any Callable Dict Iterable Iterator List Optional Sequence Set Tuple Union".split()),
    "__future__": {"annotations": None},
}
BUILTINS = {
    f.__name__: f
    for f in (
        abs, all, any, bool, callable, chr, dict, divmod, enumerate, filter, float, frozenset, int, len, list, map, max, min, ord, repr,
        reversed, round, set, slice, sorted, str, sum, tuple, zip, bin, hex, oct, next, *EXCEPTIONS,
    )
} | {"range": _range, "iter": lambda values: iter(values), "isinstance": _isinstance, "issubclass": _issubclass, "type": _type, "object": object, "BaseException": Exception, "NotImplemented": NotImplemented}  # fmt: skip

BINARY = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv, ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod, ast.Pow: operator.pow, ast.BitOr: operator.or_, ast.BitAnd: operator.and_, ast.BitXor: operator.xor,
    ast.LShift: operator.lshift, ast.RShift: operator.rshift,
}  # fmt: skip
COMPARE = {
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt, ast.GtE: operator.ge,
    ast.Is: operator.is_, ast.IsNot: operator.is_not, ast.In: lambda a, b: a in b, ast.NotIn: lambda a, b: a not in b,
}  # fmt: skip
SIGNS = {
    ast.Eq: "==", ast.NotEq: "!=", ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=", ast.Is: "is", ast.IsNot: "is not",
    ast.In: "in", ast.NotIn: "not in",
}  # fmt: skip
UNARY = {ast.Not: operator.not_, ast.USub: operator.neg, ast.UAdd: operator.pos, ast.Invert: operator.invert}


def binary(kind, left, right):
    """One arithmetic operation, refused where its result would be huge."""
    if isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length() + right.bit_length()
        if kind is ast.Pow:
            bits = left.bit_length() * abs(right)
        if kind is ast.LShift:
            bits = left.bit_length() + abs(right)
        if bits > MAX_BITS:
            raise OverflowError("this number is more than the sandbox allows")
    elif kind is ast.Mult:
        for many, times in ((left, right), (right, left)):
            if hasattr(many, "__len__") and isinstance(times, int) and not isinstance(many, Instance) and len(many) * times > MAX_SIZE:
                raise MemoryError("this value is more than the sandbox allows")
    elif kind is ast.Add and isinstance(left, str | list | tuple) and isinstance(right, str | list | tuple):
        if len(left) + len(right) > MAX_SIZE:
            raise MemoryError("this value is more than the sandbox allows")
    elif kind is ast.Mod and isinstance(left, str):
        if any(len(word) > 3 for word in "".join(c if c.isdigit() or c == "*" else " " for c in left).split()) or "*" in left:
            raise ValueError("this width is more than the sandbox allows")
    return BINARY[kind](left, right)


# --- The interpreter -----------------------------------------------------------------------------------------------------------------
class Raises:
    """pytest.raises."""

    def __init__(self, *classes, match=None):
        self.classes, self.match, self.value = classes, match, None


class File:
    """An open file of the tree."""

    def __init__(self, tree, path, mode):
        self.tree, self.path, self.mode = tree, path, mode
        if "r" in mode and path not in tree:
            raise FileNotFoundError(f"[Errno 2] No such file or directory: {path!r}")
        if "r" not in mode:
            tree[path] = "" if "w" in mode else tree.get(path, "")
        self.rest = tree[path]

    def read(self):
        text, self.rest = self.rest, ""
        return text

    def readlines(self):
        return self.read().splitlines(keepends=True)

    def write(self, text):
        if len(self.tree[self.path]) + len(text) > MAX_SIZE:
            raise MemoryError("this file is more than the sandbox allows")
        self.tree[self.path] += str(text)
        return len(text)

    def writelines(self, lines):
        self.write("".join(lines))

    def close(self):
        pass


class Path:
    """The part of pathlib.Path that scripts use to edit a file."""

    def __init__(self, python, text):
        self.python, self.path = python, str(text)

    def read_text(self, encoding=None):
        return self.python.open(self.path).read()

    def write_text(self, text, encoding=None):
        return self.python.open(self.path, "w").write(text)

    def exists(self):
        return self.python.absolute(self.path) in self.python.tree


NATIVE_ATTRIBUTES = {
    File: {"read", "readlines", "write", "writelines", "close"},
    Path: {"read_text", "write_text", "exists"},
    Raises: {"value"},
}


class Python:
    """One run of a program over a tree `{absolute path: text}`, which `open` reads and writes."""

    def __init__(self, tree, cwd=ROOT, argv=(), steps=MAX_STEPS):
        self.tree, self.cwd, self.steps = tree, cwd, steps
        self.modules, self.frames, self.failed, self.trace, self.printed, self.out = {}, [], None, [], 0, []
        self.detail, self.handled = None, None
        self.table = {cls: getattr(self, name) for name, cls in vars(ast).items() if isinstance(cls, type) and hasattr(Python, name)}
        self.system = {"argv": list(argv), "path": [cwd], "exit": self.leave, "version": "3.11", "maxsize": 2**63 - 1}
        self.native = NATIVE_MODULES | {
            "sys": self.system,
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

    def open(self, path, mode="r", encoding=None, newline=None):
        path = path.path if isinstance(path, Path) else path
        if not isinstance(path, str) or not isinstance(mode, str) or "b" in mode or "+" in mode:
            raise Unsupported("open() of text files for reading, writing or appending is all that is emulated")
        return File(self.tree, self.absolute(path), mode.replace("t", ""))

    def print(self, *values, sep=" ", end="\n", file=None, flush=False):
        text = (" " if sep is None else sep).join(map(str, values)) + ("\n" if end is None else end)
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
        self.execute_in("<module>", ast.parse(source, path).body, module.env)
        return module

    def execute_in(self, name, body, env):
        if len(self.frames) > 60:
            raise RecursionError("maximum recursion depth exceeded")
        frame = [env.module.path, 0, name]
        self.frames.append(frame)
        try:
            self.block(body, env)
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
            if name in METHODS[value] and name not in LEFT_OUT | WIDE | {"format"}:
                return getattr(value, name)
        elif isinstance(value, Exception):
            if name == "args":
                return value.args
        elif type(value) in NATIVE_ATTRIBUTES:
            if name in NATIVE_ATTRIBUTES[type(value)]:
                return getattr(value, name)
        elif name in METHODS.get(type(value), ()):
            if name in LEFT_OUT:
                raise Unsupported(f"{type(value).__name__}.{name} is not emulated")
            if name == "format" and isinstance(value, str):
                return lambda *args, **kwargs: _Formatter().vformat(value, args, kwargs)
            return bounded(getattr(value, name)) if name in WIDE else getattr(value, name)
        raise AttributeError(f"{(value.cls.name if isinstance(value, Instance) else type(value).__name__)!r} object has no attribute {name!r}")

    def set_attribute(self, value, name, new):
        if isinstance(value, Instance):
            value.fields[name] = new
        elif isinstance(value, Class):
            value.namespace[name] = new
        elif isinstance(value, Module):
            value.env.vars[name] = new
        else:
            raise AttributeError(f"{type(value).__name__!r} object has no attribute {name!r}")

    # Statements
    def Expr(self, node, env):
        self.evaluate(node.value, env)

    def Pass(self, node, env):
        pass

    def Return(self, node, env):
        raise _Return(self.evaluate(node.value, env) if node.value else None)

    def Break(self, node, env):
        raise _Break

    def Continue(self, node, env):
        raise _Continue

    def Assign(self, node, env):
        value = self.evaluate(node.value, env)
        for target in node.targets:
            self.assign(target, value, env)

    def AnnAssign(self, node, env):
        if node.value is not None:
            self.assign(node.target, self.evaluate(node.value, env), env)

    def AugAssign(self, node, env):
        target = node.target
        if isinstance(target, ast.Name):
            old, put = env.get(target.id), lambda value: env.set(target.id, value)
        elif isinstance(target, ast.Attribute):
            owner = self.evaluate(target.value, env)
            old, put = self.attribute(owner, target.attr), lambda value: self.set_attribute(owner, target.attr, value)
        else:
            owner, key = self.evaluate(target.value, env), self.evaluate(target.slice, env)
            old, put = owner[key], lambda value: operator.setitem(owner, key, value)
        value = self.evaluate(node.value, env)
        if isinstance(old, list) and isinstance(node.op, ast.Add):
            value = list(value)
            binary(ast.Add, old, value)
            old.extend(value)
            put(old)
        else:
            put(binary(type(node.op), old, value))

    def assign(self, target, value, env):
        if isinstance(target, ast.Name):
            env.set(target.id, value)
        elif isinstance(target, ast.Attribute):
            self.set_attribute(self.evaluate(target.value, env), target.attr, value)
        elif isinstance(target, ast.Subscript):
            owner = self.evaluate(target.value, env)
            owner[self.evaluate(target.slice, env)] = value
        elif isinstance(target, ast.Tuple | ast.List):
            values, names = list(value), target.elts
            star = next((i for i, name in enumerate(names) if isinstance(name, ast.Starred)), None)
            if star is not None:
                after = len(names) - star - 1
                if len(values) < len(names) - 1:
                    raise ValueError(f"not enough values to unpack (expected at least {len(names) - 1}, got {len(values)})")
                values[star : len(values) - after] = [values[star : len(values) - after]]
                names = [name.value if isinstance(name, ast.Starred) else name for name in names]
            if len(values) != len(names):
                few = "not enough" if len(values) < len(names) else "too many"
                got = f", got {len(values)}" if len(values) < len(names) else ""
                raise ValueError(f"{few} values to unpack (expected {len(names)}{got})")
            for name, part in zip(names, values, strict=True):
                self.assign(name, part, env)
        else:
            raise Unsupported(f"line {target.lineno}: this assignment is not emulated")

    def Delete(self, node, env):
        for target in node.targets:
            if isinstance(target, ast.Subscript):
                del self.evaluate(target.value, env)[self.evaluate(target.slice, env)]
            elif isinstance(target, ast.Name) and target.id in env.vars:
                del env.vars[target.id]
            else:
                raise Unsupported(f"line {node.lineno}: this del is not emulated")

    def If(self, node, env):
        self.block(node.body if self.evaluate(node.test, env) else node.orelse, env)

    def For(self, node, env):
        for item in self.evaluate(node.iter, env):
            self.assign(node.target, item, env)
            try:
                self.block(node.body, env)
            except _Break:
                return
            except _Continue:
                continue
        self.block(node.orelse, env)

    def While(self, node, env):
        while self.evaluate(node.test, env):
            try:
                self.block(node.body, env)
            except _Break:
                return
            except _Continue:
                continue
        self.block(node.orelse, env)

    def Raise(self, node, env):
        if node.exc is None:
            raise self.handled if self.handled else RuntimeError("No active exception to reraise")
        value = self.evaluate(node.exc, env)
        if isinstance(value, Class) or (isinstance(value, type) and issubclass(value, Exception)):
            value = value()
        if isinstance(value, Instance) and value.cls.derives(Exception):
            raise Thrown(value)
        if isinstance(value, Exception):
            raise value
        raise TypeError("exceptions must derive from BaseException")

    def Assert(self, node, env):
        test = node.test
        if isinstance(test, ast.Compare) and len(test.ops) == 1:  # what pytest shows of a comparison that fails
            left, right = self.evaluate(test.left, env), self.evaluate(test.comparators[0], env)
            passed = COMPARE[type(test.ops[0])](left, right)
            self.detail = None if passed else f"{repr(left)[:300]} {SIGNS[type(test.ops[0])]} {repr(right)[:300]}"
        else:
            passed = self.evaluate(test, env)
            self.detail = None
        if not passed:
            raise AssertionError(*([self.evaluate(node.msg, env)] if node.msg else []))

    def Try(self, node, env):
        try:
            try:
                self.block(node.body, env)
            except Exception as error:
                for handler in node.handlers:
                    wanted = Exception if handler.type is None else self.evaluate(handler.type, env)
                    value = error.value if isinstance(error, Thrown) else error
                    if _isinstance(value, wanted):
                        if handler.name:
                            env.set(handler.name, value)
                        before, self.handled = self.handled, error
                        self.block(handler.body, env)
                        self.handled = before
                        break
                else:
                    raise
            else:
                self.block(node.orelse, env)
        finally:
            self.block(node.finalbody, env)

    def With(self, node, env):
        self.with_items(node, list(node.items), env)

    def with_items(self, node, items, env):
        if not items:
            return self.block(node.body, env)
        manager = self.evaluate(items[0].context_expr, env)
        entered = manager
        if isinstance(manager, Instance):
            entered = self.attribute(manager, "__enter__")()
        elif not isinstance(manager, Raises | File):
            raise TypeError(f"{type(manager).__name__!r} object does not support the context manager protocol")
        if items[0].optional_vars is not None:
            self.assign(items[0].optional_vars, entered, env)
        try:
            self.with_items(node, items[1:], env)
        except Exception as error:
            value = error.value if isinstance(error, Thrown) else error
            if isinstance(manager, Raises) and _isinstance(value, manager.classes):
                manager.value = value
                return None
            if isinstance(manager, Instance) and self.attribute(manager, "__exit__")(None, value, None):
                return None
            raise
        if isinstance(manager, Raises):
            raise AssertionError(f"DID NOT RAISE {manager.classes[0] if manager.classes else None}")
        if isinstance(manager, Instance):
            self.attribute(manager, "__exit__")(None, None, None)
        return None

    def Global(self, node, env):
        for name in node.names:
            env.foreign[name] = env.module.env

    def Nonlocal(self, node, env):
        for name in node.names:
            outer = env.parent
            while outer is not None and name not in outer.vars:
                outer = outer.parent
            env.foreign[name] = outer or env

    def Import(self, node, env):
        for alias in node.names:
            found = self.wrap(alias.name, self.import_module(alias.name))
            top = alias.name.split(".")[0]
            env.set(alias.asname or top, found if alias.asname else self.wrap(top, self.import_module(top)))

    @staticmethod
    def wrap(name, found):
        return NativeModule(name, found) if isinstance(found, dict) else found

    def ImportFrom(self, node, env):
        name = node.module or ""
        if node.level:
            here = env.module.name.split(".")
            package = here if env.module.path.endswith("__init__.py") else here[:-1]
            package = package[: len(package) - node.level + 1]
            name = ".".join([*package, *([node.module] if node.module else [])])
        found = self.import_module(name)
        for alias in node.names:
            if isinstance(found, dict):
                if alias.name not in found:
                    raise Unsupported(f"from {name} import {alias.name} is not emulated")
                value = found[alias.name]
            elif alias.name == "*":
                for key, value in list(found.env.vars.items()):
                    if not key.startswith("_"):
                        env.set(key, value)
                continue
            elif alias.name in found.env.vars:
                value = found.env.vars[alias.name]
            else:
                try:
                    value = self.import_module(f"{name}.{alias.name}")
                except ModuleNotFoundError:
                    raise ImportError(f"cannot import name {alias.name!r} from {name!r} ({found.path})") from None
            env.set(alias.asname or alias.name, value)

    def FunctionDef(self, node, env):
        function = self.make_function(node.name, node, env)
        for decorator in reversed(node.decorator_list):
            function = self.evaluate(decorator, env)(function)
        env.set(node.name, function)

    def make_function(self, name, node, env):
        closure = env.parent if env.is_class else env
        defaults = [self.evaluate(default, env) for default in node.args.defaults]
        pairs = zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)
        return Function(self, name, node, closure, defaults, {a.arg: self.evaluate(d, env) for a, d in pairs if d is not None})

    def ClassDef(self, node, env):
        if node.keywords or node.decorator_list:
            raise Unsupported(f"line {node.lineno}: metaclasses and class decorators are not emulated")
        bases = [base for base in (self.evaluate(base, env) for base in node.bases) if base is not object]
        inner = Env(env.module, env, is_class=True)
        self.block(node.body, inner)
        made = Class(node.name, bases, inner.vars)
        for value in inner.vars.values():
            if isinstance(value, Function) and value.owner is None:
                value.owner = made
        env.set(node.name, made)

    # Expressions
    def Constant(self, node, env):
        return node.value

    def Name(self, node, env):
        if node.id in self.builtins and node.id not in env.module.env.vars:
            return self.builtins[node.id]
        return env.get(node.id)

    def Attribute(self, node, env):
        return self.attribute(self.evaluate(node.value, env), node.attr)

    def Subscript(self, node, env):
        value = self.evaluate(node.value, env)
        if isinstance(value, type):
            return value
        return value[self.evaluate(node.slice, env)]

    def Slice(self, node, env):
        return slice(*(self.evaluate(part, env) if part else None for part in (node.lower, node.upper, node.step)))

    def BinOp(self, node, env):
        return binary(type(node.op), self.evaluate(node.left, env), self.evaluate(node.right, env))

    def UnaryOp(self, node, env):
        return UNARY[type(node.op)](self.evaluate(node.operand, env))

    def BoolOp(self, node, env):
        is_and, value = isinstance(node.op, ast.And), None
        for part in node.values:
            value = self.evaluate(part, env)
            if bool(value) != is_and:
                break
        return value

    def Compare(self, node, env):
        left = self.evaluate(node.left, env)
        result = True
        for op, right in zip(node.ops, node.comparators, strict=True):
            right = self.evaluate(right, env)
            result = COMPARE[type(op)](left, right)
            if not result:
                break
            left = right
        return result

    def IfExp(self, node, env):
        return self.evaluate(node.body if self.evaluate(node.test, env) else node.orelse, env)

    def Call(self, node, env):
        if isinstance(node.func, ast.Name) and node.func.id == "super" and not node.args:
            return Super(env.get("__class__"), next(iter(env.vars.values())))
        function = self.evaluate(node.func, env)
        args, kwargs = [], {}
        for arg in node.args:
            if isinstance(arg, ast.Starred):
                args.extend(self.evaluate(arg.value, env))
            else:
                args.append(self.evaluate(arg, env))
        for keyword in node.keywords:
            value = self.evaluate(keyword.value, env)
            kwargs.update(value if keyword.arg is None else {keyword.arg: value})
        if not callable(function) or isinstance(function, Instance) and function.cls.find("__call__") is None:
            raise TypeError(f"{type(function).__name__!r} object is not callable")
        return function(*args, **kwargs)

    def Lambda(self, node, env):
        return self.make_function("<lambda>", node, env)

    def NamedExpr(self, node, env):
        value = self.evaluate(node.value, env)
        self.assign(node.target, value, env)
        return value

    def List(self, node, env):
        return self.items(node, env)

    def Tuple(self, node, env):
        return tuple(self.items(node, env))

    def Set(self, node, env):
        return set(self.items(node, env))

    def items(self, node, env):
        values = []
        for element in node.elts:
            if isinstance(element, ast.Starred):
                values.extend(self.evaluate(element.value, env))
            else:
                values.append(self.evaluate(element, env))
        return values

    def Dict(self, node, env):
        made = {}
        for key, value in zip(node.keys, node.values, strict=True):
            if key is None:
                made.update(self.evaluate(value, env))
            else:
                made[self.evaluate(key, env)] = self.evaluate(value, env)
        return made

    def comprehend(self, node, env, generators, make):
        if not generators:
            yield make(env)
            return
        first, *rest = generators
        for item in self.evaluate(first.iter, env):
            self.assign(first.target, item, env)
            if all(self.evaluate(test, env) for test in first.ifs):
                yield from self.comprehend(node, env, rest, make)

    def over(self, node, env, make):
        return self.comprehend(node, Env(env.module, env), node.generators, make)

    def ListComp(self, node, env):
        return list(self.over(node, env, lambda inner: self.evaluate(node.elt, inner)))

    def SetComp(self, node, env):
        return set(self.over(node, env, lambda inner: self.evaluate(node.elt, inner)))

    def GeneratorExp(self, node, env):
        return self.over(node, env, lambda inner: self.evaluate(node.elt, inner))

    def DictComp(self, node, env):
        return dict(self.over(node, env, lambda inner: (self.evaluate(node.key, inner), self.evaluate(node.value, inner))))

    def JoinedStr(self, node, env):
        return "".join(str(self.evaluate(part, env)) for part in node.values)

    def FormattedValue(self, node, env):
        value = self.evaluate(node.value, env)
        value = {-1: lambda v: v, 115: str, 114: repr, 97: ascii}[node.conversion](value)
        return spell(value, self.evaluate(node.format_spec, env) if node.format_spec else "")

    def Yield(self, node, env):
        self.yields(env).append(self.evaluate(node.value, env) if node.value else None)

    def YieldFrom(self, node, env):
        self.yields(env).extend(self.evaluate(node.value, env))

    def yields(self, env):
        """Generators run to their end when they are called; a step too many ends an endless one."""
        while env.yields is None:
            env = env.parent
        return env.yields


class NativeModule:
    def __init__(self, name, names):
        self.name, self.names = name, names


class Super:
    """super() in a method: what the bases of the method's class have."""

    def __init__(self, owner, instance):
        self.owner, self.instance = owner, instance

    def attribute(self, name):
        for base in self.owner.bases:
            found = base.find(name) if isinstance(base, Class) else None
            if isinstance(found, Function):
                return Method(found, self.instance)
        if name == "__init__":
            return lambda *args: self.instance.fields.update({"args": args} if self.owner.native else {})
        raise AttributeError(f"'super' object has no attribute {name!r}")


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


def run_script(tree, source, path, cwd=ROOT, argv=()):
    """Runs a program: (what it prints, exit status). The tree is changed by the files that it writes."""
    python = Python(tree, cwd, argv)
    try:
        python.run_module("__main__", path, source)
    except Exit as leave:
        return "".join(python.out), leave.args[0] & 255
    except Unsupported as limit:
        return "".join(python.out) + f"python: {limit} (scripts are emulated here; submit to have the change judged)\n", 1
    except SyntaxError as error:
        return "".join(python.out) + f'  File "{path}", line {error.lineno}\n    {(error.text or "").strip()}\n{describe(error)}\n', 1
    except Exception as error:  # whatever the program raises is the program's
        return "".join(python.out) + traceback(python, error) + "\n", 1
    return "".join(python.out), 0
