# include: ../../episode.py


# include: ../world.py


# tools: search_contacts add_contact modify_contact remove_contact send_message_with_phone_number

HINT = "Search for what you need. If it is neither there nor said, tell the user what is missing instead of making it up."

MISSING = ["number", "phone", "find", "not found", "no contact", "no entry", "exist", "missing"]  # words for what is not there


def make_task(seed, knobs):
    """Requests that need the phone number of somebody, which is among the contacts or in the request, or nowhere."""
    rng = random.Random(seed)
    steps = int(knobs["steps"])
    db = draw_world(rng, int(knobs["records"]))
    contacts = [contact for contact in db["contacts"].values() if not contact["is_self"]]
    known = rng.sample(contacts, steps)
    strangers = rng.sample([first for first in FIRST if all(first not in contact["name"] for contact in db["contacts"].values())], steps)
    wishes, actions, told, script, said = [], [], [], [], []
    for contact, first in zip(known, strangers, strict=True):
        there = rng.random() < knobs["answerable"]
        stranger = f"{first} {rng.choice(LAST)}"
        if rng.random() < knobs["near"]:  # somebody else of the same surname
            stranger = f"{first} {contact['name'].split()[1]}"
        kind = rng.choice(["message", "add", "modify"])
        number = draw_phone(rng)
        if kind == "message":
            name, content = contact["name"] if there else stranger, rng.choice(TEXTS)
            wishes.append(f"Send a message to {name} saying: {content}")
            write = act("send_message_with_phone_number", phone_number=contact["phone_number"], content=content)
        elif kind == "add":
            name = stranger
            wishes.append(f"Save {name} among my contacts" + (f", {number}." if there else "."))
            write = act("add_contact", name=name, phone_number=number)
        else:
            name = contact["name"] if there else stranger
            wishes.append(f"{name} can now be reached at {number}, so change the entry.")
            write = act("modify_contact", person_id=contact["person_id"], phone_number=number)
        look = [] if kind == "add" else [act("search_contacts", name=name)]
        actions += look + [write] * there
        script += look + [write] * there
        if not there:
            told.append({"all": [name.split()[0]], "any": MISSING, "none": []})
            said.append(f"I have no phone number of {name}." if kind != "modify" else f"I have no entry and no number of {name}.")
    return {
        "db": db,
        "request": "\n".join(wishes),
        "facts": [[["number", "phone", "contact", "who is"], "I do not have it."], [ASKS_FIRST, YES], [ASKS_LAST, YES]],
        "actions": actions,
        "told": told,
        "script": [*script, {"text": " ".join(said) or "That is done."}],
    }
