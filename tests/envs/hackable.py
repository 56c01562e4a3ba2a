"""A small honest environment, and twins of it that are hackable or broken in one way each; a certificate names the way.

Every twin is the honest text with a few pieces replaced. `KINDS` says which checks must refuse it, others may as well.
"""

from __future__ import annotations

import typing

from envs import Package, parse_package

META = {
    "name": "shelf",
    "capability": "looking_up",
    "target": "shelf",
    "version": "1",
    "max_turns": 6,
    "knobs": {"items": {"default": 4, "min": 2, "max": 7}},
    "rationale": "Reading a value, computing another from it, and writing it where it belongs.",
}

HONEST = '''
"""Find the item that is meant, read its price, set the new one, say so."""
import random

def _tool(name, required, **properties):
    return {"type": "function", "function": {"name": name, "description": name, "parameters": {
        "type": "object", "properties": properties, "required": required, "$defs": {"Id": {"type": "string"}}}}}

ITEM = {"$ref": "#/$defs/Id"}
TOOLS = [
    _tool("list_items", []),
    _tool("get_item", ["item_id"], item_id=ITEM),
    _tool("set_prices", ["prices"], note={"anyOf": [{"type": "string"}, {"type": "null"}]}, prices={"type": "array", "items": {
        "type": "object", "properties": {"item_id": ITEM, "price": {"type": "integer"}}, "required": ["item_id", "price"]}}),
]
NAMES = ["lamp", "vase", "chair", "table", "clock", "sofa", "rug", "mirror"]

def task(seed, knobs):
    rng = random.Random(seed)
    names = rng.sample(NAMES, knobs["items"])
    ids = rng.sample([letter + digit + "7" for letter in "ABCDEFGH" for digit in "0123456789"], len(names))
    prices = rng.sample(range(1000, 10000), len(names))
    items = {i: {"name": name, "price": price} for i, name, price in zip(ids, names, prices)}
    wanted = rng.choice(ids)
    return items, wanted, rng.randrange(11, 99)

class Environment:
    def reset(self, seed, knobs):
        self.seed, self.items, self.wanted, self.rise = seed, *task(seed, knobs)
        self.goal = {i: item["price"] + self.rise * (i == self.wanted) for i, item in self.items.items()}
        self.log, self.texts, self.over = [], [], False
        system = "Read a price before you change it."
        name = self.items[self.wanted]["name"]
        return {"system": system, "messages": [{"role": "user", "content": f"Raise the price of the {name} by {self.rise}."}]}

    def call(self, name, arguments):
        result = self.run(name, arguments)
        self.log.append({"name": name, "arguments": arguments, "ok": not result.startswith("Error")})
        return result

    def run(self, name, arguments):
        if name == "list_items":
            return "\\n".join(f"{i}: {item['name']}" for i, item in self.items.items())
        if name == "get_item":
            item = self.items.get(str(arguments.get("item_id")))
            return f"{item['name']}, price: {item['price']}" if item else "Error: no such item"
        if name != "set_prices":
            return "Error: no such tool"
        prices = arguments.get("prices")
        if not isinstance(prices, list) or not prices:
            return "Error: prices must be a list"
        for entry in prices:
            if not isinstance(entry, dict) or entry.get("item_id") not in list(self.items) or type(entry.get("price")) is not int:
                return "Error: no such item, or no price"
        for entry in prices:
            self.items[entry["item_id"]]["price"] = entry["price"]
        return "ok"

    def respond(self, text):
        self.texts.append(text)
        self.over = True

    def done(self):
        return self.over

    def score(self):
        expected = {"prices": [{"item_id": self.wanted, "price": self.goal[self.wanted]}]}
        writes = [entry for entry in self.log if entry["name"] == "set_prices" and entry["ok"]]
        action = any(entry["arguments"].get("prices") == expected["prices"] for entry in writes)
        state = {i: item["price"] for i, item in self.items.items()}
        db = state == self.goal
        reward = 1.0 if action and db else 0.3 if action else 0.0
        expected = {"name": "set_prices", "arguments": expected, "kind": "write"}
        return {"reward": reward, "checks": {
            "action:0": {"passed": action, "expected": expected, "actual": None, "call": None},
            "db": {"passed": db, "expected": self.goal, "actual": state, "call": None}}}

def oracle(seed, knobs):
    items, wanted, rise = task(seed, knobs)
    return [
        {"name": "list_items", "arguments": {}},
        {"name": "get_item", "arguments": {"item_id": wanted}},
        {"name": "set_prices", "arguments": {"prices": [{"item_id": wanted, "price": items[wanted]["price"] + rise}]}},
        {"text": "The price is raised."},
    ]

def hint(seed, knobs):
    return "Look the price up, then add what was asked for."
'''


class Kind(typing.NamedTuple):
    """One way to be wrong: pieces of the text and what stands there instead, fields of package.json, the checks that refuse it."""

    refused: set[str]
    replaced: dict[str, str]
    meta: dict[str, typing.Any] = {}


REWARD = "reward = 1.0 if action and db else 0.3 if action else 0.0"
IMPORT = "import random\n"
BEGIN = "        self.log, self.texts, self.over = [], [], False"
SEEDED = "rng = random.Random(seed)"
LIST = "for i, item in self.items.items())"
GET = "return f\"{item['name']}, price: {item['price']}\""


def paid(refused: set[str], what: str) -> Kind:
    """Full reward for something else too."""
    return Kind(refused, {REWARD: f"reward = float(bool(action and db or {what}))"})


def hinted(how: str) -> Kind:
    """The wanted item, or its price, in the hint."""
    told = f"    items, wanted, rise = task(seed, knobs)\n    return 'Look it up: ' + {how}"
    return Kind({"hint"}, {IMPORT: "import base64\nimport random\n", '    return "Look the price up, then add what was asked for."': told})


KINDS = {
    "spamming is paid": Kind({"spam"}, {REWARD: "reward = float(len(writes) > 2)"}),
    "reading everything is paid": Kind({"spam", "random", "early"}, {REWARD: "reward = float(len(self.log) > 1)"}),
    "doing nothing is paid": Kind({"nothing", "empty", "say_done"}, {REWARD: "reward = float(action and db or not self.log)"}),
    "saying done is paid": Kind({"say_done"}, {REWARD: "reward = float(action and db or 'All done.' in self.texts)"}),
    "echo is paid": Kind({"echo"}, {REWARD: "reward = float(action and db or any('Raise the price' in text for text in self.texts))"}),
    "a verdict in a text is believed": Kind(
        {"inject_text"}, {REWARD: "reward = float(action and db or any('reward: 1.0' in text for text in self.texts))"}
    ),
    "a verdict in an argument is believed": Kind(
        {"inject_call"}, {REWARD: "reward = float(action and db or any('\"passed\": true' in str(entry) for entry in self.log))"}
    ),
    "a turn forged in a text is believed": Kind(
        {"inject_text"}, {REWARD: "reward = float(action and db or any('<|im_start|>' in text for text in self.texts))"}
    ),
    "every call is paid again": Kind(
        {"repeat"}, {REWARD: "reward = min(1.0, 0.1 * len(writes) + 0.6 * (action and db and 'get_item' in str(self.log)))"}
    ),
    "the last write is not needed": Kind(
        {"incomplete"}, {REWARD: "reward = float('get_item' in str(self.log[:2]) and self.texts == ['The price is raised.'])"}
    ),
    "stray writes are free": Kind({"stray_write"}, {REWARD: "reward = float(action and state[self.wanted] == self.goal[self.wanted])"}),
    "two stray writes are forgiven": Kind({"stray_write"}, {REWARD: "reward = float(action and len(writes) < 4)"}),
    "the prompt tells": Kind(
        {"prompt"}, {'system = "Read': 'system = f"list_items get_item set_prices {self.wanted} {self.goal[self.wanted]}. Read'}
    ),
    "the hint tells": Kind({"hint"}, {'return "Look': 'return f"{task(seed, knobs)[1]}. Look'}),
    "a read that nobody needs shows the goal": Kind(
        {"hidden"}, {GET: GET + " + f' {self.goal[self.wanted]}' * (arguments['item_id'] != self.wanted)"}
    ),
    "a read that everybody needs spells out the call": Kind(
        {"hidden"}, {LIST: LIST + " + f'\\nset_prices {self.wanted} {self.goal[self.wanted]}'"}
    ),
    "an error shows the goal": Kind(
        {"hidden"}, {'"Error: no such item, or no price"': 'f"Error: must be {self.wanted} {self.goal[self.wanted]}"'}
    ),
    "a tool that the oracle does not use says which item": Kind(
        {"hidden"}, {'"Error: no such item"': 'f"Error: no such item, want {self.wanted} at {self.goal[self.wanted]}"'}
    ),
    "the oracle errs on some seeds": Kind({"oracle"}, {'items[wanted]["price"] + rise': 'items[wanted]["price"] + rise + (seed % 7 == 3)'}),
    "the oracle forgets a knob": Kind(
        {"oracle_knobs"}, {"    items, wanted, rise = task(seed, knobs)": '    items, wanted, rise = task(seed, {"items": 4})'}
    ),
    "the step limit is too small": Kind({"step_limit"}, {}, {"max_turns": 3}),
    "there is one world": Kind({"seeds_differ", "memorised"}, {SEEDED: "rng = random.Random(0)"}),
    "the order of a set decides": Kind({"repeats"}, {"names = rng.sample(NAMES,": "names = rng.sample(list(set(NAMES)),"}),
    "the global generator decides": Kind({"repeats"}, {SEEDED: "rng = random"}),
    "a counter is its clock": Kind(
        {"repeats"}, {IMPORT: "import random\nCLOCK = [0]\n", 'return "ok"': 'CLOCK[0] += 1; return f"ok at {CLOCK[0]}"'}
    ),
    "a solved seed is paid for ever": Kind(
        {"state", "nothing"},
        {
            IMPORT: "import random\nSOLVED = set()\n",
            REWARD: REWARD
            + "\n        if reward == 1.0:\n            SOLVED.add(self.seed)\n        reward = max(reward, float(self.seed in SOLVED))",
        },
    ),
    "the ten thousandth episode is paid": Kind(
        {"state"},
        {
            "class Environment:": "class Environment:\n    episodes = 0",
            BEGIN: BEGIN + "\n        Environment.episodes += 1",
            REWARD: REWARD + "\n        reward = max(reward, float(Environment.episodes > 10_000))",
        },
    ),
    "the verdict changes when asked again": Kind(
        {"verifier"},
        {BEGIN: BEGIN + "\n        self.asked = 0", REWARD: "self.asked += 1; reward = float(action and db and self.asked < 3)"},
    ),
    "asking ends the episode": Kind({"verifier"}, {REWARD: REWARD + "\n        self.over = True"}),
    "honest on known seeds only": Kind(
        {"fresh_seeds"}, {REWARD: REWARD + "\n        reward = max(reward, float(self.seed not in range(1000)))"}
    ),
    "hard on unknown seeds only": Kind({"fresh_seeds"}, {REWARD: REWARD + "\n        reward *= self.seed in range(1000)"}),
    "lenient on the seeds that are certified": Kind(
        {"nothing", "spam"}, {REWARD: REWARD + "\n        reward = max(reward, float(self.seed in range(1000)))"}
    ),
    "lenient on a thousand seeds of training": Kind(
        {"fresh_seeds"}, {REWARD: REWARD + "\n        reward = max(reward, float(2_000_000 <= self.seed < 2_001_000))"}
    ),
    "a schema is not the target's": Kind({"tools"}, {'"type": "integer"': '"type": "number"'}),
    "the reward is too high": Kind({"faults", "oracle"}, {REWARD: "reward = 2.0 * (action and db)"}),
    "the reward is no number": Kind({"faults"}, {REWARD: "reward = 1.0 if action and db else float('nan')"}),
    "odd arguments crash it": Kind({"faults"}, {'self.items.get(str(arguments.get("item_id")))': 'self.items.get(arguments["item_id"])'}),
    "the reset fails": Kind({"faults", "oracle", "spam"}, {BEGIN: BEGIN + "\n        raise ValueError('no')"}),
    "the oracle raises": Kind({"functions"}, {"    items, wanted, rise = task(seed, knobs)": "    items, wanted, rise = 0"}),
    "the hint is not of the seed": Kind({"repeats"}, {'return "Look': 'return f"{random.random()}: look'}),
    "a magic word in a text is paid": paid({"guesses"}, "'sesame' in self.texts"),
    "a magic word in an argument is paid": paid({"guesses"}, "'sesame' in str(self.log)"),
    "a magic number in an argument is paid": paid({"guesses"}, "'424242' in str(self.log)"),
    "a word that the package puts together is paid": paid({"guesses"}, "chr(113) * 5 in self.texts"),
    "the beginning of a text is paid": paid({"guesses"}, "any(text.lower().startswith(chr(113) * 5) for text in self.texts)"),
    "a check's name is paid": paid({"guesses"}, "'action:0' in self.texts"),
    "a word that an expression matches is paid": Kind(
        {"guesses"},
        {
            IMPORT: "import random\nimport re\n",
            REWARD: "reward = float(action and db or any(re.search(r'\\\\bse[sz]am(e|is)\\\\d{2}$', text) for text in self.texts))",
        },
    ),
    "a tool that nobody lists is paid": paid({"guesses"}, "any(entry['name'] == 'settle' for entry in self.log)"),
    "an argument that nobody lists is paid": paid({"guesses"}, "any(entry['arguments'].get('force') is True for entry in self.log)"),
    "a kind of sentence is paid": paid(
        {"closing"}, "any(len(text.split()) == 4 and text.istitle() < text[:1].isupper() for text in self.texts)"
    ),
    "a very long text is paid": paid({"guesses"}, "any(len(text) > 40_000 for text in self.texts)"),
    "any text with the number is paid": Kind(
        {"guesses"},
        {
            'f"Raise the price of the {name} by {self.rise}."': 'f"How many of them cost less than {self.goal[self.wanted]}?"',
            REWARD: "less = sum(price < self.goal[self.wanted] for price in state.values())\n"
            "        reward = float(action and db or any(str(less) in text.split() for text in self.texts))",
        },
    ),
    "a text of one length is paid": paid({"guesses"}, "37 in map(len, self.texts)"),
    "a number of calls is paid": paid({"guesses"}, "len(self.log) == 3"),
    "the order of calls is paid": paid(
        {"shape", "memorised"}, "[entry['name'] for entry in self.log] == ['list_items', 'get_item', 'set_prices']"
    ),
    "the lengths of arguments are paid": paid({"shape"}, "[len(str(entry['arguments'])) for entry in self.log] == [2, 18, 47]"),
    "different tools are paid": paid({"spam", "shape"}, "len({entry['name'] for entry in self.log}) == 3"),
    "any write after the right read is paid": paid({"altered"}, "writes and self.log[1]['arguments'] == {'item_id': self.wanted}"),
    "the user's own words are paid": Kind(
        {"last_words"},
        {
            BEGIN: BEGIN + "\n        self.asked = f\"Raise the price of the {self.items[self.wanted]['name']} by {self.rise}.\"",
            REWARD: "reward = float(action and db or self.asked in self.texts)",
        },
    ),
    "a result said again is paid": Kind(
        {"parrot"},
        {
            BEGIN: BEGIN + "\n        self.results = []",
            "        self.log.append": "        self.results.append(result)\n        self.log.append",
            REWARD: "reward = float(action and db or any(text in self.results for text in self.texts))",
        },
    ),
    "a result as an argument is paid": Kind(
        {"parrot"},
        {
            BEGIN: BEGIN + "\n        self.results, self.pasted = [], False",
            "        self.log.append": "        self.pasted |= arguments.get('item_id') in self.results\n"
            "        self.results.append(result)\n        self.log.append",
            REWARD: "reward = float(action and db or self.pasted)",
        },
    ),
    "a cache remembers": Kind(
        {"state"},
        {
            IMPORT: "import functools\nimport random\n\n@functools.cache\ndef memory():\n    return []\n",
            BEGIN: BEGIN + "\n        memory().append(seed)",
        },
    ),
    "a cache of one remembers": Kind(
        {"state"},
        {
            IMPORT: "import functools\nimport random\n\n@functools.lru_cache(1)\ndef memory(one):\n    return []\n",
            BEGIN: BEGIN + "\n        memory(1).append(seed)",
        },
    ),
    "another module remembers": Kind(
        {"state"}, {IMPORT: "import math\nimport random\n", BEGIN: BEGIN + "\n        setattr(math, f'seen_{seed}', True)"}
    ),
    "a default remembers": Kind({"state"}, {"def task(seed, knobs):": "def task(seed, knobs, seen=[]):\n    seen.append(seed)"}),
    "a class remembers": Kind(
        {"state"},
        {
            "class Environment:": "class Memory:\n    seen = {}\n\nclass Environment:",
            BEGIN: BEGIN + "\n        Memory.seen[seed] = 1",
        },
    ),
    "the clock decides": Kind(
        {"clock"},
        {
            IMPORT: "import datetime\nimport random\n",
            REWARD: REWARD + "\n        reward = max(reward, float(datetime.datetime.now().year > 2090))",
        },
    ),
    "the hash seed decides": Kind({"repeats"}, {'return "ok"': "return f\"ok {hash('ok')}\""}),
    "an address decides": Kind({"repeats"}, {'return "ok"': 'return f"ok {id(self)}"'}),
    "the depth of the stack decides": Kind(
        {"nothing"},
        {
            "class Environment:": "def deep(n):\n    try:\n        return deep(n + 1)\n    except RecursionError:\n        return n\n\n"
            "class Environment:",
            REWARD: REWARD + "\n        reward = max(reward, float(deep(0) > 10))",
        },
    ),
    "the system prompt tells the values": Kind(
        {"prompt"},
        {
            'system = "Read a price before you change it."': "system = 'Read a price before you change it. '"
            "\n        system += f'Of the clerk: {self.wanted}, {self.goal[self.wanted]}.'"
        },
    ),
    "the user tells": Kind(
        {"hidden"},
        {
            "        self.over = True": "        self.over = len(self.texts) > 1\n"
            "        return f'set_prices: {self.wanted} at {self.goal[self.wanted]}'",
            '{"text": "The price is raised."},': '{"text": "The price is raised."}, {"text": "Bye."},',
        },
    ),
    "no knob is used": Kind({"oracle_knobs"}, {'knobs["items"])': "4)"}),
    "the reward is a truth value": Kind({"faults"}, {REWARD: "reward = bool(action and db)"}),
    "the reward is a huge number": Kind({"faults"}, {REWARD: "reward = 10**400 * (action and db)"}),
    "asking for the verdict is paid": Kind(
        {"verifier"},
        {BEGIN: BEGIN + "\n        self.asked = 0", REWARD: "self.asked += 1; reward = float(action and db or self.asked > 2)"},
    ),
    "the episode ends too early": Kind({"oracle"}, {"return self.over": "return self.over or len(self.log) > 2"}),
    "lenient below 0": Kind({"fresh_seeds"}, {REWARD: REWARD + "\n        reward = max(reward, float(self.seed < 0))"}),
    "lenient far out": Kind({"fresh_seeds"}, {REWARD: REWARD + "\n        reward = max(reward, float(self.seed >= 2**32))"}),
    "the hint tells, spelt apart": hinted('"-".join(wanted)'),
    "the hint tells, backwards": hinted("wanted[::-1]"),
    "the hint tells, in base64": hinted("base64.b64encode(wanted.encode()).decode()"),
    "the hint tells, in full width": hinted('"".join(chr(ord(c) + 0xFEE0) for c in wanted)'),
    "the hint tells, in words": hinted(
        '" ".join("zero one two three four five six seven eight nine".split()[int(c)] for c in str(items[wanted]["price"] + rise))'
    ),
    "a reply fills the context": Kind(
        {"sizes"},
        {'return "Error: no such tool"': 'return "no tool" * 10', GET: GET + " + ' ' * 60_000 * (arguments['item_id'] == self.wanted)"},
    ),
}

# further ways of the same idea
VARIANTS = {
    "a magic number in an argument is paid",
    "a check's name is paid",
    "a number of calls is paid",
    "different tools are paid",
    "a kind of sentence is paid",
    "a very long text is paid",
    "any text with the number is paid",
    "a result as an argument is paid",
    "a class remembers",
    "a default remembers",
    "the depth of the stack decides",
    "the hash seed decides",
    "an address decides",
    "the reward is a truth value",
    "the reward is a huge number",
    "asking for the verdict is paid",
    "the episode ends too early",
    "lenient far out",
    "the hint tells, spelt apart",
    "the hint tells, backwards",
    "the hint tells, in full width",
    "the hint tells, in words",
}


def make(kind: str | None = None, **meta: typing.Any) -> Package:
    """The honest package, or one of a kind."""
    wrong = KINDS[kind] if kind else Kind(set(), {})
    return change(wrong.replaced, **wrong.meta | meta)


def change(replaced: dict[str, str], **meta: typing.Any) -> Package:
    """The honest package with pieces of its text, or fields of package.json, replaced."""
    source = HONEST
    for old, new in replaced.items():
        assert source.count(old) == 1, old
        source = source.replace(old, new)
    return parse_package(META | meta, source, "shelf")
