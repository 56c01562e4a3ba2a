# include: ../../episode.py


# include: ../../tau2.py


# include: ../world.py


# tools: get_reservation_details update_reservation_baggages update_reservation_passengers update_reservation_flights

HINT = "Copy every value as the user wrote it, in the order and under the name that the tool's schema gives, and leave none out."


def make_task(seed, knobs):
    """Changes whose arguments the user dictates: lists of passengers or flights, numbers, the id of a payment method."""
    rng = random.Random(seed)
    db, user_id = draw_world(rng, int(knobs["records"]))
    user = db["users"][user_id]
    cards = [method["id"] for method in user["payment_methods"].values() if method["source"] == "credit_card"]
    wishes, actions = [], []
    for identifier in rng.sample(user["reservations"], int(knobs["steps"])):
        reservation, payment_id = db["reservations"][identifier], rng.choice(cards)
        if rng.random() < 0.5:
            while len(reservation["passengers"]) < knobs["length"]:
                reservation["passengers"].append(draw_passenger(rng))
            passengers = [{**passenger, "dob": draw_birthday(rng)} for passenger in reservation["passengers"][: int(knobs["length"])]]
            reservation["passengers"] = reservation["passengers"][: int(knobs["length"])]
            if rng.random() < knobs["near"]:  # a family: one name, days of birth that are alike
                for passenger in passengers[1:]:
                    passenger["last_name"] = passengers[0]["last_name"]
                    passenger["dob"] = passengers[0]["dob"][:-2] + passenger["dob"][-2:]
            names = "; ".join(map(show_passenger, passengers))
            wishes.append(f"The passengers of reservation {identifier} have to be, in this order: {names}.")
            actions.append(act("update_reservation_passengers", reservation_id=identifier, passengers=passengers))
        else:
            cabin = rng.choice(["economy", "business"])
            stops = [reservation["origin"], *rng.sample(sorted(set(CITIES) - {reservation["origin"], reservation["destination"]}), 9)]
            stops = [*stops[: int(knobs["length"])], reservation["destination"]]
            dates = sorted(rng.choice(MAY) for _ in stops[1:])
            flights = []
            for route, date in zip(zip(stops, stops[1:], strict=False), dates, strict=True):
                number = add_flight(rng, db, route, date)
                flights.append({"flight_number": number, "date": date})
                twin = number[:-2] + number[:-3:-1]  # the same digits in another order: the tool takes it without a word
                if rng.random() < knobs["near"] and twin not in db["flights"]:
                    db["flights"][twin] = {**duplicate(db["flights"][number]), "flight_number": twin}
            listed = ", then ".join(f"{flight['flight_number']} on {flight['date']}" for flight in flights)
            wishes.append(f"Move reservation {identifier} to {cabin} on these flights: {listed}. Use {payment_id} for the difference.")
            change = act("update_reservation_flights", reservation_id=identifier, cabin=cabin, flights=flights, payment_id=payment_id)
            actions.append(change)
    return make(db, user_id, wishes, actions)
