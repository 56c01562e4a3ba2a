# include: ../../episode.py


# include: ../world.py


# tools: send_message_with_phone_number get_current_location set_low_battery_mode_status
#        set_cellular_service_status set_location_service_status

HINT = "When a tool says that something is not enabled, enable what it depends on first, then do what was asked."


def make_task(seed, knobs):
    """Messages and positions that need a service; the service may be off, and the low battery mode may keep it from being turned on."""
    rng = random.Random(seed)
    db = draw_world(rng, int(knobs["records"]))
    settings = db["settings"]
    low = rng.random() < knobs["low_battery"]
    settings["low_battery_mode"] = low
    for service in ("cellular", "location_service"):
        settings[service] = not low and rng.random() < knobs["ready"]
    wishes, actions, told, script, said = [], [], [], [], []
    state = dict(settings)
    kinds = ["message"] + rng.choices(["message", "location"], k=int(knobs["steps"]) - 1)
    if int(knobs["steps"]) == 1:
        kinds = [rng.choice(["message", "location"])]
    for kind in kinds:
        if kind == "location" and any("My position" in wish for wish in wishes):
            kind = "message"
        setting = "cellular" if kind == "message" else "location_service"
        need = []
        if not state[setting]:
            if state["low_battery_mode"]:
                need.append(act("set_low_battery_mode_status", on=False))
            need.append(act("set_cellular_service_status" if kind == "message" else "set_location_service_status", on=True))
            state |= {"low_battery_mode": False, setting: True}
        if kind == "message":
            number, content = draw_phone(rng), rng.choice(TEXTS)
            wishes.append(f"Send a message to {number} saying: {content}")
            step = act("send_message_with_phone_number", phone_number=number, content=content)
        else:
            latitude = str(settings["latitude"])
            wishes.append("My position would help me, tell me latitude and longitude.")
            step = act("get_current_location")
            told.append({"all": [latitude, str(settings["longitude"])], "any": [], "none": []})
            said.append(f"You are at latitude {latitude}, longitude {settings['longitude']}.")
        actions += [*need, step]
        script += [step] * bool(need) + [*need, step]  # the error of the first try says what to do
    return {
        "db": db,
        "request": "\n".join(wishes),
        "facts": [[ASKS_FIRST, YES], [ASKS_LAST, YES]],
        "actions": actions,
        "told": told,
        "script": [*script, {"text": " ".join(said) or "Your message has been sent."}],
    }
