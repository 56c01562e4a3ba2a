# include: ../../episode.py


# include: ../../tau2.py


# include: ../world.py


# tools: get_user_details get_reservation_details cancel_reservation update_reservation_baggages

HINT = "Read the reservation before you change it, and hold it against each condition of the policy."


def make_task(seed, knobs):
    """Changes of reservations that the user names; what the reservation says decides whether the policy allows them."""
    rng = random.Random(seed)
    records, steps = int(knobs["records"]), int(knobs["steps"])
    db, user_id = draw_world(rng, records)
    user, other = db["users"].values()
    healthy = rng.random() < 0.5
    reason = "The reason is that my plans have changed." if healthy else "The reason is my health."
    *mine, untouched = rng.sample(user["reservations"], steps + 1)
    foreign = rng.sample(other["reservations"], 2)
    asked, wishes, actions, told, said = [], [f"My reservation {untouched} stays as it is."], [], [], []
    for place in range(steps):
        obstacle = None if rng.random() < knobs["allowed"] else rng.choice(REASONS)
        identifier = foreign.pop() if obstacle == "another account" and foreign else mine[place]
        obstacle = "not eligible" if obstacle and identifier == mine[place] else obstacle
        reservation = db["reservations"][identifier]
        actions.append(act("get_reservation_details", reservation_id=identifier))
        if obstacle == "another account" or rng.random() < 0.5:
            # Which of the three conditions holds, or how close all of them come to it.
            reservation["insurance"] = "no" if obstacle == "not eligible" and not healthy else rng.choice(["yes", "no"])
            if obstacle != "not eligible" and (healthy or reservation["insurance"] == "no"):
                if rng.random() < 0.5:
                    reservation["cabin"] = "business"
                else:
                    reservation["created_at"] = f"2024-05-{rng.choice(['14T16', '14T22', '15T08'])}:{rng.randrange(10, 60)}:00"
            elif rng.random() < knobs["near"]:
                reservation["created_at"] = f"2024-05-14T{rng.choice(['02', '09', '13'])}:{rng.randrange(10, 60)}:00"
            wishes.append(f"I want to cancel reservation {identifier}. {reason}")
            write = act("cancel_reservation", reservation_id=identifier)
        else:
            reservation["total_baggages"] += 2
            more = -rng.randrange(1, 3) if obstacle == "not eligible" else rng.randrange(1, 3)
            total, nonfree = reservation["total_baggages"] + more, max(0, reservation["nonfree_baggages"] + more)
            payment_id = rng.choice([method["id"] for method in user["payment_methods"].values() if method["source"] == "credit_card"])
            wishes.append(f"Reservation {identifier} shall have {total} checked bags, {nonfree} of them nonfree, paid with {payment_id}.")
            write = act(
                "update_reservation_baggages",
                reservation_id=identifier,
                total_baggages=total,
                nonfree_baggages=nonfree,
                payment_id=payment_id,
            )
        asked.append(write)
        if obstacle is None:
            actions.append(write)
        else:
            told.append({"all": [identifier, obstacle], "any": [], "none": [word for word in REASONS if word != obstacle]})
            said.append(f"I cannot change {identifier}: {obstacle}.")
    return make(db, user_id, wishes, actions, told=told, said=said, reason=reason, asked=asked)
