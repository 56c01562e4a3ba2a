"""pytest inside the episode: test functions of the tree, run by the interpreter, reported as pytest reports them."""

import ast
import re

WIDTH = 80


def banner(text, mark="="):
    return f" {text} ".center(WIDTH, mark)


def pytest(shell, args):
    """The command: (output, errors, return code)."""
    targets, keyword, verbose, quiet, stop, position = [], None, 0, False, False, 0
    while position < len(args):
        arg = args[position]
        position += 1
        if arg == "-k" and position < len(args):
            keyword, position = args[position], position + 1
        elif arg in ("-m", "-p", "-n", "-o", "-c", "--timeout"):
            position += 1
        elif re.fullmatch(r"-[xvsqlrAaf]+", arg):
            verbose += arg.count("v")
            quiet |= "q" in arg
            stop |= "x" in arg
        elif not arg.startswith("-"):
            targets.append(arg)
    items, problems = [], []
    for target in targets or ["."]:
        path, _, names = target.partition("::")
        full = shell.path(path)
        files = [full] if full in shell.tree else []
        if shell.is_folder(full):
            inside = [p for p in sorted(shell.tree) if p.startswith(full.rstrip("/") + "/")]
            files = [p for p in inside if re.fullmatch(r"test_.*\.py|.*_test\.py", p.rpartition("/")[2])]
        elif not files:
            return f"ERROR: file or directory not found: {target}\n\n", "", 4
        for file in files:
            try:
                tree = parsed(shell.tree[file], file)
            except (SyntaxError, ValueError, RecursionError) as error:
                problems.append((file, f"E   {type(error).__name__}: {error}"))
                continue
            found = [n.name for n in tree.body if isinstance(n, ast.FunctionDef) and n.name.startswith("test")]
            if names and names.split("[")[0] not in found:
                return f"ERROR: not found: {full}::{names}\n(no match in any of [<Module {path}>])\n\n", "", 4
            items.append((file, [name for name in found if not names or name == names.split("[")[0]]))
    try:
        chosen = matcher(keyword)
    except ValueError as error:
        return f"ERROR: Wrong expression passed to '-k': {keyword}: {error}\n", "", 4
    total = sum(len(names) for _, names in items)
    items = [(file, [name for name in names if chosen(name)]) for file, names in items]
    picked = sum(len(names) for _, names in items)
    return report(shell, items, problems, total - picked, verbose, quiet, stop)


def matcher(keyword):
    """Whether a name fits a -k expression of words, `and`, `or`, `not` and parentheses."""
    if not keyword:
        return lambda name: True
    words = re.findall(r"[()]|[^\s()]+", keyword)
    if len(words) > 40:
        raise ValueError("too long")

    def either(at):
        value, at = both(at)
        while at < len(words) and words[at] == "or":
            right, at = both(at + 1)
            value = (lambda a, b: lambda name: a(name) or b(name))(value, right)
        return value, at

    def both(at):
        value, at = single(at)
        while at < len(words) and words[at] == "and":
            right, at = single(at + 1)
            value = (lambda a, b: lambda name: a(name) and b(name))(value, right)
        return value, at

    def single(at):
        if at >= len(words) or words[at] in ("and", "or", ")"):
            raise ValueError("expected an identifier")
        if words[at] == "not":
            value, at = single(at + 1)
            return lambda name: not value(name), at
        if words[at] == "(":
            value, at = either(at + 1)
            if at >= len(words) or words[at] != ")":
                raise ValueError("expected right parenthesis")
            return value, at + 1
        word = words[at].lower()
        return lambda name: word in name.lower(), at + 1

    value, at = either(0)
    if at < len(words):
        raise ValueError("unexpected text at the end")
    return value


def report(shell, items, problems, left_out, verbose, quiet, stop):
    count = sum(len(names) for _, names in items)
    lines = (
        [] if quiet else [banner("test session starts"), "platform linux -- Python 3.11.9, pytest-8.3.3, pluggy-1.5.0", f"rootdir: {ROOT}"]
    )
    if not quiet:
        extra = f" / {left_out} deselected / {count} selected" if left_out else ""
        lines += [f"collected {count + left_out} item{'s' * (count + left_out != 1)}{extra}", ""]
    failures, passed, done = [], 0, 0
    for file, names in items:
        shown, marks = file.removeprefix(f"{ROOT}/"), ""
        if not names:
            continue
        python, problem = load(shell, file)
        if problem:
            problems.append((file, problem))
            continue
        for name in names:
            done += 1
            failure = run_test(python, file, name)
            shell.steps = python.steps
            failures += [(shown, name, failure)] if failure else []
            passed += failure is None
            marks += "F" if failure else "."
            if verbose:
                lines.append(f"{shown}::{name} {'FAILED' if failure else 'PASSED'}".ljust(WIDTH - 7) + f"[{100 * done // count:3}%]")
            if failure and stop:
                break
        if not verbose:
            lines.append(f"{shown} {marks}".ljust(WIDTH - 7) + f"[{100 * done // max(1, count):3}%]")
        if failures and stop:
            break
    if problems:
        lines += ["", banner("ERRORS")]
        for file, text in problems:
            lines += [banner(f"ERROR collecting {file.removeprefix(f'{ROOT}/')}", "_"), text]
    if failures:
        lines += ["", banner("FAILURES")]
        for _, name, (text, _) in failures:
            lines += [banner(name, "_"), "", text, ""]
    if failures or problems:
        lines.append(banner("short test summary info"))
        lines += [f"ERROR {file.removeprefix(f'{ROOT}/')}" for file, _ in problems]
        lines += [f"FAILED {shown}::{name} - {short}" for shown, name, (_, short) in failures]
    parts = [
        f"{n} {word}"
        for n, word in ((len(failures), "failed"), (passed, "passed"), (left_out, "deselected"), (len(problems), "error"))
        if n
    ]
    lines.append(banner(f"{', '.join(parts) or 'no tests ran'} in 0.05s"))
    code = 2 if problems else 1 if failures else 0 if passed else 5
    return "\n".join(lines) + "\n", "", code


def load(shell, file):
    """A test file as a module: (interpreter, None), or (None, what went wrong)."""
    python = Python(dict(shell.tree), ROOT, steps=shell.steps)
    name = file.rpartition("/")[2].removesuffix(".py")
    try:
        python.run_module(name, file, shell.tree[file])
    except Unsupported as limit:
        return None, f"E   NotImplementedError: {limit}; this test is run when you submit"
    except Exit:
        return None, "E   SystemExit"
    except Exception as error:  # whatever the program raises is the program's
        return None, located(python, error)
    return python, None


def run_test(python, file, name):
    """Runs one test: None, or (the report, its last line)."""
    module = python.modules[file.rpartition("/")[2].removesuffix(".py")]
    python.detail, python.failed = None, None
    try:
        module.env.vars[name]()
    except Unsupported as limit:
        return f"E   NotImplementedError: {limit}; this test is run when you submit", "NotImplementedError"
    except Exit:
        return "E   SystemExit", "SystemExit"
    except Exception as error:
        short = describe(error)
        if isinstance(error, AssertionError) and not error.args and python.detail:
            short = f"assert {python.detail}"
        return located(python, error, short), short
    return None


def located(python, error, short=None):
    """The lines around each place that an exception came through."""
    short = short or describe(error)
    frames = [frame for frame in (python.trace if python.failed is error else []) if frame[0] in python.tree]
    lines = []
    for index, (path, number, _) in enumerate(frames):
        source = python.tree[path].split("\n")
        start = number - 1
        while start > 0 and number - start < 12 and not re.match(r"\s*(def|class) ", source[start]):
            start -= 1
        lines += [f"    {text}".rstrip() for text in source[start : number - 1]]
        lines.append(f">   {source[number - 1]}")
        last = index == len(frames) - 1
        if last:
            lines.append(f"E   {short}")
        lines += ["", f"{path.removeprefix(f'{ROOT}/')}:{number}: {type(error).__name__ if last else ''}".rstrip()]
    return "\n".join(lines) if frames else f"E   {short}"
