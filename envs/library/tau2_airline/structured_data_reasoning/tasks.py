# include: ../../episode.py


# include: ../../tau2.py


# include: ../world.py


# tools: get_user_details get_reservation_details cancel_reservation update_reservation_baggages

HINT = "Read all reservations of the user before you choose one, and compare each with every part of the description."


def make_task(seed, knobs):
    """The user describes reservations instead of naming them: by route and day, the latest one, or the one with most passengers."""
    rng = random.Random(seed)
    records, steps = int(knobs["records"]), int(knobs["steps"])
    db, user_id = draw_world(rng, records)
    user = db["users"][user_id]
    own = [db["reservations"][identifier] for identifier in user["reservations"]]
    kinds = sorted(rng.sample(["latest", "party", "route"], steps))  # a day of travel is not named before it stands
    chosen = rng.sample(own, steps)
    for reservation in own:  # decoys: the same route on another day, or the way back
        if reservation not in chosen and rng.random() < knobs["near"]:
            like = rng.choice(chosen)
            ends = (like["origin"], like["destination"])
            move(db, reservation, *rng.choice([ends, ends, ends[::-1]]))
    wishes, actions = [], []
    for kind, reservation in zip(kinds, chosen, strict=True):
        others = [other for other in own if other is not reservation]
        if kind == "route":
            ends = f"{CITIES[reservation['origin']]} to {CITIES[reservation['destination']]}"
            name = f"my {ends} trip on {show_date(reservation['flights'][0]['date'])}"
        elif kind == "latest":
            latest = max(own, key=lambda found: found["flights"][0]["date"])
            swap_dates(db, reservation, latest)
            name = "the last trip that I have booked, by its day of travel"
        else:
            most = max(len(other["passengers"]) for other in others)
            while len(reservation["passengers"]) <= most:
                reservation["passengers"].append(draw_passenger(rng))
            name = "the reservation with the most passengers"
        actions.append(act("get_reservation_details", reservation_id=reservation["reservation_id"]))
        if rng.random() < 0.5:
            wishes.append(f"I have fallen ill and have to cancel {name}.")
            actions.append(act("cancel_reservation", reservation_id=reservation["reservation_id"]))
        else:
            bags = rng.randrange(1, 4)
            card = rng.choice([method for method in user["payment_methods"].values() if method["source"] == "credit_card"])
            wishes.append(f"I need {bags} more checked bags on {name}, paid with my {card['brand']} card ending in {card['last_four']}.")
            actions.append(
                act(
                    "update_reservation_baggages",
                    reservation_id=reservation["reservation_id"],
                    total_baggages=reservation["total_baggages"] + bags,
                    nonfree_baggages=reservation["nonfree_baggages"] + bags,
                    payment_id=card["id"],
                )
            )
    rng.shuffle(wishes)
    looks = [act("get_user_details", user_id=user_id)]
    looks += [act("get_reservation_details", reservation_id=identifier) for identifier in user["reservations"]]
    looks = [look for look in looks if look not in actions]
    return make(db, user_id, wishes, actions, looks, reason="The reason is my health.")


def move(db, reservation, origin, destination):
    """Another route for a reservation and its flight."""
    segment = reservation["flights"][0]
    for place in (reservation, segment, db["flights"][segment["flight_number"]]):
        place["origin"], place["destination"] = origin, destination


def swap_dates(db, one, other):
    """Each reservation travels on the other's day."""
    first, second = one["flights"][0], other["flights"][0]
    if first is second:
        return
    days = [db["flights"][segment["flight_number"]]["dates"].pop(segment["date"]) for segment in (first, second)]
    first["date"], second["date"] = second["date"], first["date"]
    for segment, day in zip((first, second), days, strict=True):
        db["flights"][segment["flight_number"]]["dates"][segment["date"]] = day
