"""git of an episode: diff, status, checkout, restore, add and show over one commit; and patches, read as `git apply` reads them."""

import difflib
import hashlib
import re

HUNK = re.compile(r"@@ -(\d{1,7})(?:,(\d{1,7}))? \+(\d{1,7})(?:,(\d{1,7}))? @@")


class PatchError(ValueError):
    """A text that is no patch, or that does not fit the files."""


def git(shell, args, stdin):
    """The command: (output, errors, return code)."""
    while args[:1] == ["--no-pager"] or args[:1] == ["-C"]:
        args = args[1:] if args[0] == "--no-pager" else args[2:]
    if not args:
        return "", "usage: git [--version] [--help] [-C <path>] <command> [<args>]\n", 1
    name, *rest = args
    flags = [arg for arg in rest if arg.startswith("-") and arg != "--"]
    words = [arg for arg in rest if not arg.startswith("-")]
    now = {path.removeprefix(f"{ROOT}/"): text for path, text in shell.tree.items() if path.startswith(f"{ROOT}/")}
    if name == "diff":
        staged = "--cached" in flags or "--staged" in flags
        head = "HEAD" in words
        words = [word for word in words if word != "HEAD"]
        old = shell.head if staged or head else shell.index
        new = shell.index if staged else {path: now[path] for path in {*shell.index, *old} if path in now}
        chosen, missing = selection(shell, words, {*old, *new, *now})
        if missing and "--" not in rest:
            return "", f"fatal: ambiguous argument '{missing}': unknown revision or path not in the working tree.\n", 128
        paths = [path for path in sorted({*old, *new} & chosen) if old.get(path) != new.get(path)]
        if "--name-only" in flags:
            return "".join(path + "\n" for path in paths), "", 0
        if "--stat" in flags:
            return stat(old, new, paths), "", 0
        return "".join(diff(path, old.get(path), new.get(path)) for path in paths), "", 0
    if name == "status":
        return status(shell, now, bool({"-s", "--short", "--porcelain"} & set(flags))), "", 0
    if name in ("checkout", "restore"):
        if not words or "-b" in flags:
            return "", f"error: git {name} of branches is not emulated in this sandbox\n", 1
        source = shell.head if "HEAD" in words else shell.index
        words = [word for word in words if word != "HEAD"]
        chosen, missing = selection(shell, words, set(source))
        if missing or not chosen & source.keys():
            return "", f"error: pathspec '{missing or ' '.join(words)}' did not match any file(s) known to git\n", 1
        for path in chosen & source.keys():
            shell.tree[f"{ROOT}/{path}"] = source[path]
        count = len(chosen & source.keys())
        return "", "" if name == "restore" or "--" in rest else f"Updated {count} path{'s' * (count != 1)} from the index\n", 0
    if name == "add":
        every = bool({"-A", "--all", "-u"} & set(flags))
        chosen, missing = selection(shell, [] if every else words, {*now, *shell.index})
        if missing or not (words or every):
            return "", f"fatal: pathspec '{missing}' did not match any files\n", 128
        for path in chosen:
            if path in now:
                shell.index[path] = now[path]
            else:
                shell.index.pop(path, None)
        return "", "", 0
    if name == "reset":
        shell.index = dict(shell.head)
        if "--hard" in flags:
            shell.tree |= {f"{ROOT}/{path}": text for path, text in shell.head.items()}
        return "", "", 0
    if name == "show" and words and words[0].startswith("HEAD:"):
        path = words[0].removeprefix("HEAD:").removeprefix("./")
        if path in shell.head:
            return shell.head[path], "", 0
        return "", f"fatal: path '{path}' does not exist in 'HEAD'\n", 128
    if name in ("log", "show"):
        mark = digest("".join(shell.head))
        return f"{mark[:7]} Initial commit\n" if "--oneline" in flags else f"commit {mark}\n\n    Initial commit\n", "", 0
    if name == "ls-files":
        return "".join(path + "\n" for path in sorted(shell.index)), "", 0
    if name == "rev-parse":
        return ROOT + "\n" if "--show-toplevel" in flags else digest("".join(shell.head)) + "\n", "", 0
    if name in ("branch", "config", "stash", "commit", "apply", "blame", "grep"):
        return "", f"git {name} is not emulated in this sandbox\n", 1
    return "", f"git: '{name}' is not a git command. See 'git --help'.\n", 1


def selection(shell, words, paths):
    """The paths that a command's words name, and the first word that names none."""
    if not words:
        return paths, None
    chosen = set()
    for word in words:
        full = shell.path(word)
        found = {path for path in paths if f"{ROOT}/{path}" == full or f"{ROOT}/{path}".startswith(full.rstrip("/") + "/")}
        if not found:
            return chosen, word
        chosen |= found
    return chosen, None


def status(shell, now, short):
    changed = [("M" if path in now else "D", path) for path, text in sorted(shell.index.items()) if now.get(path) != text]
    staged = [("A" if path not in shell.head else "M", path) for path, text in sorted(shell.index.items()) if shell.head.get(path) != text]
    new = [path for path in sorted(now) if path not in shell.index]
    if short:
        lines = (
            [f"{mark}  {path}" for mark, path in staged] + [f" {mark} {path}" for mark, path in changed] + [f"?? {path}" for path in new]
        )
        return "".join(line + "\n" for line in lines)
    lines = ["On branch main"]
    kinds = {"M": "modified:   ", "D": "deleted:    ", "A": "new file:   "}
    if staged:
        lines += ["", "Changes to be committed:", *(f"\t{kinds[mark]}{path}" for mark, path in staged)]
    if changed:
        lines += ["", "Changes not staged for commit:", *(f"\t{kinds[mark]}{path}" for mark, path in changed)]
    if new:
        lines += ["", "Untracked files:", *(f"\t{path}" for path in new)]
    if len(lines) == 1:
        lines.append("nothing to commit, working tree clean")
    return "\n".join(lines) + "\n"


def stat(old, new, paths):
    lines, plus, minus = [], 0, 0
    for path in paths:
        body = diff(path, old.get(path), new.get(path)).split("\n")[4:]
        a, b = sum(line.startswith("+") for line in body), sum(line.startswith("-") for line in body)
        plus, minus = plus + a, minus + b
        lines.append(f" {path} | {a + b} {'+' * min(a, 30)}{'-' * min(b, 30)}")
    if paths:
        lines.append(
            f" {len(paths)} file{'s' * (len(paths) > 1)} changed, "
            f"{plus} insertion{'s' * (plus != 1)}(+), {minus} deletion{'s' * (minus != 1)}(-)"
        )
    return "".join(line + "\n" for line in lines)


def digest(text):
    return hashlib.sha1(text.encode("utf-8", "surrogatepass")).hexdigest()


def diff(path, old, new):
    """The patch of one file, as `git diff` prints it; None stands for a file that is not there."""
    before, after = (old or "").splitlines(keepends=True), (new or "").splitlines(keepends=True)
    a, b = "0" * 9 if old is None else digest(old)[:9], "0" * 9 if new is None else digest(new)[:9]
    lines = [f"diff --git a/{path} b/{path}\n"]
    if old is None or new is None:
        lines += [f"{'new' if old is None else 'deleted'} file mode 100644\n", f"index {a}..{b}\n"]
    else:
        lines.append(f"index {a}..{b} 100644\n")
    names = ("/dev/null" if old is None else f"a/{path}", "/dev/null" if new is None else f"b/{path}")
    for line in difflib.unified_diff(before, after, *names):
        match = HUNK.match(line)
        if match:
            start = int(match[1]) - 1
            context = next((text.rstrip() for text in reversed(before[: max(0, start)]) if re.match(r"[A-Za-z_]", text)), "")
            line = line.rstrip("\n") + (f" {context[:60]}" if context else "") + "\n"
        if line.startswith(("---", "+++")) and not match:
            line = line.rstrip("\n\t ") + "\n"
        lines.append(line if line.endswith("\n") else line + "\n\\ No newline at end of file\n")
    return "".join(lines)


def apply_patch(files, patch):
    """The files with a patch applied; context must match, at the place that the hunk names or at another one.

    Raises:
      PatchError: no patch, or one that does not fit.
    """
    result, lines, position, hunks = dict(files), patch.split("\n"), 0, 0
    path = source = None
    while position < len(lines):
        line = lines[position]
        position += 1
        if line.startswith("--- ") and position < len(lines) and lines[position].startswith("+++ "):
            source, target = (text[4:].split("\t")[0].strip() for text in (line, lines[position]))
            position += 1
            path = (source if target == "/dev/null" else target).split("/", 1)[-1]
            if target == "/dev/null":
                result.pop(path, None)
                hunks += 1
            elif source != "/dev/null" and path not in result:
                raise PatchError(f"{path}: No such file or directory")
            elif source == "/dev/null":
                result[path] = ""
            deleted, shift = target == "/dev/null", 0
            continue
        match = HUNK.match(line)
        if match is None:
            continue
        if path is None:
            raise PatchError("a hunk before the name of its file")
        old, new, counts = [], [], [int(match[2] or 1), int(match[4] or 1)]
        while position < len(lines) and (len(old) < counts[0] or len(new) < counts[1]):
            text = lines[position]
            position += 1
            if text.startswith("\\"):
                continue
            if text[:1] in ("", " "):
                old.append(text[1:])
                new.append(text[1:])
            elif text[0] == "-":
                old.append(text[1:])
            elif text[0] == "+":
                new.append(text[1:])
            else:
                raise PatchError(f"corrupt patch at line {position}")
        if [len(old), len(new)] != counts:
            raise PatchError(f"corrupt patch at line {position}")
        hunks += 1
        if deleted:
            continue
        body = result[path].split("\n") if result[path] else []
        at = int(match[1]) - (1 if counts[0] else 0) + shift
        places = sorted((abs(start - at), start) for start in range(len(body) - len(old) + 1) if body[start : start + len(old)] == old)
        if not places:
            raise PatchError(f"patch failed: {path}:{match[1]}")
        start = places[0][1]
        body[start : start + len(old)] = new
        shift += len(new) - len(old)
        result[path] = "\n".join(body) + ("\n" if source == "/dev/null" else "")
    if not hunks:
        raise PatchError("No valid patches in input")
    return result
