"""The building blocks of repositories: small pieces of domain code with marked places where a fault can be planted.

A block is text with names and numbers drawn from the seed. A place is written `«kind|right|wrong»`: the repository has the right text
everywhere but where the task plants its fault. Docstrings say what is right. `cases` draws calls with random inputs, from which tests are
made; what a call should give is computed from the right text, so a block holds no expected values.
"""

THEMES = {
    "warehouse": ("crate", "crates", "bay", "stock", ["storage", "orders", "routing", "labels"]),
    "clinic": ("visit", "visits", "ward", "roster", ["intake", "billing", "calendar", "records"]),
    "library": ("book", "books", "branch", "catalogue", ["lending", "fines", "search", "members"]),
    "fleet": ("van", "vans", "depot", "trips", ["dispatch", "fuel", "service", "routes"]),
    "theatre": ("seat", "seats", "hall", "program", ["booking", "tickets", "stage", "accounts"]),
    "nursery": ("plant", "plants", "bed", "season", ["growing", "sales", "watering", "suppliers"]),
    "museum": ("piece", "pieces", "room", "archive", ["exhibits", "loans", "visitors", "climate"]),
    "harbour": ("vessel", "vessels", "berth", "cargo", ["arrivals", "dues", "cranes", "manifest"]),
    "bakery": ("loaf", "loaves", "counter", "recipe", ["ovens", "prices", "delivery", "pantry"]),
    "school": ("pupil", "pupils", "class", "term", ["timetable", "grades", "meals", "transport"]),
}
WORDS = "amber birch cedar delta ember fjord grove hazel inlet jade karst lotus maple north olive pearl quartz ridge slate thorn".split()
BLOCKS = {}


class Writer:
    """Draws names and numbers; no name is given twice in a repository."""

    def __init__(self, rng, theme):
        self.rng, self.used = rng, set()
        self.item, self.items, self.place, self.topic, self.modules = THEMES[theme]

    def name(self, *options):
        options = [*options, *(f"{self.item}_{option}" for option in options)]
        free = [option for option in options if option not in self.used]
        chosen = self.rng.choice(free) if free else f"{options[0]}_{len(self.used)}"
        self.used.add(chosen)
        return chosen


def block(function):
    BLOCKS[function.__name__] = function
    return function


def numbers(rng, count, low=0, high=20):
    return [rng.randint(low, high) for _ in range(count)]


def words(rng, count):
    return rng.sample(WORDS, count)


@block
def low_levels(w):
    f, limit = w.name("below_limit", "running_low", "needs_refill", "short_list"), w.rng.randint(4, 9)
    code = f'''
def {f}(levels, limit={limit}):
    """Names of the {w.items} whose level is at or below the limit, lowest level first, equal levels by name."""
    found = []
    for name, level in levels.items():
        if level «boundary|<=|<» limit:
            found.append((level, name))
    found.sort()
    return [name for «operator|_, name|name, _» in found]
'''

    def cases(rng):
        levels = dict(zip(words(rng, 5), [limit, *numbers(rng, 4, limit - 3, limit + 3)], strict=True))
        return [], f"{f}({levels})"

    return code, cases, f


@block
def pages(w):
    f, size = w.name("page_of", "take_page", "slice_page"), w.rng.randint(3, 6)
    g = w.name("page_count", "count_pages", "number_of_pages")
    code = f'''
def {g}(total, size={size}):
    """How many pages hold `total` {w.items}; an incomplete last page counts, and there is always one page."""
    if total == 0:
        return 1
    return «off_by_one|(total + size - 1)|(total + size)» // size


def {f}(rows, number, size={size}):
    """The rows of page `number`, counted from 1.

    A number past the end gives the last page.
    """
    number = min(number, {g}(len(rows), size))
    start = «off_by_one|(number - 1) * size|number * size - 1»
    return rows[start : start + size]
'''

    def cases(rng):
        size = rng.randint(2, 5)
        if rng.random() < 0.5:
            return [], f"{g}({size * rng.randint(1, 6) + rng.choice([0, 0, 1])}, {size})"
        return [], f"{f}({list(range(rng.randint(5, 12)))}, {rng.randint(1, 5)}, {size})"

    return code, cases, f


@block
def tiers(w):
    f = w.name("discount_for", "rebate_rate", "quantity_discount")
    low, high = w.rng.randint(10, 20), w.rng.randint(40, 60)
    a, b = w.rng.randint(3, 7), w.rng.randint(10, 15)
    code = f'''
def {f}(quantity, member=False):
    """Discount in percent: {b} from {high} {w.items} on, {a} from {low} on, else none; members get 2 more on any discount."""
    «order|if quantity >= {high}:
        rate = {b}
    elif quantity >= {low}:
        rate = {a}|if quantity >= {low}:
        rate = {a}
    elif quantity >= {high}:
        rate = {b}»
    else:
        rate = 0
    if member «operator|and|or» rate:
        rate += 2
    return rate
'''

    def cases(rng):
        quantity = rng.choice([rng.randint(0, low - 1), low, rng.randint(low, high - 1), high, rng.randint(high, 2 * high)])
        return [], f"{f}({quantity}, member={rng.random() < 0.5})"

    return code, cases, f


@block
def parcels(w):
    f, per, fee = w.name("carriage", "shipping_cost", "postage"), w.rng.randint(3, 9), w.rng.randint(20, 60)
    code = f'''
def {f}(weight, zone=1):
    """Cost of sending a weight: {per} for every started unit of 10, at least {fee}, and a third more in zones above 2.

    The surcharge is rounded up to a whole number.
    """
    cost = «rounding|-(-weight // 10)|weight // 10» * {per}
    cost = «operator|max|min»(cost, {fee})
    if zone «boundary|>|>=» 2:
        cost += «rounding|-(-cost // 3)|cost // 3»
    return cost
'''

    def cases(rng):
        return [], f"{f}({rng.randint(1, 300)}, zone={rng.randint(1, 4)})"

    return code, cases, f


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
def overlaps(w):
    f, g = w.name("clashes", "overlapping", "in_conflict"), w.name("joined", "merge_spans", "combine_spans")
    code = f'''
def {f}(first, second):
    """Whether two bookings (start, end) share some time; one may begin when the other ends."""
    return first[0] «boundary|<|<=» second[1] and second[0] < first[1]


def {g}(spans):
    """The times that are covered, as few (start, end) pairs as possible; spans that touch become one."""
    merged = []
    for start, end in sorted(spans):
        if merged and start «boundary|<=|<» merged[-1][1]:
            merged[-1] = (merged[-1][0], «operator|max(merged[-1][1], end)|end»)
        else:
            merged.append((start, end))
    return merged
'''

    def cases(rng):
        starts = [rng.randint(8, 16) for _ in range(4)]
        spans = [(start, start + rng.randint(1, 4)) for start in starts]
        if rng.random() < 0.4:
            touching = (spans[0][1], spans[0][1] + 1)
            return [], f"{f}({spans[0]}, {rng.choice([touching, spans[1]])})"
        return [], f"{g}({spans})"

    return code, cases, f


@block
def recent(w):
    name, size = w.name("RecentItems", "Shelf", "LookupCache", "KeepLatest"), w.rng.randint(2, 4)
    code = f'''
class {name}:
    """Keeps the values of the {w.items} that were used last, at most `size` of them; reading a value counts as use."""

    def __init__(self, size={size}):
        self.size = size
        self.values = {{}}
        self.misses = 0

    def get(self, key, default=None):
        """The value of a key, which becomes the one used last; a key that is not there is counted and gives the default."""
        if key not in self.values:
            self.misses += 1
            return default
        value = self.values.«order|pop(key)|get(key)»
        self.values[key] = value
        return value

    def put(self, key, value):
        """Stores a value and drops what was used longest ago."""
        «order|self.values.pop(key, None)|self.values.get(key, None)»
        self.values[key] = value
        while len(self.values) «boundary|>|>=» self.size:
            oldest = next(iter(self.values))
            del self.values[oldest]

    def keys(self):
        """All keys, the one used longest ago first."""
        return list(self.values)
'''

    def cases(rng):
        names, setup = words(rng, 4), []
        setup = [f"cache = {name}({rng.randint(2, 3)})"]
        for _ in range(rng.randint(5, 7)):
            key = rng.choice(names)
            setup.append(f"cache.put({key!r}, {rng.randint(1, 9)})" if rng.random() < 0.6 else f"cache.get({key!r})")
        return setup, "(cache.keys(), cache.misses)"

    return code, cases, name


@block
def graph(w):
    f, g = w.name("steps_between", "hops", "distance_in_steps"), w.name("work_order", "build_order", "in_order")
    code = f'''
def {f}(links, start, goal):
    """The smallest number of links from one {w.place} to another, or -1 if there is no way.

    `links` gives for each {w.place} those that can be reached from it.
    """
    distance = {{start: 0}}
    waiting = [start]
    while waiting:
        here = waiting.«order|pop(0)|pop()»
        if here == goal:
            return distance[here]
        for there in links.get(here, []):
            if there not in distance:
                distance[there] = «off_by_one|distance[here] + 1|len(distance)»
                waiting.append(there)
    return -1


def {g}(needs):
    """The tasks in an order in which each comes after all that it needs; those that are free come by name."""
    done = []
    while len(done) < len(needs):
        ready = [task for task in needs if task not in done and «operator|all|any»([need in done for need in needs[task]] or [True])]
        if not ready:
            raise ValueError("the tasks need each other")
        done.append(«order|min|max»(ready))
    return done
'''

    def cases(rng):
        names = words(rng, 6)
        if rng.random() < 0.5:
            links = {a: rng.sample(names, rng.randint(1, 3)) for a in names}
            return [], f"{f}({links}, {names[0]!r}, {names[5]!r})"
        needs = {a: sorted(rng.sample(names[:i], min(i, rng.randint(0, 2)))) for i, a in enumerate(names)}
        return [], f"{g}({dict(sorted(needs.items()))})"

    return code, cases, f


@block
def workdays(w):
    f, g = w.name("due_date", "add_workdays", "delivery_day"), w.name("full_years", "age_on", "years_since")
    code = f'''
def {f}(start, days):
    """The date that is a number of working days, Monday to Friday, after the start; the start does not count."""
    day = start
    while days > 0:
        day += datetime.timedelta(days=1)
        if day.weekday() «boundary|<|<=» 5:
            days -= 1
    return day


def {g}(born, day):
    """Full years from one date to another; a year is full on the anniversary itself."""
    years = day.year - born.year
    if (day.month, day.day) «boundary|<|<=» (born.month, born.day):
        years -= 1
    return years
'''

    def cases(rng):
        first = f"datetime.date({rng.randint(2010, 2020)}, {rng.randint(1, 12)}, {rng.randint(1, 28)})"
        if rng.random() < 0.5:
            return [], f"{f}({first}, {rng.randint(3, 14)}).isoformat()"
        month, day = rng.randint(1, 12), rng.randint(1, 28)
        later = (month, day) if rng.random() < 0.6 else (rng.randint(1, 12), rng.randint(1, 28))
        return [], f"{g}(datetime.date(1990, {month}, {day}), datetime.date({rng.randint(2000, 2020)}, {later[0]}, {later[1]}))"

    return code, cases, f


@block
def machine(w):
    name = w.name("Progress", "Workflow", "StatusTrack")
    a, b, c, d = w.rng.choice([("draft", "open", "paused", "closed"), ("new", "active", "held", "done"), ("idle", "busy", "blocked", "off")])
    code = f'''
class {name}:
    """The status of a {w.item}: {a} to {b}, {b} to {c} and back, {b} or {c} to {d}; nothing leaves {d}."""

    MOVES = {{"{a}": ["{b}"], "{b}": ["{c}", "{d}"], "{c}": ["{b}", "{d}"], "{d}": []}}

    def __init__(self):
        self.status = "{a}"
        self.past = []

    def move(self, status):
        """Changes the status; a move that is not allowed raises ValueError and changes nothing."""
        «order|if status not in self.MOVES[self.status]:
            raise ValueError(f"no way from {{self.status}} to {{status}}")
        self.past.append(self.status)|self.past.append(self.status)
        if status not in self.MOVES[self.status]:
            raise ValueError(f"no way from {{self.status}} to {{status}}")»
        self.status = status

    def history(self):
        """All statuses so far, the present one last; the caller may change the list."""
        steps = «aliasing|list(self.past)|self.past»
        steps.append(self.status)
        return steps
'''

    def cases(rng):
        setup, status, moves = [f"track = {name}()"], a, {a: [b], b: [c, d], c: [b, d], d: []}
        for _ in range(rng.randint(2, 4)):
            if rng.random() < 0.35:
                wrong = rng.choice([x for x in (a, b, c, d) if x not in moves[status]])
                setup += ["try:", f"    track.move({wrong!r})", "except ValueError:", "    pass"]
            elif moves[status]:
                status = rng.choice(moves[status])
                setup.append(f"track.move({status!r})")
        if rng.random() < 0.6:
            setup.append("track.history()")
        return setup, "track.history()"

    return code, cases, name


@block
def layered(w):
    f = w.name("merged_settings", "overlay", "with_overrides")
    code = f'''
def {f}(defaults, changes):
    """The defaults with the changes put over them, at every level of nested dicts; None removes a key.

    Neither of the arguments is changed.
    """
    merged = «aliasing|dict(defaults)|defaults»
    for key, value in changes.items():
        if value is None:
            merged.pop(key, None)
        elif isinstance(value, dict) «operator|and|or» isinstance(merged.get(key), dict):
            merged[key] = {f}(«order|merged.get(key), value|value, merged.get(key)»)
        else:
            merged[key] = value
    return merged
'''

    def cases(rng):
        a, b, c = words(rng, 3)
        base = {a: rng.randint(1, 9), b: {c: rng.randint(1, 9), a: 1}}
        changes = rng.choice([{a: 5, b: {c: 11}}, {a: None}, {c: 3, b: {a: None}}])
        return [f"base = {base}", f"made = {f}(base, {changes})"], "(base, made)"

    return code, cases, f


@block
def collected(w):
    f, g = w.name("add_note", "register", "collect_entry"), w.name("tagged", "label_all", "with_labels")
    code = f'''
def {f}(entry, entries=«default_argument|None|[]»):
    """The list of entries with one more at its end; without a list a new one begins."""
    if entries is None:
        entries = []
    entries.append(entry)
    return entries


def {g}(rows, label):
    """The rows (dicts) with a label each, counted from 1; the given rows stay as they are."""
    made = []
    for number, row in enumerate(rows, start=«off_by_one|1|0»):
        row = «aliasing|dict(row)|row»
        row["label"] = f"{{label}}-{{number}}"
        made.append(row)
    return made
'''

    def cases(rng):
        a, b, c = words(rng, 3)
        if rng.random() < 0.5:
            return [f"{f}({a!r})", f"second = {f}({b!r})"], "second"
        return [f"rows = [{{'name': {a!r}}}, {{'name': {b!r}}}]", f"made = {g}(rows, {c!r})"], "(rows, made)"

    return code, cases, f


@block
def windows(w):
    f, size = w.name("moving_totals", "rolling_sum", "window_sums"), w.rng.randint(2, 4)
    code = f'''
def {f}(values, size={size}):
    """The sums of all runs of `size` neighbours, from left to right; too few values give no sum."""
    sums = []
    for start in range(len(values) - size «off_by_one|+ 1|»):
        sums.append(sum(values[start : start + size]))
    return sums
'''

    def cases(rng):
        return [], f"{f}({numbers(rng, rng.randint(1, 7))}, {rng.randint(1, 4)})"

    return code, cases, f


@block
def shares(w):
    f = w.name("fair_shares", "split_evenly", "divide_amount")
    code = f'''
def {f}(amount, people):
    """An amount in cents divided among people as evenly as whole cents allow; those who come first get the cents that are left over."""
    if not people:
        raise ValueError("nobody to share with")
    share, rest = divmod(amount, len(people))
    result = {{}}
    for position, person in enumerate(people):
        result[person] = share + (1 if position «boundary|<|<=» rest else 0)
    return result
'''

    def cases(rng):
        return [], f"{f}({rng.randint(5, 400)}, {words(rng, rng.randint(2, 5))})"

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
def totals(w):
    f, g = w.name("totals_by", "sum_by", "grouped_sums"), w.name("top_groups", "largest", "leaders")
    code = f'''
def {f}(rows):
    """The sum of the amounts of each {w.place}, from rows ({w.place}, amount); negative amounts are corrections and count."""
    sums = {{}}
    for group, amount in rows:
        sums[group] = «operator|sums.get(group, 0) + amount|amount»
    return sums


def {g}(rows, count):
    """The names of the groups with the largest sums, largest first, equal sums by name; at most `count` of them."""
    sums = {f}(rows)
    order = sorted(sums, key=lambda group: («operator|-sums[group]|sums[group]», group))
    return order[:«off_by_one|count|count - 1»]
'''

    def cases(rng):
        names = words(rng, 4)
        rows = [(rng.choice(names), rng.randint(-3, 12)) for _ in range(8)]
        return [], f"{f}({rows})" if rng.random() < 0.4 else f"{g}({rows}, {rng.randint(1, 3)})"

    return code, cases, f


@block
def ranking(w):
    f = w.name("places", "rank_scores", "standings")
    code = f'''
def {f}(scores):
    """The place of each name, best score first; equal scores share a place, and the places after them are left out (1, 2, 2, 4)."""
    result, place, last = {{}}, 0, None
    order = sorted(scores, key=lambda name: (-scores[name], name))
    for position, name in enumerate(order, start=1):
        if scores[name] != last:
            place = «off_by_one|position|place + 1»
        result[name] = place
        «order|last = scores[name]|last = last or scores[name]»
    return result
'''

    def cases(rng):
        return [], f"{f}({dict(zip(words(rng, 5), numbers(rng, 5, 1, 4), strict=True))})"

    return code, cases, f


@block
def clock(w):
    f, g, step = w.name("slot_times", "start_times", "time_slots"), w.name("clock_text", "as_clock", "time_of_day"), w.rng.choice([15, 20, 25])
    code = f'''
def {g}(minutes):
    """Minutes since midnight as "hh:mm"; a day later it begins at 00:00 again."""
    minutes = minutes % «operator|(24 * 60)|(12 * 60)»
    return f"{{minutes // 60:02d}}:{{minutes % 60:02d}}"


def {f}(opens, closes, length={step}):
    """The times at which a slot can start: one after the other from the opening, each over by the closing time (in minutes)."""
    times, start = [], opens
    while start + length «boundary|<=|<» closes:
        times.append({g}(start))
        start += length
    return times
'''

    def cases(rng):
        if rng.random() < 0.4:
            return [], f"{g}({rng.randint(0, 2000)})"
        length, opens = rng.choice([15, 20, 30]), 60 * rng.randint(7, 20)
        return [], f"{f}({opens}, {opens + length * rng.randint(2, 4) + rng.choice([0, 0, 5])}, {length})"

    return code, cases, f


@block
def ledger(w):
    name = w.name("Ledger", "Reserve", "Holding", "Account")
    code = f'''
class {name}:
    """How many {w.items} there are, and how many of them are promised to somebody."""

    def __init__(self, amount):
        self.amount = amount
        self.held = {{}}

    def free(self):
        """What is neither gone nor promised."""
        return self.amount «operator|-|+» sum(self.held.values())

    def hold(self, who, count):
        """Promises a number to somebody and says whether there were enough; all that is free may be promised."""
        if count «boundary|>|>=» self.free():
            return False
        self.held[who] = «operator|self.held.get(who, 0) + count|count»
        return True

    def hand_out(self, who):
        """Gives somebody all that was promised; it is gone then."""
        count = self.held.pop(who, 0)
        self.amount -= count
        return count
'''

    def cases(rng):
        people = words(rng, 2)
        setup = [f"book = {name}({rng.randint(5, 9)})"]
        calls = []
        for _ in range(rng.randint(2, 4)):
            who = rng.choice(people)
            calls.append(f"book.hold({who!r}, {rng.choice(['book.free()', rng.randint(1, 4)])})")
        if rng.random() < 0.5:
            calls.append(f"book.hand_out({people[0]!r})")
        return setup, f"([{', '.join(calls)}], book.free(), book.amount)"

    return code, cases, name


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
def backoff(w):
    f, cap = w.name("waiting_times", "retry_delays", "pauses"), w.rng.randint(20, 70)
    code = f'''
def {f}(tries, first=1, cap={cap}):
    """The pauses before each further try: `first`, then twice as long every time, but never longer than the cap."""
    pauses, pause = [], first
    for _ in range(«off_by_one|tries - 1|tries»):
        pauses.append(«operator|min|max»(pause, cap))
        pause *= 2
    return pauses
'''

    def cases(rng):
        return [], f"{f}({rng.randint(2, 7)}, {rng.randint(1, 4)}, cap={rng.randint(9, 30)})"

    return code, cases, f


@block
def checksums(w):
    f, g, m = w.name("check_digit", "control_digit", "parity_digit"), w.name("is_valid", "valid_number", "passes_check"), w.rng.randint(7, 10)
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
def medians(w):
    f, g = w.name("middle", "median_of", "typical"), w.name("without_outliers", "trimmed", "usual_values")
    code = f'''
def {f}(values):
    """The median; of an even number of values the mean of the two in the middle."""
    ordered = «aliasing|sorted(values)|values»
    half = len(ordered) // 2
    if len(ordered) % 2 «operator|==|!=» 1:
        return ordered[half]
    return («off_by_one|ordered[half - 1] + ordered[half]|ordered[half] + ordered[-half]») / 2


def {g}(values, spread):
    """The values, in their order, that are at most `spread` away from the median."""
    centre = {f}(values)
    return [value for value in values if «operator|abs(value - centre)|value - centre» «boundary|<=|<» spread]
'''

    def cases(rng):
        values = numbers(rng, rng.randint(3, 7), 1, 15)
        return [], f"{f}({values})" if rng.random() < 0.5 else f"{g}({values}, {rng.randint(1, 5)})"

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
