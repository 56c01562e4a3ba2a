"""What interpreted programs are made of: variables, functions, classes, and the list of native things that they may reach."""

import ast
import collections
import datetime
import functools
import math
import operator
import re
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
        if not hasattr(node, "generator"):
            node.generator = not isinstance(node, ast.Lambda) and any(
                isinstance(n, ast.Yield | ast.YieldFrom) for n in own_nodes(node.body)
            )
        self.generator = node.generator

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


# What programs may reach ---------------------------------------------------------------------------------------------------------
def bounded(function):
    """A native function that makes its result as large as a number says."""

    @functools.wraps(function, assigned=("__name__",))
    def call(*args, **kwargs):
        if any(isinstance(arg, int) and abs(arg) > 10_000 for arg in args):
            raise OverflowError("this width is more than the sandbox allows")
        return function(*args, **kwargs)

    return call


def bulk(value, room=MAX_SIZE):
    """Refuses a value whose text, with all that is inside it, would be longer than about `room`."""
    stack = [value]
    while stack:
        item = stack.pop()
        if isinstance(item, str | list | tuple | dict | set | frozenset | collections.deque):
            room -= len(item)
            if room < 0:
                raise MemoryError("this value is more than the sandbox allows")
            if isinstance(item, dict):
                stack += [*item.keys(), *item.values()]
            elif not isinstance(item, str):
                stack += item
    return value


def checked(function):
    """A native function of whole values, refused where they are huge."""

    @functools.wraps(function, assigned=("__name__",))
    def call(*args, **kwargs):
        bulk(args)
        return function(*args, **kwargs)

    return call


def grown(text, name):
    """str.join and str.replace, refused where the result would be huge."""

    def join(parts):
        parts = list(parts)
        bulk(parts, MAX_SIZE - len(text) * len(parts))
        return text.join(parts)

    def replace(old, new, count=-1):
        places = text.count(old) if old else len(text) + 1
        if len(text) + places * (len(new) - len(old)) > MAX_SIZE:
            raise MemoryError("this value is more than the sandbox allows")
        return text.replace(old, new, count)

    return {"join": join, "replace": replace}[name]


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
    return format(str(value) if isinstance(value, Instance) else bulk(value), spec)


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
    Exception, ArithmeticError, AssertionError, AttributeError, FileNotFoundError, ImportError, IndexError, KeyError, LookupError,
    NameError, NotImplementedError, OSError, OverflowError, RecursionError, RuntimeError, StopIteration, TypeError, ValueError,
    ZeroDivisionError,
)  # fmt: skip
TYPES = (
    str, int, float, bool, list, dict, tuple, set, frozenset, range, slice, type(None), collections.deque, collections.Counter,
    collections.defaultdict, collections.OrderedDict, datetime.date, datetime.timedelta,
    type({}.keys()), type({}.values()), type({}.items()), *EXCEPTIONS,
)  # fmt: skip
METHODS = {cls: frozenset(name for name in dir(cls) if not name.startswith("_")) for cls in TYPES}
METHODS[re.Match] = frozenset({"group", "groups", "start", "end", "span"})
STANDARD = set(
    "abc argparse ast asyncio contextlib copy csv dataclasses decimal enum fractions glob importlib inspect io itertools json logging "
    "pprint random shutil statistics string subprocess tempfile textwrap time traceback types unittest uuid warnings".split()
)
LEFT_OUT = {"today", "fromtimestamp", "strftime", "format_map", "encode", "translate", "maketrans", "to_bytes", "from_bytes", "expandtabs"}
WIDE = {"center", "ljust", "rjust", "zfill"}
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
        abs, all, any, bool, callable, chr, dict, divmod, enumerate, filter, float, frozenset, int, len, list, map, max, min, ord,
        reversed, round, set, slice, sorted, str, tuple, zip, bin, hex, oct, next, *EXCEPTIONS,
    )
} | {
    "repr": checked(repr), "sum": checked(sum), "range": _range, "iter": lambda values: iter(values), "isinstance": _isinstance,
    "issubclass": _issubclass, "type": _type, "object": object, "BaseException": Exception, "NotImplemented": NotImplemented,
}  # fmt: skip

CONTAINERS = (list, tuple, dict)
SIZED = (str, list, tuple, dict, set, range)
PATHS = {
    "join": lambda first, *rest: functools.reduce(lambda a, b: b if b.startswith("/") else f"{a.rstrip('/')}/{b}", rest, first),
    "dirname": lambda path: path.rpartition("/")[0],
    "basename": lambda path: path.rpartition("/")[2],
}

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
        bulk(right)
        if (
            any(len(word) > 3 for word in "".join(c if c.isdigit() or c == "*" else " " for c in left).split())
            or "*" in left
            or left.count("%") > 100
        ):
            raise ValueError("this width is more than the sandbox allows")
    return BINARY[kind](left, right)
