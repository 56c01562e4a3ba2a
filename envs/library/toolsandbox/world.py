"""A phone in the manner of ToolSandbox: contacts, messages, settings that depend on each other. Nine tools with its names and arguments.

ToolSandbox's licence does not allow its text here, so the descriptions of the tools are ours; results are Python's `repr`, as there.
"""

RELATIONSHIPS = ["boss", "brother", "colleague", "dentist", "friend", "neighbour", "sister", "uncle"]
TEXTS = [
    "I will be ten minutes late",
    "the parcel has arrived",
    "shall we meet at the station",
    "happy birthday",
    "the meeting is moved to Friday",
    "please call me tonight",
    "dinner is ready",
    "I have found your keys",
]

SYSTEM = "Do not guess values for the arguments of functions. If a request is ambiguous or something is missing, ask the user."
GREETING = []
MISFIT = "TypeError: "
render = repr


def search_contacts(db, **criteria):
    _check_number(criteria)
    if not criteria:
        keys = ("person_id", "name", "phone_number", "relationship", "is_self")
        raise ToolError(f"ValueError: No search criteria are given. At least one search criteria should be provided among {keys}")
    found = []
    for contact in db["contacts"].values():
        fuzzy = all(value.lower() in (contact[key] or "").lower() for key, value in criteria.items() if key in ("name", "relationship"))
        exact = all(contact[key] == value for key, value in criteria.items() if key in ("person_id", "phone_number", "is_self"))
        if fuzzy and exact:
            found.append(contact)
    return found


def add_contact(db, name, phone_number, relationship=None, is_self=False):
    _check_number({"phone_number": phone_number})
    if is_self and search_contacts(db, is_self=True):
        raise ToolError("DuplicateError: Self entry already exists. Cannot add another one.")
    person_id = _new_id(db, name, phone_number)
    contact = {"person_id": person_id, "name": name, "phone_number": phone_number, "relationship": relationship, "is_self": is_self}
    db["contacts"][person_id] = contact
    return person_id


def modify_contact(db, person_id, **changes):
    _check_number(changes)
    if not changes:
        raise ToolError("ValueError: No update information given. At least one new field should be provided")
    if person_id not in db["contacts"]:
        raise ToolError(f"NoDataError: No db entry matching {person_id=} found")
    if changes.get("is_self") and not db["contacts"][person_id]["is_self"]:
        raise ToolError("DuplicateError: Self entry already exists. Cannot add another one.")
    db["contacts"][person_id].update(changes)


def remove_contact(db, person_id):
    if person_id not in db["contacts"]:
        raise ToolError("NoDataError: No db entry matching the id found")
    del db["contacts"][person_id]


def send_message_with_phone_number(db, phone_number, content):
    _check_number({"phone_number": phone_number})
    if not db["settings"]["cellular"]:
        raise ToolError("ConnectionError: Cellular service is not enabled")
    text = plain({"content": content})
    message_id = _new_id(db, phone_number, text)
    db["messages"][message_id] = {"recipient_phone_number": phone_number, "content": text}
    return message_id


def get_current_location(db):
    if not db["settings"]["location_service"]:
        raise ToolError("PermissionError: Location service is not enabled.")
    return {key: db["settings"][key] for key in ("latitude", "longitude")}


def set_low_battery_mode_status(db, on):
    _switch(db, "low_battery_mode", on)
    if on:
        db["settings"].update(cellular=False, location_service=False)


def set_cellular_service_status(db, on):
    _switch_service(db, "cellular", "Cellular service", on)


def set_location_service_status(db, on):
    _switch_service(db, "location_service", "Location service", on)


def _switch_service(db, setting, name, on):
    if on and db["settings"]["low_battery_mode"]:
        raise ToolError(f"PermissionError: {name} cannot be turned on in low battery mode")
    _switch(db, setting, on)


def _switch(db, setting, on):
    if db["settings"][setting] == on:
        raise ToolError(f"ValueError: {setting} already {'enabled' if on else 'disabled'}")
    db["settings"][setting] = on


def _check_number(arguments):
    number = arguments.get("phone_number")
    if number is not None and not re.fullmatch(r"\+\d{7,15}", number):
        raise ToolError(f"ValueError: {number} is not a valid phone number")


def _new_id(db, *values):
    """An id like a random UUID; it follows from what it is for, whatever came before."""
    rng = random.Random(f"{db['settings']['serial']} {values}")
    while (identifier := _draw_id(rng)) in {**db["contacts"], **db["messages"]}:
        pass
    return identifier


def _draw_id(rng):
    return "-".join("".join(rng.choices("0123456789abcdef", k=k)) for k in (8, 4, 4, 4, 12))


READS = [search_contacts, get_current_location]
CHANGES = [
    add_contact,
    modify_contact,
    remove_contact,
    send_message_with_phone_number,
    set_low_battery_mode_status,
    set_cellular_service_status,
    set_location_service_status,
]
FUNCTIONS = {function.__name__: function for function in READS + CHANGES}
WRITES = {function.__name__ for function in CHANGES}


def draw_world(rng, records):
    """A phone with `records` contacts and the user's own entry; all services are on, the low battery mode is off."""
    settings = {"cellular": True, "location_service": True, "low_battery_mode": False, "serial": rng.randrange(10**9)}
    settings |= {"latitude": rng.randrange(-60000, 60000) / 1000, "longitude": rng.randrange(-170000, 170000) / 1000}
    db = {"contacts": {}, "messages": {}, "settings": settings}
    names = rng.sample(FIRST, records + 1)
    for number, first in enumerate(names):
        person_id = _draw_id(rng)
        db["contacts"][person_id] = {
            "person_id": person_id,
            "name": f"{first} {rng.choice(LAST)}",
            "phone_number": draw_phone(rng),
            "relationship": "self" if number == 0 else rng.choice(RELATIONSHIPS),
            "is_self": number == 0,
        }
    return db


def draw_phone(rng):
    return "+1" + draw_digits(rng, 10)
