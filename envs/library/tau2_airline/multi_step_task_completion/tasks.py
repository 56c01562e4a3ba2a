# include: ../../episode.py


# include: ../../tau2.py


# include: ../world.py


# tools: get_reservation_details cancel_reservation update_reservation_baggages update_reservation_passengers

HINT = "Keep a list of what was asked for, and look after each result what is still open before you answer."


def make_task(seed, knobs):
    """Several requests that say everything they need; what counts is that all are finished."""
    rng = random.Random(seed)
    db, user_id = draw_world(rng, int(knobs["records"]))
    user = db["users"][user_id]
    wishes, actions = [], []
    *asked, other = rng.sample(user["reservations"], int(knobs["steps"]) + 1)
    for identifier in asked:
        reservation = db["reservations"][identifier]
        kind = rng.choice(["cancel", "bags", "passengers"])
        if kind == "cancel":
            wishes.append(f"Please cancel reservation {identifier}, I have fallen ill.")
            actions.append(act("cancel_reservation", reservation_id=identifier))
        elif kind == "bags":
            more = rng.randrange(1, 4)
            total, nonfree = reservation["total_baggages"] + more, reservation["nonfree_baggages"] + more
            payment_id = rng.choice([method["id"] for method in user["payment_methods"].values() if method["source"] == "credit_card"])
            wishes.append(
                f"Please set reservation {identifier} to {total} checked bags, {nonfree} of them nonfree, paid with {payment_id}."
            )
            actions.append(
                act(
                    "update_reservation_baggages",
                    reservation_id=identifier,
                    total_baggages=total,
                    nonfree_baggages=nonfree,
                    payment_id=payment_id,
                )
            )
        else:
            passengers = [*reservation["passengers"][:-1], draw_passenger(rng)]
            names = " and ".join(map(show_passenger, passengers))
            wishes.append(f"Please put these passengers on reservation {identifier}: {names}.")
            actions.append(act("update_reservation_passengers", reservation_id=identifier, passengers=passengers))
    wishes.insert(rng.randrange(len(wishes) + 1), f"My reservation {other} stays as it is.")
    return make(db, user_id, wishes, actions, reason="The reason is my health.")
