"""Code whose faults span functions: call chains, one rule in many places, near-identical blocks, and interfaces with their users.

A structure is a list of pieces `(code, cases, name)` as in the grammar of blocks, in the order of use: a piece may call those after it.
Its marked places are of one kind, `chain`, `rule`, `clone` or `structure`, and a task that is about the structure flips them together.
"""

import re


def chain(w, depth):
    """A surface function, `depth` calls below it the one that may be wrong; every layer changes the value a little."""
    names = [
        w.name("settle", "charge", "quote", "evaluate", "assess", "appraise", "tally", "rate", "measure", "score") for _ in range(depth)
    ]
    surface, pieces = w.name("statement", "overview", "monthly_report", "bill_of"), []
    call = names[0]
    code = f'''
def {surface}(rows):
    """What each {w.place} owes for its {w.items}, from rows ({w.place}, count); rows without a count are left out."""
    result = {{}}
    for group, count in rows:
        if count > 0:
            result[group] = result.get(group, 0) + {call}(count)
    return result
'''

    def cases(rng):
        groups = [rng.choice(WORDS) for _ in range(2)]
        return [], f"{surface}({[(rng.choice(groups), rng.randint(0, 60)) for _ in range(rng.randint(1, 3))]})"

    pieces.append((code, cases, surface))
    for here, below in zip(names, names[1:], strict=False):
        pieces.append((layer(w, here, below), None, here))
    pieces.append((bottom(w, names[-1], "chain"), None, names[-1]))
    twin = w.name("former", "legacy", "estimate", "rough")
    pieces.append((bottom(w, twin, None), lambda rng: ([], f"{twin}({rng.randint(0, 60)})"), twin))
    return pieces


def layer(w, here, below):
    a, b = w.rng.randint(2, 6), w.rng.randint(3, 7)
    return w.rng.choice(
        [
            f'''
def {here}(count):
    """The amount for a number of {w.items}, with a handling fee of {a}."""
    return {below}(count) + {a}
''',
            f'''
def {here}(count):
    """The amount for a number of {w.items}; large numbers are settled in two halves."""
    if count < {b * 10}:
        return {below}(count)
    half = count // 2
    return {below}(half) + {below}(count - half)
''',
            f'''
def {here}(count):
    """The amount for a number of {w.items}; every {b}th multiple pays for one more."""
    if count % {b} == 0:
        count += 1
    return {below}(count)
''',
            f'''
def {here}(count):
    """The amount for a number of {w.items}, and a tenth on top of amounts above {a * 100}."""
    amount = {below}(count)
    if amount > {a * 100}:
        amount += amount // 10
    return amount
''',
            f'''
def {here}(count):
    """The amount for a number of {w.items}, at least {a}."""
    amount = {below}(count)
    if amount < {a}:
        return {a}
    return amount
''',
        ]
    )


def bottom(w, name, kind):
    """A rule for one number; without a kind its places are right for good: a look-alike of the one that may be wrong."""
    t, a, b = w.rng.randint(12, 30), w.rng.randint(2, 5), w.rng.randint(6, 9)
    text = w.rng.choice(
        [
            f'''
def {name}(count):
    """{b} for each of the {w.items} from {t} on, that is when there are {t} or more of them, else {a} for each."""
    if count «>=|>» {t}:
        return count * {b}
    return count * {a}
''',
            f'''
def {name}(count):
    """{b} for every started {a + 2} {w.items}."""
    return «-(-count // {a + 2})|(count // {a + 2} + 1)» * {b}
''',
            f'''
def {name}(count):
    """{t} percent of {b} for each of the {w.items}, the sum rounded to the nearest whole number, halves up."""
    return (count * {b * t} «+ 50|+ 49») // 100
''',
            f'''
def {name}(count):
    """{a} for each of the {w.items}, but those beyond {t} are free."""
    paid = «min(count, {t})|min(count, {t} - 1)»
    return paid * {a}
''',
            f'''
def {name}(count):
    """{b} for a full {a + 3}, and {a} for each of the {w.items} that are left over."""
    full, rest = divmod(count, {a + 3})
    return full * {b} + «rest * {a}|min(rest, 1) * {a}»
''',
        ]
    )
    return text.replace("«", f"«{kind}|") if kind else re.sub(r"«([^|»]*)\|[^»]*»", r"\1", text)


def rule(w, sites):
    """One rule that `sites` functions apply, each in its own way; where it is wrong, it is wrong in all of them."""
    rng = w.rng
    t, p = rng.randint(15, 30), rng.randint(7, 25)
    kind, sentence, right, wrong = rng.choice(
        [
            ("flag", f"a {w.item} is large from a weight of {t} on, {t} itself included", f"VALUE >= {t}", f"VALUE > {t}"),
            ("flag", f"a {w.item} is light up to a weight of {t}, {t} itself included", f"VALUE <= {t}", f"VALUE < {t}"),
            ("amount", f"{p} percent are added to a price and the result is rounded up", f"-(-VALUE * {100 + p} // 100)", f"VALUE * {100 + p} // 100"),
            ("amount", f"every started dozen of {w.items} takes one box", "-(-VALUE // 12)", "VALUE // 12"),
            ("word", "names are compared without surrounding spaces and without regard to case", "VALUE.strip().lower()", "VALUE.lower()"),
            ("word", "in references a dash counts like a space", 'VALUE.upper().replace("-", " ")', "VALUE.upper()"),
        ]
    )  # fmt: skip
    shapes, pieces = list(SHAPES[kind]), []
    rng.shuffle(shapes)
    for index in range(sites):
        names, text, arguments = shapes[index % len(shapes)]
        name = w.name(*names)
        spelled = re.sub(r"RULE\((\w+)\)", lambda m: f"«rule|{right.replace('VALUE', m[1])}|{wrong.replace('VALUE', m[1])}»", text)
        code = "\n" + spelled.replace("NAME", name).replace("ITEMS", w.items).replace("DOC", sentence[0].upper() + sentence[1:] + ".")

        def cases(rng, name=name, arguments=arguments):
            if kind == "word":
                base = rng.sample(["north hall", "east-wing", "Upper Deck", "old-mill", "Gate"], 3)
                values = [rng.choice([x, f" {x}", x.upper(), x.replace("-", " ")]) for x in [*base, rng.choice(base)]]
            else:
                values = [rng.choice([t, t - 1, t + 1, rng.randint(1, 40), 12 * rng.randint(1, 3)]) for _ in range(rng.randint(2, 4))]
            return [], f"{name}({arguments(values, rng)})"

        pieces.append((code, cases, name))
    return pieces, sentence


def _rows(values, rng):
    return [(word, value) for word, value in zip(rng.sample(WORDS, len(values)), values, strict=True)]


SHAPES = {
    "flag": [
        (["how_many", "count_matching"], 'def NAME(values):\n    """How many of the ITEMS count. DOC"""\n    count = 0\n    for value in values:\n        if RULE(value):\n            count += 1\n    return count\n', lambda v, rng: v),
        (["chosen", "matching"], 'def NAME(rows):\n    """The names of the ITEMS that count, from rows (name, weight). DOC"""\n    return [name for name, weight in rows if RULE(weight)]\n', _rows),
        (["flags", "marked"], 'def NAME(rows):\n    """For each name whether it counts. DOC"""\n    marks = {}\n    for name, weight in rows:\n        marks[name] = RULE(weight)\n    return marks\n', _rows),
        (["first_match", "leading"], 'def NAME(values):\n    """The position of the first that counts, or -1. DOC"""\n    for position, weight in enumerate(values):\n        if RULE(weight):\n            return position\n    return -1\n', lambda v, rng: v),
        (["surcharge", "extra_fee"], 'def NAME(values, fee=3):\n    """The sum of the fees, one for each of the ITEMS that count. DOC"""\n    return sum(fee if RULE(value) else 0 for value in values)\n', lambda v, rng: v),
        (["parted", "two_groups"], 'def NAME(values):\n    """Those that count, and the others. DOC"""\n    yes, no = [], []\n    for value in values:\n        (yes if RULE(value) else no).append(value)\n    return yes, no\n', lambda v, rng: v),
        (["weight_sum", "load_of"], 'def NAME(values):\n    """The weight of those that count. DOC"""\n    total = 0\n    for item in values:\n        if not (RULE(item)):\n            continue\n        total += item\n    return total\n', lambda v, rng: v),
        (["all_match", "uniform"], 'def NAME(values):\n    """Whether all of the ITEMS count. DOC"""\n    return all(RULE(one) for one in values)\n', lambda v, rng: v),
    ],
    "amount": [
        (["sum_up", "grand_total"], 'def NAME(values):\n    """The sum over all ITEMS. DOC"""\n    total = 0\n    for value in values:\n        total += RULE(value)\n    return total\n', lambda v, rng: v),
        (["per_row", "amounts"], 'def NAME(rows):\n    """The amount of each name, from rows (name, number). DOC"""\n    result = {}\n    for name, number in rows:\n        result[name] = RULE(number)\n    return result\n', _rows),
        (["highest", "peak"], 'def NAME(values):\n    """The largest amount, 0 if there is none. DOC"""\n    best = 0\n    for value in values:\n        best = max(best, RULE(value))\n    return best\n', lambda v, rng: v),
        (["listed", "price_list"], 'def NAME(rows):\n    """A line of text for each name. DOC"""\n    lines = []\n    for name, number in rows:\n        amount = RULE(number)\n        lines.append(f"{name}: {amount}")\n    return lines\n', _rows),
        (["affordable", "within_budget"], 'def NAME(values, budget=60):\n    """How many of the ITEMS, taken in order, the budget pays for. DOC"""\n    for count, value in enumerate(values):\n        budget -= RULE(value)\n        if budget < 0:\n            return count\n    return len(values)\n', lambda v, rng: v),
        (["running_total", "ledger_lines"], 'def NAME(values):\n    """The sums so far, one after each of the ITEMS. DOC"""\n    sums, total = [], 0\n    for value in values:\n        total = total + RULE(value)\n        sums.append(total)\n    return sums\n', lambda v, rng: v),
        (["difference", "span_of"], 'def NAME(values):\n    """The difference between the largest and the smallest amount. DOC"""\n    amounts = sorted(RULE(value) for value in values)\n    return amounts[-1] - amounts[0]\n', lambda v, rng: v),
        (["ordered_names", "by_amount"], 'def NAME(rows):\n    """Pairs (amount, name), the smallest first. DOC"""\n    return sorted((RULE(number), name) for name, number in rows)\n', _rows),
    ],
    "word": [
        (["distinct", "unique_names"], 'def NAME(names):\n    """The different names, sorted, in the form in which they are compared. DOC"""\n    return sorted({RULE(name) for name in names})\n', lambda v, rng: v),
        (["frequency", "counted"], 'def NAME(names):\n    """How often each name occurs. DOC"""\n    counts = {}\n    for name in names:\n        key = RULE(name)\n        counts[key] = counts.get(key, 0) + 1\n    return counts\n', lambda v, rng: v),
        (["same_name", "equal_first_last"], 'def NAME(names):\n    """Whether the first and the last name are the same. DOC"""\n    first, last = names[0], names[-1]\n    return RULE(first) == RULE(last)\n', lambda v, rng: v),
        (["positions", "where"], 'def NAME(names):\n    """At which place each name stands first. DOC"""\n    places = {}\n    for place, name in enumerate(names):\n        places.setdefault(RULE(name), place)\n    return places\n', lambda v, rng: v),
        (["joined_names", "listing"], 'def NAME(names):\n    """All names in one line. DOC"""\n    return "; ".join(RULE(name) for name in names)\n', lambda v, rng: v),
        (["repeated", "twice"], 'def NAME(names):\n    """Names that occur again later. DOC"""\n    seen, found = set(), []\n    for name in names:\n        key = RULE(name)\n        if key in seen:\n            found.append(key)\n        seen.add(key)\n    return found\n', lambda v, rng: v),
        (["longest_name", "widest"], 'def NAME(names):\n    """The length of the longest name. DOC"""\n    width = 0\n    for name in names:\n        width = max(width, len(RULE(name)))\n    return width\n', lambda v, rng: v),
        (["index_names", "register_names"], 'def NAME(names):\n    """Pairs (number, name), counted from 1. DOC"""\n    pairs = []\n    for number, name in enumerate(names, start=1):\n        pairs.append((number, RULE(name)))\n    return pairs\n', lambda v, rng: v),
    ],
}  # fmt: skip


def clones(w, count):
    """Functions that look alike; for one of them another rule holds, which its lines do not follow where the fault is."""
    rng = w.rng
    places = rng.sample(WORDS, count)
    verb = rng.choice(["total", "usage", "figure", "sum"])
    doc, special, lines, right, wrong = rng.choice(
        [
            ("Values above the limit count.", "Values from the limit on count, the limit included.", "        if value OP limit:\n            total += value\n", ">=", ">"),
            ("Values below the limit count.", "Values up to the limit count, the limit included.", "        if value OP limit:\n            total += value\n", "<=", "<"),
            ("Every full limit counts once.", "Every started limit counts once.", "        total += OP\n", "-(-value // limit)", "value // limit"),
            ("Each value counts at most the limit.", "Each value counts at least the limit.", "        total += OP(value, limit)\n", "max", "min"),
            ("What is beyond the limit counts.", "What is missing to the limit counts.", "        total += max(OP, 0)\n", "limit - value", "value - limit"),
        ]
    )  # fmt: skip
    chosen, pieces = rng.randrange(count), []
    for index, place in enumerate(places):
        name, limit = w.name(f"{place}_{verb}"), rng.randint(4, 12)
        here = f"«clone|{right}|{wrong}»" if index == chosen else wrong
        code = f'''
def {name}(values, bonus=0):
    """The {verb} of the {w.place} {place}. {special if index == chosen else doc}"""
    limit = {limit}
    total = bonus
    for value in values:
{lines.replace("OP", here)}    return total
'''

        def cases(rng, name=name, limit=limit):
            values = [rng.choice([limit, limit - 1, limit + 1, rng.randint(1, 24)]) for _ in range(rng.randint(2, 4))]
            return [], f"{name}({values}, bonus={rng.randint(0, 2)})"

        pieces.append((code, cases, name))
    return pieces, f"the {verb} of the {w.place} {places[chosen]}: {special[0].lower()}{special[1:]}"


def interface(w, users):
    """A definition whose form must change, and `users` functions that depend on the form."""
    return w.rng.choice([renamed_field, added_parameter, richer_result])(w, users)


USES = [
    (["bill_total", "overall_sum"], "The sum over all rows.", "    total = 0\n    for row in rows:\n        total += USE(row)\n    return total\n"),
    (["row_values", "value_list"], "The value of every row, in order.", "    return [USE(row) for row in rows]\n"),
    (["best_row", "largest_row"], "The largest value, 0 without rows.", "    return max([USE(row) for row in rows], default=0)\n"),
    (["value_lines", "printed"], "A line of text per row.", '    lines = []\n    for row in rows:\n        lines.append(row["name"] + " " + str(USE(row)))\n    return lines\n'),
    (["by_name", "value_map"], "The value of each name.", '    result = {}\n    for row in rows:\n        result[row["name"]] = USE(row)\n    return result\n'),
    (["costly", "above_ten"], "The names whose value is above 10.", '    return [row["name"] for row in rows if USE(row) > 10]\n'),
    (["sums_so_far", "accumulated"], "The sums so far.", "    sums, total = [], 0\n    for row in rows:\n        total += USE(row)\n        sums.append(total)\n    return sums\n"),
    (["value_order", "cheapest_first"], "The names, smallest value first.", '    order = sorted(rows, key=lambda row: (USE(row), row["name"]))\n    return [row["name"] for row in order]\n'),
]  # fmt: skip


def user_pieces(w, users, right, wrong, needed, row):
    """Functions over rows (dicts) that take a row's value by the expression `right` (or `wrong`) of `row`."""
    shapes, pieces = list(USES), []
    w.rng.shuffle(shapes)
    for index in range(users):
        names, doc, body = shapes[index % len(shapes)]
        name = w.name(*names)
        code = f'\ndef {name}(rows):\n    """{doc} {needed}"""\n' + body.replace("USE(row)", f"«structure|{right}|{wrong}»")

        def cases(rng, name=name):
            return [], f"{name}([{', '.join(row(rng) for _ in range(rng.randint(2, 3)))}])"

        pieces.append((code, cases, name))
    return pieces


def renamed_field(w, users):
    old, new = w.rng.sample(["quantity", "amount", "units", "pieces_sold", "volume"], 2)
    load = w.name("read_rows", "parse_rows", "load_rows")
    loader = f'''
def {load}(text):
    """Rows from lines "name number": dicts with the fields name and «structure|{new}|{old}»."""
    rows = []
    for line in text.splitlines():
        name, _, number = line.partition(" ")
        rows.append({{"name": name, «structure|"{new}"|"{old}"»: int(number or 0)}})
    return rows
'''

    def row(rng):
        return repr({"name": rng.choice(WORDS), new: rng.randint(1, 20)})

    def cases(rng):
        text = "\n".join(f"{rng.choice(WORDS)} {rng.randint(1, 20)}" for _ in range(2))
        return [], f"{load}({text!r})"

    pieces = user_pieces(w, users, f'row["{new}"]', f'row["{old}"]', "", row)
    text = f'rows carry their number in the field "{new}" now, as the other systems do; "{old}" is gone everywhere, in what is read as in all that works with rows'
    return [*pieces, (loader, cases, load)], text


def added_parameter(w, users):
    fee, a, b = w.name("fee_of", "charge_for", "price_of"), w.rng.randint(2, 4), w.rng.randint(5, 9)
    code = f'''
def {fee}(«structure|number, zone|number»):
    """The price of a number of {w.items}: {a} for each«structure|, and {b} once in zones above 2|».

    «structure|The zone is always given.|The zone makes no difference.»
    """
    price = number * {a}
«structure|    if zone > 2:
        price += {b}
|»    return price
'''

    def row(rng):
        return repr({"name": rng.choice(WORDS), "number": rng.randint(1, 9), "zone": rng.randint(1, 5)})

    def cases(rng):
        return [], f"{fee}({rng.randint(1, 9)}, {rng.randint(1, 5)})"

    pieces = user_pieces(w, users, f'{fee}(row["number"], row["zone"])', f'{fee}(row["number"])', "", row)
    text = f"{fee}(number, zone) has to take the zone: in zones above 2, {b} come on top, once. All that computes prices of rows gets the zone from the row's field"
    return [*pieces, (code, cases, fee)], text


def richer_result(w, users):
    split, unit = w.name("split_units", "in_packs", "pack_up"), w.rng.randint(4, 8)
    code = f'''
def {split}(number):
    """A number of {w.items} as packs of {unit} and single ones: «structure|a dict with the fields packs and singles|a pair (packs, singles)»."""
    packs, singles = divmod(number, {unit})
    return «structure|{{"packs": packs, "singles": singles}}|packs, singles»
'''

    def row(rng):
        return repr({"name": rng.choice(WORDS), "number": rng.randint(1, 40)})

    def cases(rng):
        return [], f"{split}({rng.randint(1, 40)})"

    pieces = user_pieces(
        w, users, f'{split}(row["number"])["packs"]', f'{split}(row["number"])[0]', "The value of a row is its packs.", row
    )
    text = f'{split}() has to give a dict with the fields "packs" and "singles" instead of a pair; whatever uses it must go on giving what it gives now'
    return [*pieces, (code, cases, split)], text
