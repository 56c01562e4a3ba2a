"""Building blocks about state and time: caches, graphs, workflows, ledgers, nested settings, dates and bookings."""


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
    a, b, c, d = w.rng.choice(
        [("draft", "open", "paused", "closed"), ("new", "active", "held", "done"), ("idle", "busy", "blocked", "off")]
    )
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
def clock(w):
    f, g, step = (
        w.name("slot_times", "start_times", "time_slots"),
        w.name("clock_text", "as_clock", "time_of_day"),
        w.rng.choice([15, 20, 25]),
    )
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
