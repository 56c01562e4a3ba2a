"""Building blocks about numbers: levels, pages, tiers, costs, shares, sums, places, medians."""


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
