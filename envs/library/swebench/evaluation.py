"""The meaning of Python's statements and expressions, one method for each kind of node; `Python` adds modules, calls and attributes."""

import ast
import operator


class Statements:
    """Methods `(node, env)`; what they leave is in the variables."""

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
            put(self.weighed(binary(type(node.op), old, value)))

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
            if self.broken(node.body, env):
                return
        self.block(node.orelse, env)

    def While(self, node, env):
        while self.evaluate(node.test, env):
            if self.broken(node.body, env):
                return
        self.block(node.orelse, env)

    def broken(self, body, env):
        """Runs the body of a loop once, and says whether a `break` ended the loop."""
        try:
            self.block(body, env)
        except _Break:
            return True
        except _Continue:
            pass
        return False

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


class Expressions:
    """Methods `(node, env) -> value`."""

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
        return self.weighed(binary(type(node.op), self.evaluate(node.left, env), self.evaluate(node.right, env)))

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
            right = self.weighed(self.evaluate(right, env))
            if type(left) in CONTAINERS and type(right) in CONTAINERS:
                bulk(left)
                bulk(right)
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
        for arg in args:
            self.weighed(arg)
        return self.weighed(function(*(map(bulk, args) if function is str else args), **kwargs))

    def weighed(self, value):
        """The value; a large one costs steps, so that their number bounds memory too."""
        if type(value) in SIZED:
            self.steps -= len(value) // 8
        return value

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
        return "".join(bulk([str(self.evaluate(part, env)) for part in node.values]))

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
