"""The regular expressions of grep and sed as Python's, refused where matching could take very long.

An agent writes the pattern and a match has no deadline of its own, so a pattern may hold no repetition of a repetition, and the number of
ways in which its repetitions can share out a line is bounded.
"""

import math
import re

MAX_WAYS = 2e7  # about a second
CLASSES = {
    "alpha": "a-zA-Z", "digit": "0-9", "alnum": "a-zA-Z0-9", "space": r"\s", "upper": "A-Z", "lower": "a-z", "punct": r"!-/:-@\[-`{-~",
    "blank": " \t", "xdigit": "0-9a-fA-F", "word": r"\w",
}  # fmt: skip


class PatternError(ValueError):
    """A pattern that is wrong, or that this sandbox refuses."""


class Pattern:
    """A compiled pattern. `search` and the like raise PatternError where a text is too long for it."""

    def __init__(self, text, extended=False, fixed=False, perl=False, ignore_case=False, word=False, line=False):
        source = re.escape(text) if fixed else text if perl else translate(text, extended)
        if not fixed:
            self.repetitions = repetitions(source)
        else:
            self.repetitions = 0
        if word:
            source = rf"(?<!\w)(?:{source})(?!\w)"
        if line:
            source = rf"^(?:{source})$"
        try:
            self.regex = re.compile(source, re.IGNORECASE if ignore_case else 0)
        except (re.error, OverflowError, RecursionError) as error:
            raise PatternError(f"Invalid regular expression: {error}") from None

    def check(self, text):
        if self.repetitions and math.comb(len(text) + self.repetitions, min(self.repetitions, 12)) > MAX_WAYS:
            raise PatternError("this pattern is too expensive for a line as long as this; use fewer repetitions")

    def search(self, text):
        self.check(text)
        return self.regex.search(text)

    def finditer(self, text):
        self.check(text)
        return self.regex.finditer(text)


def translate(text, extended):
    """A basic or extended POSIX expression as Python writes it."""
    out, position = [], 0
    special = "(){}|+?"
    while position < len(text):
        char = text[position]
        after = text[position + 1 : position + 2]
        if char == "\\":
            if not after:
                raise PatternError("Trailing backslash")
            if after in special:
                out.append(("\\" if extended else "") + after)
            elif after in "<>":
                out.append(r"\b")
            elif after in "wWsSbB.*[]^$\\/" or after.isdigit():
                out.append("\\" + after)
            elif after in "nt":
                out.append({"n": "\n", "t": "\t"}[after])
            else:
                out.append(re.escape(after))
            position += 2
        elif char == "[":
            end = position + 1
            end += text.startswith("^", end)
            end += text.startswith("]", end)
            while end < len(text) and text[end] != "]":
                end = text.find(":]", end) + 2 if text.startswith("[:", end) and ":]" in text[end:] else end + 1
            if end >= len(text):
                raise PatternError("Unmatched [, [^, [:, [., or [=")
            inner = text[position + 1 : end]
            lead = "^" if inner.startswith("^") else ""
            inner = inner[len(lead) :].replace("\\", "\\\\")
            classes = re.findall(r"\[:(\w+):\]", inner)
            inner = re.sub(r"([\[\]&~|])", r"\\\1", re.sub(r"\[:\w+:\]", "", inner))
            out.append(f"[{lead}{inner}{''.join(CLASSES.get(name, '') for name in classes)}]")
            position = end + 1
        elif char in special and not extended:
            out.append("\\" + char)
            position += 1
        elif char == "*" and (not out or out[-1] in ("(", "|", "^")):
            out.append(r"\*")
            position += 1
        elif char == "{" and not re.match(r"\{\d*,?\d*\}", text[position:]):
            out.append(r"\{")
            position += 1
        elif char == "^" and position and not extended and text[position - 1] not in "(|":
            out.append(r"\^")
            position += 1
        elif char == "$" and not extended and after and text[position + 1 : position + 3] not in (r"\)", r"\|"):
            out.append(r"\$")
            position += 1
        else:
            out.append(char)
            position += 1
    return "".join(out)


def repetitions(source):
    """How many repetitions without a bound a Python expression has.

    Raises:
      PatternError: a group that is repeated and holds a repetition or an alternative.
    """
    count, stack, position, closed = 0, [False], 0, None
    while position < len(source):
        char = source[position]
        step, group = 1, None
        if char == "\\":
            step = 2
        elif char == "[":
            end = position + 1
            end += source.startswith("^", end)
            end += source.startswith("]", end)
            while end < len(source) and source[end] != "]":
                end += 2 if source[end] == "\\" else 1
            step = end + 1 - position
        elif char == "(":
            stack.append(False)
            step = 1 + (source.startswith("?", position + 1) and not source.startswith("?P<", position + 1))
        elif char == ")" and len(stack) > 1:
            group = stack.pop()
            stack[-1] |= group
        elif char == "|":
            stack[-1] = True
        elif char in "*+?{":
            many = char in "*+" or (char == "{" and re.match(r"\{\d*(,?)\d*\}", source[position:]))
            if many:
                if closed:
                    raise PatternError("repetitions inside repetitions are refused in this sandbox")
                count += 1
                stack[-1] = True
            if char == "{" and any(int(number) > 200 for number in re.findall(r"\d+", source[position : position + 12])):
                raise PatternError("Regular expression too big")
        closed = group
        position += step
    return count


def fits(name, glob):
    """Whether a name fits a glob with `*`, `?` and sets, in time that grows with the product of their lengths."""
    items = [part for part in re.findall(r"\[[!^]?\]?[^\]]*\]|.", glob, re.DOTALL)]
    place = at = 0
    star = mark = None
    while place < len(name):
        item = items[at] if at < len(items) else None
        if item == "*":
            star, mark, at = at, place, at + 1
        elif item is not None and (item in ("?", name[place]) or (len(item) > 1 and in_set(name[place], item[1:-1]))):
            place, at = place + 1, at + 1
        elif star is not None:
            mark += 1
            place, at = mark, star + 1
        else:
            return False
    return all(item == "*" for item in items[at:])


def in_set(char, text):
    """Whether a character is in the set `a-z0` of a glob, or not in `!a-z0`."""
    negated = text[:1] in ("!", "^")
    text = text[negated:]
    found = any(
        text[i] == char or (text[i + 1 : i + 2] == "-" and i + 2 < len(text) and text[i] <= char <= text[i + 2]) for i in range(len(text))
    )
    return found != negated


def regular(kind):
    """A function of the module `re` for interpreted programs, with the same bounds as the patterns of grep."""

    def call(pattern, *rest, flags=0, count=0):
        new, text = (rest[0], rest[1]) if kind == "sub" else (None, rest[0])
        if not all(isinstance(part, str) for part in (pattern, text)):
            raise TypeError("expected string or bytes-like object")
        known = Pattern(".", perl=True)
        known.repetitions = repetitions(pattern)  # before it is compiled: this refuses what would be huge
        regex = re.compile(pattern, flags | (rest[-1] if len(rest) > 1 + (kind == "sub") else 0))
        across = regex.flags & re.DOTALL or re.search(r"\[\^|\\[sSDWn]|\n", pattern)  # a repetition may run over line ends
        for line in [text] if across else text.split("\n"):
            known.check(line)
        if kind != "sub":
            found = getattr(regex, kind)(text)
            return list(found) if kind == "finditer" else found
        size = sum(len(match[0]) for match in regex.finditer(text)) if callable(new) else len(new) * len(regex.findall(text))
        if size > 200_000:
            raise MemoryError("this value is more than the sandbox allows")
        return regex.sub(new, text, count=count)

    return call


REGULAR = {kind: regular(kind) for kind in ("search", "match", "fullmatch", "findall", "finditer", "split", "sub")}
REGULAR |= {"escape": re.escape} | {name: int(getattr(re, name)) for name in ("MULTILINE", "M", "DOTALL", "S", "IGNORECASE", "I")}
