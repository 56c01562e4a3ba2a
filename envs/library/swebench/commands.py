"""The commands of the emulated shell: each takes the shell, its arguments and its input and gives (output, errors, return code)."""

import ast
import difflib
import re

COMMANDS = {"git": git, "sed": sed}


def command(*names):
    def register(function):
        COMMANDS.update(dict.fromkeys(names, function))
        return function

    return register


def options(args, valued=""):
    """Splits arguments into flags {letter or --name: value or True} and the rest; letters in `valued` take a value."""
    flags, rest, position = {}, [], 0
    while position < len(args):
        arg = args[position]
        position += 1
        if arg == "--":
            rest += args[position:]
            break
        if arg.startswith("--") and len(arg) > 2:
            name, equals, value = arg.partition("=")
            flags.setdefault(name, []).append(value if equals else True)
        elif arg.startswith("-") and len(arg) > 1:
            for index, letter in enumerate(arg[1:], start=2):
                if letter in valued:
                    value = arg[index:]
                    if not value and position < len(args):
                        value, position = args[position], position + 1
                    flags.setdefault(letter, []).append(value)
                    break
                flags[letter] = [True]
        else:
            rest.append(arg)
    return flags, rest


def read_files(shell, name, paths, stdin):
    """[(shown name, text)] of the paths, `-` or none for the input, and the errors about the others."""
    texts, errors = [], []
    for path in paths or ["-"]:
        full = shell.path(path)
        if path == "-":
            texts.append(("-", stdin))
        elif full in shell.tree:
            texts.append((path, shell.tree[full]))
        elif shell.is_folder(full):
            errors.append(f"{name}: {path}: Is a directory\n")
        else:
            errors.append(f"{name}: {path}: No such file or directory\n")
    return texts, "".join(errors)


def lines_of(text):
    return text.splitlines(keepends=True) if "\r" not in text else text.replace("\r", "").splitlines(keepends=True)


@command("nl")
def nl(shell, args, stdin):
    return cat(shell, ["-n", *options(args, "bwns")[1]], stdin)


@command("cat")
def cat(shell, args, stdin):
    flags, paths = options(args)
    texts, errors = read_files(shell, "cat", paths, stdin)
    out = "".join(text for _, text in texts)
    if "n" in flags or "b" in flags:
        out = "".join(f"{number:6}\t{line}" for number, line in enumerate(lines_of(out), start=1))
    return out, errors, int(bool(errors))


def ends(name):
    def run(shell, args, stdin):
        args = [f"-n{arg[1:]}" if re.fullmatch(r"-\d+", arg) else arg for arg in args]
        flags, paths = options(args, "nc")
        unit = "c" if "c" in flags else "n"
        wanted = str(flags.get(unit, ["10"])[-1])
        if not re.fullmatch(r"[+-]?\d{1,9}", wanted):
            return "", f"{name}: invalid number of {'bytes' if unit == 'c' else 'lines'}: ‘{wanted}’\n", 1
        texts, errors = read_files(shell, name, paths, stdin)
        out, number = [], int(wanted)
        for shown, text in texts:
            items = text if unit == "c" else lines_of(text)
            if name == "head":
                part = items[:number]
            elif wanted.startswith("+"):
                part = items[max(0, number - 1) :]
            else:
                part = items[len(items) - min(abs(number), len(items)) :]
            title = f"==> {shown} <==\n" if len(texts) > 1 and "q" not in flags else ""
            out.append(title + "".join(part))
        return ("\n" if len(texts) > 1 else "").join(out), errors, int(bool(errors))

    return run


COMMANDS |= {name: ends(name) for name in ("head", "tail")}


@command("echo")
def echo(shell, args, stdin):
    newline, escapes = "\n", False
    while args and re.fullmatch(r"-[neE]+", args[0]):
        newline = "" if "n" in args[0] else newline
        escapes |= "e" in args[0]
        args = args[1:]
    text = " ".join(args)
    return (escaped(text) if escapes else text) + newline, "", 0


def escaped(text):
    return re.sub(r"\\([nt\\])", lambda match: {"n": "\n", "t": "\t", "\\": "\\"}[match[1]], text)


@command("printf")
def printf(shell, args, stdin):
    if not args:
        return "", "printf: usage: printf [-v var] format [arguments]\n", 2
    form, values, out = escaped(args[0]), iter(args[1:]), []
    places = len(re.findall(r"(?<!%)%[-0-9.]*[sdqb]", form))
    for _ in range(max(1, -(-len(args[1:]) // max(1, places)))):  # the format is used again as long as there are values
        out.append(re.sub(r"%%|%[-0-9.]*[sdqb]", lambda match: "%" if match[0] == "%%" else next(values, ""), form))
        if not places:
            break
    return "".join(out), "", 0


@command("ls")
def ls(shell, args, stdin):
    flags, paths = options(args)
    out, errors = [], []
    for path in paths or ["."]:
        full = shell.path(path)
        if full in shell.tree:
            out.append(long_line(shell, full, path) if "l" in flags else path)
            continue
        if not shell.is_folder(full):
            errors.append(f"ls: cannot access '{path}': No such file or directory\n")
            continue
        folders = [full]
        if "R" in flags:
            folders += sorted(folder for folder in shell.all_folders() if folder.startswith(full.rstrip("/") + "/"))
        for folder in folders:
            if len(paths) > 1 or "R" in flags:
                out += ([""] if out else []) + [f"{path if folder == full else path.rstrip('/') + folder[len(full) :]}:"]
            names = children(shell, folder)
            names = [".", "..", *names] if "a" in flags else [name for name in names if "A" in flags or not name.startswith(".")]
            if "l" in flags:
                out.append(f"total {4 * len(names)}")
            out += [long_line(shell, shell.path(f"{folder}/{name}"), name) if "l" in flags else name for name in names]
    return "".join(line + "\n" for line in out), "".join(errors), 2 if errors else 0


def children(shell, folder):
    prefix = folder.rstrip("/") + "/"
    names = {path[len(prefix) :].split("/")[0] for path in [*shell.tree, *shell.all_folders()] if path.startswith(prefix)}
    return sorted(name for name in names if name)


def long_line(shell, path, name):
    folder = shell.is_folder(path)
    size = 4096 if folder else len(shell.tree.get(path, ""))
    return f"{'drwxr-xr-x 2' if folder else '-rw-r--r-- 1'} root root {size:6} Jan  1 00:00 {name}"


@command("pwd")
def pwd(shell, args, stdin):
    return shell.cwd + "\n", "", 0


@command("cd")
def cd(shell, args, stdin):
    target = args[0] if args else "/root"
    if not shell.is_folder(shell.path(target)):
        kind = "Not a directory" if shell.path(target) in shell.tree else "No such file or directory"
        return "", f"bash: line 1: cd: {target}: {kind}\n", 1
    shell.cwd = shell.path(target)
    shell.variables["PWD"] = shell.cwd
    return "", "", 0


@command("true", ":", "export", "set", "unset", "chmod", "sleep", "source", ".")
def true(shell, args, stdin):
    for arg in args:
        name, equals, value = arg.partition("=")
        if equals and name.isidentifier():
            shell.variables[name] = value
    return "", "", 0


@command("false")
def false(shell, args, stdin):
    return "", "", 1


@command("exit")
def leave(shell, args, stdin):
    return "", "", int(args[0]) & 255 if args and args[0].isdigit() and len(args[0]) < 9 else 0


@command("wc")
def wc(shell, args, stdin):
    flags, paths = options(args)
    texts, errors = read_files(shell, "wc", paths, stdin)
    shown = [letter for letter in "lwc" if letter in flags] or ["l", "w", "c"]
    rows = [([text.count("\n"), len(text.split()), len(text)], name) for name, text in texts]
    if len(rows) > 1:
        rows.append(([sum(column) for column in zip(*(counts for counts, _ in rows), strict=True)], "total"))
    width = max((len(str(n)) for counts, _ in rows for n in counts), default=1)
    if len(rows) == 1:
        width = 1 if len(shown) == 1 else 7 if rows[0][1] == "-" else width
    out = ""
    for counts, name in rows:
        picked = [counts["lwc".index(letter)] for letter in shown]
        out += " ".join(f"{n:{width}}" for n in picked) + (f" {name}" if name != "-" else "") + "\n"
    return out, errors, int(bool(errors))


@command("sort")
def sort(shell, args, stdin):
    flags, paths = options(args, "kt")
    texts, errors = read_files(shell, "sort", paths, stdin)
    lines = "".join(text for _, text in texts).splitlines()

    def key(line):
        match = re.match(r"\s*(-?\d{1,15})", line)
        return (int(match[1]) if match and "n" in flags else 0, line)

    lines = sorted(set(lines) if "u" in flags else lines, key=key, reverse="r" in flags)
    return "".join(line + "\n" for line in lines), errors, 2 if errors else 0


@command("uniq")
def uniq(shell, args, stdin):
    flags, paths = options(args)
    texts, errors = read_files(shell, "uniq", paths, stdin)
    found = []
    for line in "".join(text for _, text in texts).splitlines():
        if found and found[-1][1] == line:
            found[-1][0] += 1
        else:
            found.append([1, line])
    return "".join((f"{count:7} " if "c" in flags else "") + f"{line}\n" for count, line in found), errors, int(bool(errors))


@command("cut")
def cut(shell, args, stdin):
    flags, paths = options(args, "dfc")
    texts, errors = read_files(shell, "cut", paths, stdin)
    mark, spec = str(flags.get("d", ["\t"])[-1])[:1] or "\t", str(flags.get("f", flags.get("c", [""]))[-1])
    match = re.fullmatch(r"(\d{0,5})(-?)(\d{0,5})", spec)
    if not match or not spec:
        return "", "cut: you must specify a list of bytes, characters, or fields\n", 1
    low = int(match[1] or 1)
    high = int(match[3]) if match[3] else None if match[2] else low
    out = []
    for line in "".join(text for _, text in texts).splitlines():
        items = line if "c" in flags else line.split(mark)
        out.append(("" if "c" in flags else mark).join(items[low - 1 : high]) + "\n")
    return "".join(out), errors, int(bool(errors))


@command("tr")
def tr(shell, args, stdin):
    flags, sets = options(args)
    sets = [re.sub(r"(\w)-(\w)", lambda m: "".join(map(chr, range(ord(m[1]), ord(m[2]) + 1))), escaped(text)) for text in sets]
    if "d" in flags and sets:
        return "".join(char for char in stdin if char not in sets[0]), "", 0
    if len(sets) != 2 or not sets[1]:
        return "", "tr: missing operand\n", 1
    return stdin.translate({ord(a): sets[1][min(i, len(sets[1]) - 1)] for i, a in enumerate(sets[0])}), "", 0


@command("diff")
def diff_files(shell, args, stdin):
    flags, paths = options(args, "U")
    texts, errors = read_files(shell, "diff", paths, stdin)
    if len(texts) != 2 or errors:
        return "", errors or "diff: missing operand\n", 2
    (old, a), (new, b) = ((name, lines_of(text)) for name, text in texts)
    if a == b:
        return "", "", 0
    if "u" in flags or "U" in flags:
        return "".join(difflib.unified_diff(a, b, old, new)), "", 1
    out = ""
    for tag, i, j, m, n in difflib.SequenceMatcher(None, a, b, autojunk=False).get_opcodes():
        if tag != "equal":
            left, right = (f"{x + 1},{y}" if y > x + 1 else str(y if y == x else x + 1) for x, y in ((i, j), (m, n)))
            out += f"{left}{tag[0] if tag != 'replace' else 'c'}{right}\n" + "".join(f"< {line}" for line in a[i:j])
            out += "---\n" * (tag == "replace") + "".join(f"> {line}" for line in b[m:n])
    return out, "", 1


@command("tee")
def tee(shell, args, stdin):
    flags, paths = options(args)
    return written(shell, "tee", [(path, stdin, "a" in flags) for path in paths], stdin)


@command("touch")
def touch(shell, args, stdin):
    return written(shell, "touch", [(path, "", True) for path in options(args)[1]])


def written(shell, name, files, out=""):
    errors = ""
    for path, text, append in files:
        try:
            shell.write(path, text, append)
        except OSError as error:
            errors += f"{name}: cannot touch '{path}': {error.args[0]}\n"
    return out, errors, int(bool(errors))


@command("mkdir")
def mkdir(shell, args, stdin):
    for path in options(args)[1][:50]:
        shell.folders.add(shell.path(path))
    return "", "", 0


@command("rm", "rmdir")
def rm(shell, args, stdin):
    flags, paths = options(args)
    errors = ""
    for path in paths:
        full = shell.path(path)
        inside = [p for p in shell.tree if p.startswith(full.rstrip("/") + "/")]
        if full in shell.tree:
            del shell.tree[full]
        elif shell.is_folder(full) and {"r", "R"} & flags.keys():
            for other in inside:
                del shell.tree[other]
            shell.folders = {f for f in shell.folders if f != full and not f.startswith(full + "/")}
        elif shell.is_folder(full):
            errors += f"rm: cannot remove '{path}': Is a directory\n"
        elif "f" not in flags:
            errors += f"rm: cannot remove '{path}': No such file or directory\n"
    return "", errors, int(bool(errors))


def copies(name):
    def run(shell, args, stdin):
        paths = options(args)[1]
        if len(paths) < 2:
            return "", f"{name}: missing file operand\n", 1
        *sources, target = paths
        errors = ""
        for source in sources:
            full, into = shell.path(source), shell.path(target)
            if full not in shell.tree:
                reason = "-r not specified; omitting directory" if shell.is_folder(full) else "cannot stat"
                errors += f"{name}: {reason} '{source}'" + ("\n" if shell.is_folder(full) else ": No such file or directory\n")
                continue
            into = f"{into}/{full.rpartition('/')[2]}" if shell.is_folder(into) else into
            text = shell.tree[full]
            _, error, _ = written(shell, name, [(into, text, False)])
            errors += error
            if name == "mv" and not error and into != full:
                del shell.tree[full]
        return "", errors, int(bool(errors))

    return run


COMMANDS |= {name: copies(name) for name in ("cp", "mv")}


@command("test", "[")
def test(shell, args, stdin):
    args = args[:-1] if args and args[-1] == "]" else args
    negate = bool(args) and args[0] == "!"
    args = args[1:] if negate else args
    if len(args) == 2 and args[0] in ("-f", "-d", "-e", "-s"):
        path = shell.path(args[1])
        result = {"-f": path in shell.tree, "-d": shell.is_folder(path), "-s": bool(shell.tree.get(path))}.get(
            args[0], path in shell.tree or shell.is_folder(path)
        )
    elif len(args) == 2 and args[0] in ("-n", "-z"):
        result = bool(args[1]) == (args[0] == "-n")
    elif len(args) == 3 and args[1] in ("=", "==", "!="):
        result = (args[0] == args[2]) == (args[1] != "!=")
    else:
        result = len(args) == 1 and bool(args[0])
    return "", "", int(result == negate)


@command("which", "command", "type")
def which(shell, args, stdin):
    names = [name for name in args if not name.startswith("-")]
    found = [name for name in names if name in COMMANDS]
    return "".join(f"/usr/bin/{name}\n" for name in found), "", int(len(found) < len(names))


@command("basename", "dirname")
def basename(shell, args, stdin):
    return "".join(arg.rstrip("/").rpartition("/")[2] + "\n" for arg in args[:1]), "", int(not args)


@command("pip", "pip3", "apt-get", "apt", "conda")
def pip(shell, args, stdin):
    return "", "ERROR: there is no network in this sandbox; pytest and the standard library are there\n", 1


@command("python", "python3")
def python(shell, args, stdin):
    args = [arg for arg in args if not re.fullmatch(r"-[BuIsWE]+", arg)]
    if args[:1] == ["-m"] and len(args) > 1:
        if args[1] == "pytest":
            return pytest(shell, args[2:])
        if args[1] in ("py_compile", "compileall"):
            return compile_files(shell, args[2:])
        if args[1] in ("pip", "unittest"):
            return "", f"python: -m {args[1]} is not emulated in this sandbox; use pytest\n", 1
        return "", f"/usr/bin/python: No module named {args[1]}\n", 1
    if args[:1] in (["--version"], ["-V"]):
        return "Python 3.11.9\n", "", 0
    if args[:1] == ["-c"] and len(args) > 1:
        source, path, rest = args[1], "<string>", args[2:]
    elif not args or args[0] == "-":
        source, path, rest = stdin, "<stdin>", args[1:]
    else:
        path, rest = shell.path(args[0]), args[1:]
        if path not in shell.tree:
            return "", f"python: can't open file '{path}': [Errno 2] No such file or directory\n", 2
        source = shell.tree[path]
    out, code, shell.steps = run_script(shell.tree, source, path, shell.cwd, [path, *rest], shell.steps)
    return out, "", code


def compile_files(shell, args):
    errors = ""
    for path in options(args)[1]:
        try:
            ast.parse(shell.tree.get(shell.path(path), ""))
        except (SyntaxError, ValueError) as error:
            errors += f'  File "{path}", line {getattr(error, "lineno", 1)}\nSyntaxError: {error.args[0]}\n'
    return "", errors, int(bool(errors))


@command("pytest", "py.test")
def run_pytest(shell, args, stdin):
    return pytest(shell, args)
