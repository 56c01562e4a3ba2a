"""The grammar of repositories: small pieces of domain code with marked places where a fault can be planted.

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
