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
    surface, pieces, edges = w.name("statement", "overview", "monthly_report", "bill_of"), [], []
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
        return [], f"{surface}({[(rng.choice(groups), rng.choice(edges + [rng.randint(0, 60)])) for _ in range(rng.randint(1, 3))]})"

    pieces.append((code, cases, surface))
    for here, below in zip(names, names[1:], strict=False):
        pieces.append((layer(w, here, below), None, here))
    code = bottom(w, names[-1], "chain")
    edge = max(map(int, re.findall(r"\b\d+\b", code)), default=0)  # a number of the rule: inputs near it and its double show most faults
    edges += [edge, 2 * edge, 2 * edge + 1] if edge <= 30 else []
    pieces.append((code, None, names[-1]))
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
    return «(count * {b * t} + 50) // 100|count * {b * t} // 100»
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
            ("flag", f"a {w.item} counts from a weight of {t} on, {t} itself included", f"VALUE >= {t}", f"VALUE > {t}"),
            ("flag", f"a {w.item} counts up to a weight of {t}, {t} itself included", f"VALUE <= {t}", f"VALUE < {t}"),
            ("amount", f"{p} percent come on top of a price, rounded up", f"-(-VALUE * {100 + p} // 100)", f"VALUE * {100 + p} // 100"),
            ("amount", f"every started dozen of {w.items} takes one box", "-(-VALUE // 12)", "VALUE // 12"),
            ("word", "spaces around a name and its case make no difference", "VALUE.strip().lower()", "VALUE.lower()"),
            ("word", "in references a dash counts like a space", 'VALUE.upper().replace("-", " ")', "VALUE.upper()"),
        ]
    )
    ways, pieces = list(SHAPES[kind]), []
    rng.shuffle(ways)
    for index in range(sites):
        names, text = ways[index % len(ways)]
        name = w.name(*names)
        text = re.sub(r"RULE\((\w+)\)", lambda m: f"«rule|{right.replace('VALUE', m[1])}|{wrong.replace('VALUE', m[1])}»", text)
        code = "\n" + text.replace("NAME", name).replace("ITEMS", w.items).replace("DOC", sentence[0].upper() + sentence[1:] + ".")

        def cases(rng, name=name, pairs="(rows" in text):
            if kind == "word":
                base = rng.sample(["north hall", "east-wing", "Upper Deck", "old-mill", "Gate"], 3)
                values = [rng.choice([x, f" {x}", x.upper(), x.replace("-", " ")]) for x in [*base, rng.choice(base)]]
            else:
                values = [rng.choice([t, t, t - 1, t + 1, rng.randint(1, 40), 12 * rng.randint(1, 3)]) for _ in range(rng.randint(2, 4))]
            return [], f"{name}({list(zip(rng.sample(WORDS, len(values)), values, strict=True)) if pairs else values})"

        pieces.append((code, cases, name))
    return pieces, sentence


def clones(w, count):
    """Functions that look alike; for one of them another rule holds, which its lines do not follow where the fault is."""
    rng = w.rng
    places = rng.sample(WORDS, count)
    verb = rng.choice(["total", "usage", "figure", "sum"])
    condition, amount = "        if value OP limit:\n            total += value\n", "        total += OP\n"
    doc, special, lines, right, wrong = rng.choice(
        [
            ("Values above the limit count.", "Values from the limit on count, the limit included.", condition, ">=", ">"),
            ("Values below the limit count.", "Values up to the limit count, the limit included.", condition, "<=", "<"),
            ("Every full limit counts once.", "Every started limit counts once.", amount, "-(-value // limit)", "value // limit"),
            (
                "Each value counts, at most the limit.",
                "Each value counts, at least the limit.",
                amount,
                "max(value, limit)",
                "min(value, limit)",
            ),
            (
                "What is beyond the limit counts.",
                "What is missing to the limit counts.",
                amount,
                "max(limit - value, 0)",
                "max(value - limit, 0)",
            ),
        ]
    )
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


def user_pieces(w, users, right, wrong, row, doc=""):
    """Functions over rows (dicts) that take a row's value by the expression `right` (or `wrong`) of `row`."""
    ways, pieces = list(SHAPES["row"]), []
    w.rng.shuffle(ways)
    for index in range(users):
        names, text = ways[index % len(ways)]
        name = w.name(*names)
        text = text.replace("NAME", name).replace(" DOC", f" {doc}" if doc else "").replace("USE(row)", f"«structure|{right}|{wrong}»")

        def cases(rng, name=name):
            return [], f"{name}([{', '.join(row(rng) for _ in range(rng.randint(2, 3)))}])"

        pieces.append(("\n" + text, cases, name))
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

    pieces = user_pieces(w, users, f'row["{new}"]', f'row["{old}"]', row)
    text = f'rows carry their number in the field "{new}" now; "{old}" is gone, where rows are read and in all that works with them'
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

    pieces = user_pieces(w, users, f'{fee}(row["number"], row["zone"])', f'{fee}(row["number"])', row)
    text = (
        f"{fee}(number, zone) has to take the zone, and in zones above 2, {b} come on top, once; whatever prices rows gives it their zone"
    )
    return [*pieces, (code, cases, fee)], text


def richer_result(w, users):
    split, unit = w.name("split_units", "in_packs", "pack_up"), w.rng.randint(4, 8)
    code = f'''
def {split}(number):
    """A number of {w.items} in packs of {unit}, and single ones: «structure|a dict, fields packs and singles|a pair (packs, singles)»."""
    packs, singles = divmod(number, {unit})
    return «structure|{{"packs": packs, "singles": singles}}|packs, singles»
'''

    def row(rng):
        return repr({"name": rng.choice(WORDS), "number": rng.randint(1, 40)})

    def cases(rng):
        return [], f"{split}({rng.randint(1, 40)})"

    right, wrong = (f'{split}(row["number"]){index}' for index in ('["packs"]', "[0]"))
    pieces = user_pieces(w, users, right, wrong, row, "The value of a row is its packs.")
    text = (
        f'{split}() has to give a dict with the fields "packs" and "singles" instead of a pair; its users go on giving what they give now'
    )
    return [*pieces, (code, cases, split)], text
