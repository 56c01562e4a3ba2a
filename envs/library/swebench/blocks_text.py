"""Building blocks about text: settings, codes, fields, lines, short forms, control digits."""


@block
def settings_text(w):
    f, mark = w.name("read_settings", "parse_settings", "load_options"), w.rng.choice(["=", ":"])
    code = f'''
def {f}(text):
    """Settings from lines of the form `key {mark} value`.

    Empty lines and lines that begin with # are skipped. A value may hold a {mark} itself. The last line of a key counts.
    """
    values = {{}}
    for line in text.splitlines():
        line = line.strip()
        if not line «operator|or|and» line.startswith("#"):
            continue
        key, _, value = line.«operator|partition|rpartition»("{mark}")
        values[key.strip()] = value.strip()
    return values
'''

    def cases(rng):
        a, b, c = words(rng, 3)
        lines = [f"{a} {mark} {rng.randint(1, 99)}", f"{b}{mark}{c}{mark}{rng.randint(1, 9)}", f"# {c}", "", f"{c}{mark} {a}"]
        rng.shuffle(lines)
        return [], f"{f}({chr(10).join(lines)!r})"

    return code, cases, f


@block
def codes(w):
    f, width = w.name("clean_code", "normal_code", "tidy_reference"), w.rng.randint(6, 8)
    code = f'''
def {f}(text):
    """The normal form of a {w.item} code: no spaces or dashes, upper case, the digits padded with zeros to {width} characters in all."""
    text = text.replace(" ", "").replace("-", "").upper()
    letters = ""
    while text and text[0].isalpha():
        letters += text[0]
        text = «off_by_one|text[1:]|text[:-1]»
    return letters + text.rjust({width} «operator|-|+» len(letters), "0")
'''

    def cases(rng):
        letters = "".join(rng.choices("abcxyz", k=rng.randint(1, 3)))
        return [], f"{f}({f' {letters}-{rng.randint(1, 99)} '!r})"

    return code, cases, f


@block
def quoted(w):
    f, mark = w.name("split_fields", "read_fields", "cells_of"), w.rng.choice([",", ";"])
    code = f'''
def {f}(line):
    """The fields of a line that are parted by "{mark}".

    Between single quotes the mark is part of the field; two quotes in a row inside them stand for one.
    """
    fields, current, inside, position = [], "", False, 0
    while position < len(line):
        char = line[position]
        if char == "'" and inside and line[position + 1 : position + 2] == "'":
            current += char
            position += «off_by_one|1|2»
        elif char == "'":
            inside = not inside
        elif char == "{mark}" «operator|and not inside|or inside»:
            fields.append(current)
            current = ""
        else:
            current += char
        position += 1
    fields.append(current)
    return fields
'''

    def cases(rng):
        a, b, c = words(rng, 3)
        parts = rng.sample([a, f"'{b}{mark}{c}'", f"'{c}''{b}s{mark}'", f"{rng.randint(1, 9)}"], rng.randint(2, 4))
        return [], f"{f}({mark.join(parts)!r})"

    return code, cases, f


@block
def ranges(w):
    f = w.name("compact_numbers", "as_ranges", "range_text")
    code = f'''
def {f}(values):
    """Whole numbers as text: neighbours become a range, as in "1-3,7,9-10"; order and repetition do not matter."""
    parts = []
    for value in sorted(«operator|set(values)|values»):
        if parts and value == parts[-1][1] «off_by_one|+ 1|+ 2»:
            parts[-1][1] = value
        else:
            parts.append([value, value])
    return ",".join(str(low) if low == high else f"{{low}}-{{high}}" for low, high in parts)
'''

    def cases(rng):
        return [], f"{f}({numbers(rng, rng.randint(4, 9), 1, 12)})"

    return code, cases, f


@block
def wrapping(w):
    f, width = w.name("wrap_words", "fill_lines", "break_lines"), w.rng.randint(12, 18)
    code = f'''
def {f}(text, width={width}):
    """The text in lines of at most `width` characters, broken at spaces; a longer word has a line of its own."""
    lines, current = [], ""
    for word in text.split():
        if not current:
            current = word
        elif len(current) + «off_by_one|1 + |»len(word) «boundary|<=|<» width:
            current += " " + word
        else:
            lines.append(current)
            current = word
    if current:
        lines.append(current)
    return lines
'''

    def cases(rng):
        return [], f"{f}({' '.join(rng.choices(WORDS, k=7))!r}, {rng.randint(9, 14)})"

    return code, cases, f


@block
def checksums(w):
    f, g, m = (
        w.name("check_digit", "control_digit", "parity_digit"),
        w.name("is_valid", "valid_number", "passes_check"),
        w.rng.randint(7, 10),
    )
    code = f'''
def {f}(digits):
    """The control digit of a {w.item} number: digits weighted 3, 1, 3, 1, ... from the right, what is missing to a multiple of {m}."""
    total = 0
    for position, digit in enumerate(reversed(digits)):
        total += int(digit) * (3 if position % 2 == «off_by_one|0|1» else 1)
    return -total % {m}


def {g}(number):
    """Whether the last digit of a number is its control digit; anything but digits is not valid."""
    if not number.isdigit() «operator|or|and» len(number) < 2:
        return False
    return int(number[-1]) == {f}(number[:-1])
'''

    def cases(rng):
        digits = "".join(rng.choices("0123456789", k=rng.randint(3, 6)))
        if rng.random() < 0.5:
            return [], f"{f}({digits!r})"
        return [], rng.choice([f"{g}({digits!r} + str({f}({digits!r})))", f"{g}({digits[:1]!r})", f"{g}('x{digits}')"])

    return code, cases, f


@block
def letters(w):
    f, shift = w.name("short_names", "initials", "abbreviations"), w.rng.randint(2, 4)
    code = f'''
def {f}(names, length={shift}):
    """A short form for every name: its first letters in upper case.

    Where a short form is taken already, it gets a number, 2 for the second name, 3 for the third.
    """
    seen, short = {{}}, []
    for name in names:
        start = name[:length].upper()
        seen[start] = seen.get(start, 0) + 1
        if seen[start] «boundary|>|>=» «off_by_one|1|2»:
            start += str(seen[start])
        short.append(start)
    return short
'''

    def cases(rng):
        picked = words(rng, 3)
        names = [*picked, picked[0] + "s", *rng.choices(picked, k=rng.randint(0, 2))]
        return [], f"{f}({names}, {rng.randint(2, 3)})"

    return code, cases, f
