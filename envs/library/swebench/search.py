"""The commands that look for lines and files: grep, find, xargs."""

import re


@command("grep", "egrep", "fgrep", "rg")
def grep(shell, args, stdin):
    flags, rest = options(args, "eABCm")
    patterns = flags.get("e") or rest[:1]
    paths = rest if "e" in flags else rest[1:]
    if not patterns:
        return "", "Usage: grep [OPTION]... PATTERNS [FILE]...\n", 2
    recursive = "r" in flags or "R" in flags
    numbers = {}
    for letter in "ABCm":
        value = str(flags.get(letter, ["0"])[-1])
        if not value.isdigit() or len(value) > 6:
            return "", f"grep: {value}: invalid context length argument\n", 2
        numbers[letter] = int(value)
    try:
        wanted = [
            Pattern(text, "E" in flags, "F" in flags, "P" in flags, "i" in flags, "w" in flags, "x" in flags)
            for pattern in patterns
            for text in pattern.split("\n")
        ]
    except PatternError as error:
        return "", f"grep: {error}\n", 2
    errors = ""
    if recursive:
        names = []
        for path in paths or ["."]:
            full = shell.path(path)
            if full in shell.tree:
                names.append((path, full))
            elif shell.is_folder(full):
                lead = "" if not paths else path.rstrip("/") + "/"
                names += [(lead + p[len(full.rstrip("/")) + 1 :], p) for p in sorted(shell.tree) if p.startswith(full.rstrip("/") + "/")]
            else:
                errors += f"grep: {path}: No such file or directory\n"
        for flag, keep in (("--include", True), ("--exclude", False)):
            globs = [str(glob) for glob in flags.get(flag, [])]
            if globs:
                names = [(n, p) for n, p in names if any(fits(p.rpartition("/")[2], g) for g in globs) == keep]
        folders = [str(glob) for glob in flags.get("--exclude-dir", [])]
        names = [(n, p) for n, p in names if not any(fits(part, g) for g in folders for part in n.split("/")[:-1])]
        texts = [(name, shell.tree[path]) for name, path in names]
    else:
        texts, errors = read_files(shell, "grep", paths, stdin)
    titled = ("H" in flags or len(texts) > 1 or recursive) and "h" not in flags
    out, found = [], False
    try:
        for name, text in texts:
            name = "(standard input)" if name == "-" else name
            part, hit = grep_text(text, wanted, flags, numbers, f"{name}" if titled else "")
            found |= hit
            if "c" in flags or "l" in flags or "L" in flags:
                if "c" in flags:
                    out.append((f"{name}:" if titled else "") + f"{len(part)}\n")
                elif hit == ("l" in flags):
                    out.append(name + "\n")
            else:
                out += (["--\n"] if out and part and numbers["A"] + numbers["B"] + numbers["C"] else []) + part
    except PatternError as error:
        return "", f"grep: {error}\n", 2
    return "" if "q" in flags else "".join(out), "" if "s" in flags else errors, 2 if errors else int(not found)


def grep_text(text, wanted, flags, numbers, name):
    """The lines to show of one text, and whether any matched."""
    lines = text.split("\n")
    lines = lines[:-1] if lines[-1] == "" else lines
    hits = [i for i, line in enumerate(lines) if any(p.search(line) for p in wanted) != ("v" in flags)]
    hits = hits[: numbers["m"]] if numbers["m"] else hits
    if "c" in flags:
        return hits, bool(hits)
    before, after = max(numbers["B"], numbers["C"]), max(numbers["A"], numbers["C"])
    shown, out, last = set(hits), [], None
    parted = before + after > 0 and "o" not in flags
    around = sorted({j for i in hits for j in range(max(0, i - before), min(len(lines), i + after + 1))})
    for i in around:
        if parted and last is not None and i > last + 1:
            out.append("--\n")
        last = i
        mark = ":" if i in shown else "-"
        prefix = (name + mark if name else "") + (f"{i + 1}{mark}" if "n" in flags else "")
        if "o" in flags:
            out += [f"{prefix}{match[0]}\n" for p in wanted for match in p.finditer(lines[i]) if match[0]] if i in shown else []
        else:
            out.append(f"{prefix}{lines[i]}\n")
    return out, bool(hits)


@command("find")
def find(shell, args, stdin):
    roots, position = [], 0
    while position < len(args) and not args[position].startswith(("-", "!", "(")):
        roots.append(args[position])
        position += 1
    tests, execute, negate = [], None, False
    while position < len(args):
        arg = args[position]
        value = args[position + 1] if position + 1 < len(args) else ""
        position += 2
        if arg in ("!", "-not"):
            negate, position = True, position - 1
            continue
        if arg in ("-name", "-iname"):
            fold = str.lower if arg == "-iname" else str
            test = lambda path, v=value, fold=fold: fits(fold(path.rpartition("/")[2]), fold(v))  # noqa: E731
        elif arg in ("-path", "-wholename"):
            test = lambda path, v=value: fits(path, v)  # noqa: E731
        elif arg == "-type":
            test = lambda path, v=value: shell.is_folder(shell.path(path)) == (v == "d")  # noqa: E731
        elif arg == "-maxdepth":
            test = lambda path, v=value: not v.isdigit() or path.count("/") <= min(int(v[:6]), 99)  # noqa: E731
        elif arg in ("-o", "-or"):
            tests.append(None)
            position -= 1
            continue
        elif arg in ("(", ")", "-print", "-a", "-and"):
            position -= 1
            continue
        elif arg == "-exec":
            end = next((i for i in range(position - 1, len(args)) if args[i] in (";", "+")), None)
            if end is None:
                return "", "find: missing argument to `-exec'\n", 1
            execute, position = args[position - 1 : end], end + 1
            continue
        else:
            return "", f"find: unknown predicate `{arg}'\n", 1
        tests.append((lambda path, test=test: not test(path)) if negate else test)
        negate = False
    out, errors = [], ""
    for root in roots or ["."]:
        full = shell.path(root)
        if full not in shell.tree and not shell.is_folder(full):
            errors += f"find: ‘{root}’: No such file or directory\n"
            continue
        inside = sorted(p for p in {*shell.tree, *shell.all_folders()} if p.startswith(full.rstrip("/") + "/"))
        paths = [root, *(root.rstrip("/") + p[len(full.rstrip("/")) :] for p in inside)]
        out += [path for path in paths if any(all(test(path) for test in group) for group in groups(tests))]
    if execute:
        return run_each(shell, [[path if word == "{}" else word for word in execute] for path in out], errors)
    return "".join(path + "\n" for path in out), errors, int(bool(errors))


def groups(tests):
    """The tests between the `-o`s."""
    found = [[]]
    for test in tests:
        if test is None:
            found.append([])
        else:
            found[-1].append(test)
    return found


def run_each(shell, calls, errors=""):
    out, code = "", 0
    for call in calls[:200]:
        run = COMMANDS.get(call[0])
        if run is None or call[0] in ("xargs", "find"):
            return out, f"{errors}{call[0]}: No such file or directory\n", 127
        text, error, code = run(shell, call[1:], "")
        out, errors = out + text, errors + error
        if len(out) > 300_000:
            return out, errors, 1
    return out, errors, code


@command("xargs")
def xargs(shell, args, stdin):
    each = None
    while args and args[0].startswith("-"):
        if args[0] == "-I" and len(args) > 1:
            each, args = args[1], args[2:]
        else:
            args = args[2:] if args[0] in ("-n", "-P") else args[1:]
    words = stdin.split("\n") if each else stdin.split()
    words = [word.strip("\0") for word in words if word]
    call = args or ["echo"]
    if each:
        return run_each(shell, [[part.replace(each, word) for part in call] for word in words])
    return run_each(shell, [[*call, *words]])
