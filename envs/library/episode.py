"""An episode of customer service or of an assistant: tools over a database, a scripted user, a grader. Shared by several targets.

The text of a target (its `world.py`) follows and defines

    SYSTEM, GREETING        the system prompt, and the messages before the user's first
    FUNCTIONS, WRITES       tool name to a function of (db, **arguments), which raises ToolError; the names of those that change something
    MISFIT                  how an error of arguments that do not fit the schema begins
    render(result)          a result as the agent sees it

then the text of a capability, `tasks.py`, with TOOLS, HINT and `make_task(seed, knobs)`. A task is a dictionary:

    db          what the tools work on
    request     the user's first message
    facts       [[words, answer], ...]: what the user answers when asked about one of the words
    actions     the calls that the grader asks for: changes, and reads that have to come before them
    told        [{"all", "any", "none"}, ...]: words that one sentence of the agent has to hold all of, one of (if any), and none of
    script      the oracle's actions

and for those who look at tasks anything else, such as `asked`, the changes that the user wants, allowed or not.
"""

import json
import random
import re

FIRST = ["Anneke", "Bram", "Cosima", "Dario", "Elif", "Fenna", "Goran", "Hedda", "Imre", "Jonna", "Kasimir", "Lotte", "Milan", "Nadja"]
LAST = ["Abelev", "Brandt", "Cervin", "Dupont", "Eriksen", "Fabri", "Galanis", "Hofer", "Iversen", "Jansky", "Kowal", "Lindqvist", "Moreau"]

YES = "Yes, please go ahead."
ASKS_FIRST = ("go ahead", "shall i", "should i", "proceed with", "yes/no", "(yes")  # surely a question for a yes
ASKS_LAST = ("confirm", "correct", "proceed", "would you like", "do you want", "is that right")  # if it is about nothing else
FAREWELL = ("anything else", "something else", "else i can", "further assistance", "other questions")
ANSWERS = 4  # more questions than this, and the user gives up


class ToolError(Exception):
    """A call that a tool refuses; the message is what the agent sees. Nothing was changed."""


def misfit(schema, value, defs, where="argument"):
    """Why a value does not fit a JSON schema, or None. Of the keywords only those that the schemas of the targets use."""
    if "$ref" in schema:
        return misfit(defs[schema["$ref"].rsplit("/", 1)[1]], value, defs, where)
    if "anyOf" in schema:
        return misfit(schema["anyOf"][0], value, defs, where)
    kinds = {"string": str, "boolean": bool, "object": dict, "array": list, "integer": int, "number": (int, float)}
    kind = schema.get("type")
    if kind in kinds and (not isinstance(value, kinds[kind]) or isinstance(value, bool) != (kind == "boolean")):
        return f"{where} must be of type {kind}"
    if "enum" in schema and value not in schema["enum"]:
        return f"{where} must be one of {', '.join(schema['enum'])}"
    if kind == "object" and "properties" in schema:
        for key in schema.get("required", []):
            if key not in value:
                return f"missing a required argument: '{key}'"
        for key, inner in value.items():
            if key not in schema["properties"]:
                return f"got an unexpected keyword argument '{key}'"
            if found := misfit(schema["properties"][key], inner, defs, f"argument '{key}'"):
                return found
    if kind == "array":
        return next((found for item in value if (found := misfit(schema["items"], item, defs, where))), None)
    return None


def run_tool(db, name, arguments):
    """The result of one call as the agent sees it, and whether it was refused; a refused call changes nothing."""
    schema = next((tool["function"]["parameters"] for tool in TOOLS if tool["function"]["name"] == name), None)
    if schema is None:
        return f"{MISFIT}no tool named '{name}'", True
    found = misfit({"type": "object", **schema}, arguments, schema.get("$defs", {}))
    if found:
        return MISFIT + found, True
    try:
        return render(FUNCTIONS[name](db, **arguments)), False
    except ToolError as error:
        return str(error), True


def matches(wanted, given):
    """Equal arguments; the text of a message may end in another way."""
    return {**wanted, "content": plain(wanted)} == {**given, "content": plain(given)}


def plain(arguments):
    return str(arguments.get("content", "")).strip(" .!\"'").lower()


def finds(wanted, given):
    """Whether a read looks for what is wanted: a search may give a part of it."""
    for key, value in wanted.items():
        part = given.get(key)
        if part != value and not (isinstance(part, str) and len(part) > 2 and part.lower() in value.lower()):
            return False
    return True


def says(text, told):
    """Whether one sentence holds the words."""
    for sentence in re.split(r"[.;!?]\s|\n", text.lower()):
        if all(word.lower() in sentence for word in told["all"]) and not any(word in sentence for word in told["none"]):
            if not told["any"] or any(word in sentence for word in told["any"]):
                return True
    return False


def key_of(name, arguments):
    """What a call is about: its tool and the value of the first argument that is required, which names the record."""
    schema = next(tool["function"]["parameters"] for tool in TOOLS if tool["function"]["name"] == name)
    return name, *(repr(arguments.get(key)) for key in schema.get("required", [])[:1])


def likeness(wanted, given):
    """The share of arguments that are right."""
    return sum(given.get(key) == value for key, value in wanted.items()) / len(wanted) if wanted else 0.0


def grade(credits, slips, strays):
    """1 if everything was done and nothing else, nothing once a record was changed that nobody had asked for, else up to 0.3.

    Args:
      credits: of each check, 1 if it passed; of a change that was made in another way the share of its arguments that are right.
      slips, strays: how many calls changed something in another way than asked, and how many changed something else.
    """
    share = sum(credits) / len(credits)
    return 0.0 if strays else 1.0 if share == 1.0 and not slips else 0.3 * share


class Environment:
    """One episode."""

    def reset(self, seed, knobs):
        self.task = make_task(seed, knobs)
        self.db = duplicate(self.task["db"])
        self.log = []  # calls and texts, in order
        self.answers = 0
        self.ended = False
        return {"system": SYSTEM, "messages": [*GREETING, {"role": "user", "content": self.task["request"]}]}

    def call(self, name, arguments):
        result, refused = run_tool(self.db, name, arguments)
        self.log.append({"name": name, "arguments": arguments, "refused": refused})
        return result

    def respond(self, text):
        """The user answers questions, says yes to what is proposed, and leaves when nothing is asked any more."""
        self.log.append({"text": text})
        low = text.lower()
        self.answers += 1
        if "?" not in text or any(word in low for word in FAREWELL) or self.answers > ANSWERS:
            self.ended = True
            return None
        for words, answer in self.task["facts"]:
            if any(word in low for word in words):
                return answer
        return "I can only repeat it. " + self.task["request"]

    def done(self):
        return self.ended

    def score(self):
        wanted = duplicate(self.task["db"])
        changes = [position for position in range(len(self.log)) if self._changes(position)]
        used, checks, credits, keys = set(), {}, [], set()
        for index, action in enumerate(self.task["actions"]):
            name, arguments = action["name"], action["arguments"]
            run_tool(wanted, name, arguments)
            if name in WRITES:
                keys.add(key_of(name, arguments))
                tries = [position for position in changes if self._key(position) == key_of(name, arguments) and position not in used]
                tries.sort(key=lambda position: likeness(arguments, self.log[position]["arguments"]), reverse=True)
                found = next((position for position in tries if matches(arguments, self.log[position]["arguments"])), None)
            else:
                tries, found = self._looks(name, arguments)
            nearest = found if found is not None else tries[0] if tries else None
            used.add(found)
            credits.append(1.0 if found is not None else 0.0)
            if found is None and name in WRITES and tries:
                credits[-1] = 0.9 * likeness(arguments, self.log[nearest]["arguments"])
            checks[f"action:{index}"] = {
                "passed": found is not None,
                "expected": {**action, "kind": "write" if name in WRITES else "read"},
                "actual": None if nearest is None else {key: self.log[nearest][key] for key in ("name", "arguments")},
                "call": nearest,
            }
        changed = {table: _differences(wanted[table], self.db[table]) for table in wanted if wanted[table] != self.db[table]}
        checks["db"] = {
            "passed": not changed,
            "expected": {table: {key: wanted[table].get(key) for key in keys} for table, keys in changed.items()},
            "actual": {table: {key: self.db[table].get(key) for key in keys} for table, keys in changed.items()},
            "call": None,
        }
        for index, told in enumerate(self.task["told"]):
            said = [position for position, entry in enumerate(self.log) if "text" in entry and says(entry["text"], told)]
            checks[f"communicate:{index}"] = {
                "passed": bool(said),
                "expected": " ".join(told["all"] + told["any"][:1]),
                "actual": self.log[said[0]]["text"] if said else None,
                "call": said[0] if said else None,
            }
        credits += [float(check["passed"]) for name, check in checks.items() if not name.startswith("action")]
        unused = [position for position in changes if position not in used]
        strays = [position for position in unused if self._key(position) not in keys]
        return {"reward": grade(credits, len(unused), len(strays)), "checks": checks}

    def _key(self, position):
        return key_of(self.log[position]["name"], self.log[position]["arguments"])

    def _changes(self, position):
        """Whether an entry of the log is a call that changed something."""
        entry = self.log[position]
        return entry.get("name") in WRITES and not entry["refused"]

    def _looks(self, name, arguments):
        """The calls of a read, and the one that found what is wanted before that was changed."""
        tries = []
        for position, entry in enumerate(self.log):
            if self._changes(position) and any(value in entry["arguments"].values() for value in arguments.values()):
                break  # too late to look
            if entry.get("name") == name and not entry["refused"]:
                tries.append(position)
                if finds(arguments, entry["arguments"]):
                    return tries, position
        return tries, None


def duplicate(db):
    return json.loads(json.dumps(db))  # several times as fast as copy.deepcopy


def _differences(wanted, actual):
    return [key for key in {**wanted, **actual} if wanted.get(key) != actual.get(key)]


def draw_digits(rng, count):
    """Digits whose neighbours differ, so that a swap of two neighbours is always another value; the first is not 0."""
    digits = [rng.randrange(1, 10)]
    for _ in range(count - 1):
        digits.append((digits[-1] + 1 + int(9 * rng.random())) % 10)
    return "".join(map(str, digits))


def act(name, /, **arguments):
    return {"name": name, "arguments": arguments}


def oracle(seed, knobs):
    """The calls and texts of an agent that has the skill."""
    return make_task(seed, knobs)["script"]


def hint(seed, knobs):
    """Guidance that names no record and no value."""
    return HINT
