"""How functions that share a rule, or a way to take a value out of a row, are written: the shapes of `structures`.

A shape is a function with a name to be drawn from its first comment. `RULE(x)` stands for the rule applied to x, `USE(row)` for the value
of a row, ITEMS for what the package is about, DOC for the rule in words. `rows` are pairs (name, value), and dicts in `USES`.
"""

FLAG_SHAPES = '''
# how_many count_matching
def NAME(values):
    """How many of the ITEMS count. DOC"""
    count = 0
    for value in values:
        if RULE(value):
            count += 1
    return count

# chosen matching
def NAME(rows):
    """The names of the ITEMS that count, from rows (name, weight). DOC"""
    return [name for name, weight in rows if RULE(weight)]

# flags marked
def NAME(rows):
    """For each name whether it counts. DOC"""
    marks = {}
    for name, weight in rows:
        marks[name] = RULE(weight)
    return marks

# first_match leading
def NAME(values):
    """The position of the first that counts, or -1. DOC"""
    for position, weight in enumerate(values):
        if RULE(weight):
            return position
    return -1

# surcharge extra_fee
def NAME(values, fee=3):
    """The sum of the fees, one for each of the ITEMS that count. DOC"""
    return sum(fee if RULE(value) else 0 for value in values)

# parted two_groups
def NAME(values):
    """Those that count, and the others. DOC"""
    yes, no = [], []
    for value in values:
        (yes if RULE(value) else no).append(value)
    return yes, no

# weight_sum load_of
def NAME(values):
    """The weight of those that count. DOC"""
    total = 0
    for item in values:
        if not (RULE(item)):
            continue
        total += item
    return total

# all_match uniform
def NAME(values):
    """Whether all of the ITEMS count. DOC"""
    return all(RULE(one) for one in values)
'''

AMOUNT_SHAPES = '''
# sum_up grand_total
def NAME(values):
    """The sum over all ITEMS. DOC"""
    total = 0
    for value in values:
        total += RULE(value)
    return total

# per_row amounts
def NAME(rows):
    """The amount of each name, from rows (name, number). DOC"""
    result = {}
    for name, number in rows:
        result[name] = RULE(number)
    return result

# highest peak
def NAME(values):
    """The largest amount, 0 if there is none. DOC"""
    best = 0
    for value in values:
        best = max(best, RULE(value))
    return best

# listed price_list
def NAME(rows):
    """A line of text for each name. DOC"""
    lines = []
    for name, number in rows:
        amount = RULE(number)
        lines.append(f"{name}: {amount}")
    return lines

# affordable within_budget
def NAME(values, budget=60):
    """How many of the ITEMS, taken in order, the budget pays for. DOC"""
    for count, value in enumerate(values):
        budget -= RULE(value)
        if budget < 0:
            return count
    return len(values)

# running_total ledger_lines
def NAME(values):
    """The sums so far, one after each of the ITEMS. DOC"""
    sums, total = [], 0
    for value in values:
        total = total + RULE(value)
        sums.append(total)
    return sums

# difference span_of
def NAME(values):
    """The difference between the largest and the smallest amount. DOC"""
    amounts = sorted(RULE(value) for value in values)
    return amounts[-1] - amounts[0]

# ordered_names by_amount
def NAME(rows):
    """Pairs (amount, name), the smallest first. DOC"""
    return sorted((RULE(number), name) for name, number in rows)
'''

WORD_SHAPES = '''
# distinct unique_names
def NAME(names):
    """The different names, sorted, in the form in which they are compared. DOC"""
    return sorted({RULE(name) for name in names})

# frequency counted
def NAME(names):
    """How often each name occurs. DOC"""
    counts = {}
    for name in names:
        key = RULE(name)
        counts[key] = counts.get(key, 0) + 1
    return counts

# same_name equal_first_last
def NAME(names):
    """Whether the first and the last name are the same. DOC"""
    first, last = names[0], names[-1]
    return RULE(first) == RULE(last)

# positions where
def NAME(names):
    """At which place each name stands first. DOC"""
    places = {}
    for place, name in enumerate(names):
        places.setdefault(RULE(name), place)
    return places

# joined_names listing
def NAME(names):
    """All names in one line. DOC"""
    return "; ".join(RULE(name) for name in names)

# repeated twice
def NAME(names):
    """Names that occur again later. DOC"""
    seen, found = set(), []
    for name in names:
        key = RULE(name)
        if key in seen:
            found.append(key)
        seen.add(key)
    return found

# longest_name widest
def NAME(names):
    """The length of the longest name. DOC"""
    width = 0
    for name in names:
        width = max(width, len(RULE(name)))
    return width

# index_names register_names
def NAME(names):
    """Pairs (number, name), counted from 1. DOC"""
    pairs = []
    for number, name in enumerate(names, start=1):
        pairs.append((number, RULE(name)))
    return pairs
'''

USES = '''
# bill_total overall_sum
def NAME(rows):
    """The sum over all rows. DOC"""
    total = 0
    for row in rows:
        total += USE(row)
    return total

# row_values value_list
def NAME(rows):
    """The value of every row, in order. DOC"""
    return [USE(row) for row in rows]

# best_row largest_row
def NAME(rows):
    """The largest value, 0 without rows. DOC"""
    return max([USE(row) for row in rows], default=0)

# value_lines printed
def NAME(rows):
    """A line of text per row. DOC"""
    lines = []
    for row in rows:
        lines.append(row["name"] + " " + str(USE(row)))
    return lines

# by_name value_map
def NAME(rows):
    """The value of each name. DOC"""
    result = {}
    for row in rows:
        result[row["name"]] = USE(row)
    return result

# costly above_ten
def NAME(rows):
    """The names whose value is above 10. DOC"""
    return [row["name"] for row in rows if USE(row) > 10]

# sums_so_far accumulated
def NAME(rows):
    """The sums so far. DOC"""
    sums, total = [], 0
    for row in rows:
        total += USE(row)
        sums.append(total)
    return sums

# value_order cheapest_first
def NAME(rows):
    """The names, smallest value first. DOC"""
    order = sorted(rows, key=lambda row: (USE(row), row["name"]))
    return [row["name"] for row in order]
'''


def shapes(text):
    """[(names to draw from, source of the function)]."""
    found = []
    for part in text.strip("\n").split("\n# "):
        names, source = part.removeprefix("# ").split("\n", 1)
        found.append((names.split(), source.rstrip("\n") + "\n"))
    return found


SHAPES = {"flag": shapes(FLAG_SHAPES), "amount": shapes(AMOUNT_SHAPES), "word": shapes(WORD_SHAPES), "row": shapes(USES)}
