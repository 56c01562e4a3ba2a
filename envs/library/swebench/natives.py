"""Objects of this process that interpreted programs hold: files and paths of the tree, pytest.raises, native modules, super()."""


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

    def __iter__(self):
        return iter(self.readlines())

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
