"""sed, with the commands that agents use to show and change lines: p d s a i c = q, addresses and ranges, -n -i -E -e."""

import re

MAX_TEXT = 300_000


class SedError(Exception):
    """A script that is wrong or not emulated."""


def sed(shell, args, stdin):
    """The command: (output, errors, return code)."""
    scripts, paths, quiet, extended, in_place, suffix = [], [], False, False, False, ""
    position = 0
    while position < len(args):
        arg = args[position]
        position += 1
        if arg in ("-e", "--expression") and position < len(args):
            scripts.append(args[position])
            position += 1
        elif arg.startswith("--in-place"):
            in_place = True
        elif arg in ("--quiet", "--silent"):
            quiet = True
        elif re.fullmatch(r"-[nErzs]*(i\S*)?", arg) and arg != "-":
            letters, mark, rest = arg[1:].partition("i")
            quiet |= "n" in letters
            extended |= "E" in letters or "r" in letters
            in_place |= bool(mark)
            suffix = rest or suffix
        elif re.fullmatch(r"-[nEr]*e", arg) and position < len(args):
            quiet |= "n" in arg
            extended |= "E" in arg or "r" in arg
            scripts.append(args[position])
            position += 1
        elif arg.startswith("-") and arg != "-":
            return "", f"sed: invalid option -- '{arg.lstrip('-')}'\n", 1
        else:
            paths.append(arg)
    if not scripts:
        if not paths:
            return "", "Usage: sed [OPTION]... {script-only-if-no-other-script} [input-file]...\n", 1
        scripts.append(paths.pop(0))
    try:
        program = parse_sed("\n".join(scripts), extended)
    except (SedError, PatternError) as error:
        return "", f"sed: -e expression #1, char 0: {error}\n", 1
    out, errors = [], ""
    texts = [("-", stdin)] if not paths else []
    for path in paths:
        full = shell.path(path)
        if full in shell.tree:
            texts.append((path, shell.tree[full]))
        else:
            folder = shell.is_folder(full)
            errors += (
                f"sed: couldn't edit {path}: not a regular file\n" if folder else f"sed: can't read {path}: No such file or directory\n"
            )
    try:
        for path, text in texts:
            changed = run_sed(program, text, quiet)
            if not in_place:
                out.append(changed)
                continue
            if suffix:
                shell.write(path + suffix, text)
            shell.write(path, changed)
    except (SedError, PatternError, OSError) as error:
        return "".join(out), f"{errors}sed: {error}\n", 4
    return "".join(out), errors, 2 if errors else 0


def parse_sed(script, extended):
    """[(first address, last address, negated, command, argument)]; an address is a number, "$", a Pattern or ("+", n)."""
    program, position = [], 0

    def address(position):
        match = re.compile(r"\d{1,9}|\$|\+\d{1,9}").match(script, position)
        if match:
            text = match[0]
            return ("+", int(text[1:])) if text[0] == "+" else text if text == "$" else int(text), match.end()
        if script.startswith("/", position) or script.startswith("\\", position):
            mark = position + (script[position] == "\\")
            text, end = delimited(script, mark + 1, script[mark : mark + 1])
            ignore = script.startswith("I", end)
            return Pattern(text, extended, ignore_case=ignore), end + ignore
        return None, position

    while position < len(script):
        if script[position] in " \t\n;":
            position += 1
            continue
        if script[position] == "#":
            position = script.find("\n", position) if "\n" in script[position:] else len(script)
            continue
        first, position = address(position)
        last = None
        while position < len(script) and script[position] == " ":
            position += 1
        if first is not None and script.startswith(",", position):
            start = position + 1
            while start < len(script) and script[start] == " ":
                start += 1
            last, position = address(start)
            if last is None:
                raise SedError("unexpected `,'")
        while position < len(script) and script[position] == " ":
            position += 1
        negated = script.startswith("!", position)
        position += negated
        name = script[position : position + 1]
        position += 1
        argument = None
        if name == "s":
            mark = script[position : position + 1]
            if not mark or mark in "\n\\":
                raise SedError("unterminated `s' command")
            text, position = delimited(script, position + 1, mark)
            new, position = delimited(script, position, mark, keep=True)
            flags = re.compile(r"[gpiIm0-9]*").match(script, position)[0]
            position += len(flags)
            argument = (Pattern(text, extended, ignore_case="i" in flags.lower()), new, flags)
        elif name in ("a", "i", "c"):
            rest = script[position:]
            match = re.match(r"[ \t]*\\\n|[ \t]*\\(?!n)|[ \t]*", rest)
            body = rest[match.end() :]
            lines, end = [], 0
            while True:  # a line that ends in a backslash goes on
                newline = body.find("\n", end)
                line = body[end:] if newline < 0 else body[end:newline]
                end = len(body) if newline < 0 else newline + 1
                if line.endswith("\\") and newline >= 0:
                    lines.append(line[:-1])
                    continue
                lines.append(line)
                break
            position += match.end() + end
            argument = re.sub(r"\\(.)", lambda m: {"n": "\n", "t": "\t"}.get(m[1], m[1]), "\n".join(lines))
        elif name not in ("p", "d", "=", "q", "{", "}"):
            raise SedError(f"unknown command: `{name or 'missing'}'")
        program.append((first, last, negated, name, argument))
    depth = 0
    for _, _, _, name, _ in program:
        depth += {"{": 1, "}": -1}.get(name, 0)
        if depth < 0:
            raise SedError("unexpected `}'")
    if depth:
        raise SedError("unmatched `{'")
    return program


def delimited(script, position, mark, keep=False):
    """The text up to an unescaped mark, and the place after it; `keep` leaves backslashes before other characters."""
    out, inside = [], False
    while position < len(script):
        char = script[position]
        if char == "\\" and position + 1 < len(script):
            after = script[position + 1]
            out.append(after if after == mark and (keep or after not in r"|.*[]^$+?(){}") else char + after)
            position += 2
            continue
        if char == mark and not inside:
            return "".join(out), position + 1
        if not keep and char == "[" and not inside:
            inside = "]" in script[position + 2 :].split(mark)[0]
        elif char == "]":
            inside = False
        out.append(char)
        position += 1
    raise SedError("unterminated `s' command" if keep else "unterminated address regex")


def run_sed(program, text, quiet):
    """The script applied to a text."""
    lines = text.split("\n")
    ended = lines[-1] == ""
    lines = lines[:-1] if ended else lines
    out, active, size = [], {}, 0
    for number, line in enumerate(lines, start=1):
        deleted, after, leave, skip = False, [], False, 0
        for index, (first, last, negated, name, argument) in enumerate(program):
            if skip:
                skip += {"{": 1, "}": -1}.get(name, 0)
                continue
            hit = sed_selects(index, first, last, active, number, line, len(lines)) != negated
            if name == "{":
                skip = 0 if hit else 1
                continue
            if not hit or name == "}":
                continue
            if name == "p":
                out.append(line)
            elif name == "=":
                out.append(str(number))
            elif name == "d":
                deleted = True
                break
            elif name == "q":
                leave = True
                break
            elif name == "i":
                out.append(argument)
            elif name == "a":
                after.append(argument)
            elif name == "c":
                deleted = True
                if last is None or negated or not active.get(index):
                    out.append(argument)
                break
            else:
                line, changed = sed_substitute(line, *argument)
                if changed and "p" in argument[2]:
                    out.append(line)
        if not deleted and not quiet:
            out.append(line)
        out += after
        size += len(line) + 1 + sum(map(len, after))
        if size > MAX_TEXT:
            raise SedError("the output is more than the sandbox allows")
        if leave:
            break
    return "\n".join(out) + ("\n" if out and (ended or len(out) > len(lines)) else "")


def sed_selects(index, first, last, active, number, line, count):
    """Whether a command applies to a line; `active` remembers until which line, or pattern, a range runs."""

    def meets(address):
        return number == (count if address == "$" else address) if isinstance(address, int | str) else bool(address.search(line))

    if first is None:
        return True
    if last is None:
        return meets(first)
    if active.get(index):
        end = active[index]
        if isinstance(end, Pattern) and end.search(line) or isinstance(end, int) and number >= end:
            active[index] = None
        return True
    if not meets(first):
        return False
    end = number + last[1] if isinstance(last, tuple) else count if last == "$" else last
    active[index] = end if not isinstance(end, int) or end > number else None
    return True


def sed_substitute(line, pattern, new, flags):
    """s/pattern/new/flags on one line: (line, whether it changed)."""
    number = int(re.sub(r"\D", "", flags)[:6] or 1)
    out, position, count = [], 0, 0
    for match in pattern.finditer(line):
        count += 1
        if count < number:
            continue
        out += [line[position : match.start()], replacement(match, new)]
        position = match.end()
        if "g" not in flags:
            break
    if sum(map(len, out)) > MAX_TEXT:
        raise SedError("the line is more than the sandbox allows")
    return "".join(out) + line[position:], count >= number


def replacement(match, new):
    def part(escape):
        if escape[0] == "&":
            return match[0]
        char = escape[1]
        if char.isdigit():
            if int(char) > (match.re.groups or 0):
                raise SedError(f"invalid reference \\{char} on `s' command's RHS")
            return match[int(char)] or ""
        return {"n": "\n", "t": "\t"}.get(char, char)

    return re.sub(r"\\(.)|&", part, new, flags=re.DOTALL)
