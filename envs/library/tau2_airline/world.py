"""The airline of tau2-bench in small: users, flights and reservations of its shapes, drawn from a seed, and eight of its tools."""

CITIES = {
    "ATL": "Atlanta", "BOS": "Boston", "CLT": "Charlotte", "DEN": "Denver", "DFW": "Dallas", "DTW": "Detroit", "IAH": "Houston",
    "LAS": "Las Vegas", "MIA": "Miami", "MSP": "Minneapolis", "ORD": "Chicago", "PHX": "Phoenix", "SEA": "Seattle", "SFO": "San Francisco",
}  # fmt: skip
CABINS = ["basic_economy", "economy", "business"]
MAY = [f"2024-05-{day}" for day in range(17, 31)]
ALPHABET = "ABCDEFGHJKLMNPQRSTUVWXYZ23456789"
REASONS = ["another account", "not eligible"]

SYSTEM = (
    INSTRUCTIONS
    + """<policy>
# Airline policy

It is 2024-05-15 15:00:00 EST.

- Before a tool changes anything, tell the user what it will do and get a yes.
- A reservation may only be changed for the user whose user id it carries.
- A reservation may be cancelled if it is business class, or was booked within the last 24 hours, or has travel insurance and the
  user cancels for health or weather. The tool does not check this.
- Checked bags may be added, each as a nonfree bag, but not removed. The tool does not check this.
- Passengers may be corrected, their number stays.
- Changes are paid with a gift card or a credit card of the user's profile, never with a certificate.
- Deny what the policy forbids: name the reservation and one of these reasons in these words: another account, not eligible.
</policy>"""
)


def get_user_details(db, user_id):
    if user_id not in db["users"]:
        raise ToolError(f"Error: User {user_id} not found")
    return db["users"][user_id]


def get_reservation_details(db, reservation_id):
    if reservation_id not in db["reservations"]:
        raise ToolError(f"Error: Reservation {reservation_id} not found")
    return db["reservations"][reservation_id]


def cancel_reservation(db, reservation_id):
    reservation = get_reservation_details(db, reservation_id)
    payments = reservation["payment_history"]
    payments += [{"payment_id": payment["payment_id"], "amount": -payment["amount"]} for payment in payments]
    reservation["status"] = "cancelled"
    return reservation


def update_reservation_baggages(db, reservation_id, total_baggages, nonfree_baggages, payment_id):
    reservation = get_reservation_details(db, reservation_id)
    _pay(db, reservation, payment_id, 50 * max(0, nonfree_baggages - reservation["nonfree_baggages"]))
    reservation["total_baggages"] = total_baggages
    reservation["nonfree_baggages"] = nonfree_baggages
    return reservation


def update_reservation_passengers(db, reservation_id, passengers):
    reservation = get_reservation_details(db, reservation_id)
    if len(passengers) != len(reservation["passengers"]):
        raise ToolError("Error: Number of passengers does not match")
    reservation["passengers"] = [{key: passenger[key] for key in ("first_name", "last_name", "dob")} for passenger in passengers]
    return reservation


def update_reservation_flights(db, reservation_id, cabin, flights, payment_id):
    reservation = get_reservation_details(db, reservation_id)
    count = len(reservation["passengers"])
    segments = []
    for flight in flights:
        number, date = flight["flight_number"], flight["date"]
        kept = [old for old in reservation["flights"] if (old["flight_number"], old["date"]) == (number, date)]
        if kept and cabin == reservation["cabin"]:
            segments.append(kept[0])
            continue
        if number not in db["flights"]:
            raise ToolError(f"Error: Flight {number} not found")
        day = db["flights"][number]["dates"].get(date)
        if day is None:
            raise ToolError(f"Error: Flight {number} not found on date {date}")
        if day["available_seats"][cabin] < count:
            raise ToolError(f"Error: Not enough seats on flight {number}")
        ends = {key: db["flights"][number][key] for key in ("origin", "destination")}
        segments.append({"flight_number": number, **ends, "date": date, "price": day["prices"][cabin]})
    paid = sum(segment["price"] for segment in reservation["flights"])
    _pay(db, reservation, payment_id, (sum(segment["price"] for segment in segments) - paid) * count)
    reservation["flights"] = segments
    reservation["cabin"] = cabin
    return reservation


def _pay(db, reservation, payment_id, amount):
    method = db["users"][reservation["user_id"]]["payment_methods"].get(payment_id)
    if method is None:
        raise ToolError("Error: Payment method not found")
    if method["source"] == "certificate":
        raise ToolError("Error: Certificate cannot be used to update reservation")
    if method["source"] == "gift_card":
        if method["amount"] < amount:
            raise ToolError("Error: Gift card balance is not enough")
        method["amount"] -= amount
    if amount:
        reservation["payment_history"].append({"payment_id": payment_id, "amount": amount})


READS = [get_user_details, get_reservation_details]
CHANGES = [cancel_reservation, update_reservation_baggages, update_reservation_passengers, update_reservation_flights]
FUNCTIONS = {function.__name__: function for function in READS + CHANGES}
WRITES = {function.__name__ for function in CHANGES}


def draw_world(rng, records):
    """A database with a user who has `records` reservations, another who has two, and the first one's user id.

    All reservations are economy with insurance and older than a day: what the policy allows depends on the user's reason alone. Routes,
    dates and party sizes differ; whoever needs decoys makes them.
    """
    db = {"users": {}, "flights": {}, "reservations": {}}
    names = rng.sample([(first, last) for first in FIRST for last in LAST], 2)
    routes = rng.sample([(start, end) for start in CITIES for end in CITIES if start != end], records + 2)
    dates = rng.sample(MAY, records) + rng.sample(MAY, 2)
    for number, (first, last) in enumerate(names):
        user = _draw_user(rng, first, last)
        db["users"][user["user_id"]] = user
        for place in range(records) if number == 0 else range(records, records + 2):
            add_reservation(rng, db, user, routes[place], dates[place])
    return db, next(iter(db["users"]))


def _draw_user(rng, first, last):
    cards = [f"credit_card_{draw_digits(rng, 7)}" for _ in range(2)]
    gift, certificate = f"gift_card_{draw_digits(rng, 7)}", f"certificate_{draw_digits(rng, 7)}"
    methods = [
        {"source": "credit_card", "id": cards[0], "brand": "visa", "last_four": draw_digits(rng, 4)},
        {"source": "gift_card", "id": gift, "amount": float(rng.randrange(400, 900))},
        {"source": "certificate", "id": certificate, "amount": float(rng.choice([100, 150, 250, 500]))},
        {"source": "credit_card", "id": cards[1], "brand": "mastercard", "last_four": draw_digits(rng, 4)},
    ]
    rng.shuffle(methods)
    street = f"{rng.randrange(10, 990)} {rng.choice(STREETS)}"
    return {
        "user_id": f"{first}_{last}_{draw_digits(rng, 4)}".lower(),
        "name": {"first_name": first, "last_name": last},
        "address": {
            "address1": street,
            "address2": f"Suite {rng.randrange(100, 999)}",
            "city": "Denver",
            "country": "USA",
            "state": "CO",
            "zip": f"80{rng.randrange(200, 300)}",
        },
        "email": f"{first}.{last}{rng.randrange(1000, 9999)}@example.com".lower(),
        "dob": draw_birthday(rng),
        "payment_methods": {method["id"]: method for method in methods},
        "saved_passengers": [],
        "membership": rng.choice(["regular", "silver", "gold"]),
        "reservations": [],
    }


def draw_birthday(rng):
    return f"{rng.randrange(1950, 2004)}-{rng.randrange(1, 13):02}-{rng.randrange(1, 29):02}"


def draw_passenger(rng):
    return {"first_name": rng.choice(FIRST), "last_name": rng.choice(LAST), "dob": draw_birthday(rng)}


def add_flight(rng, db, route, date):
    """A direct flight on one day."""
    number = f"HAT{draw_digits(rng, 3)}"
    while number in db["flights"]:
        number = f"HAT{draw_digits(rng, 3)}"
    hour = rng.randrange(5, 20)
    prices = dict(zip(CABINS, (rng.randrange(60, 100), rng.randrange(110, 190), rng.randrange(280, 480)), strict=True))
    db["flights"][number] = {
        "origin": route[0],
        "destination": route[1],
        "flight_number": number,
        "scheduled_departure_time_est": f"{hour:02}:00:00",
        "scheduled_arrival_time_est": f"{hour + 3:02}:00:00",
        "dates": {date: {"status": "available", "available_seats": {cabin: rng.randrange(6, 20) for cabin in CABINS}, "prices": prices}},
    }
    return number


def add_reservation(rng, db, user, route, date):
    """A one-way economy reservation of a user, who travels too."""
    number = add_flight(rng, db, route, date)
    identifier = "".join(rng.choices(ALPHABET, k=6))
    me = {**user["name"], "dob": user["dob"]}
    party = rng.randrange(1, 4)
    segment = {"flight_number": number, "origin": route[0], "destination": route[1], "date": date, "price": 0}
    bags = rng.randrange(0, 3)
    payment_id = next(method["id"] for method in user["payment_methods"].values() if method["source"] == "credit_card")
    db["reservations"][identifier] = {
        "reservation_id": identifier,
        "user_id": user["user_id"],
        "origin": route[0],
        "destination": route[1],
        "flight_type": "one_way",
        "cabin": "economy",
        "flights": [segment],
        "passengers": [me, *(draw_passenger(rng) for _ in range(party - 1))],
        "payment_history": [{"payment_id": payment_id, "amount": 0}],
        "created_at": f"2024-05-{rng.randrange(1, 13):02}T{rng.randrange(0, 24):02}:{rng.randrange(0, 60):02}:{rng.randrange(0, 60):02}",
        "total_baggages": bags + party,
        "nonfree_baggages": bags,
        "insurance": "yes",
        "status": None,
    }
    user["reservations"].append(identifier)


def show_date(date):
    return f"May {int(date[-2:])}"


def show_passenger(passenger):
    return f"{passenger['first_name']} {passenger['last_name']}, born {passenger['dob']}"


def settle(db):
    """Makes the one payment of every reservation what its flights in their cabin, its bags and its insurance cost."""
    for reservation in db["reservations"].values():
        for segment in reservation["flights"]:
            day = db["flights"][segment["flight_number"]]["dates"][segment["date"]]
            segment["price"] = day["prices"][reservation["cabin"]]
        fare = sum(segment["price"] for segment in reservation["flights"]) + 30 * (reservation["insurance"] == "yes")
        reservation["payment_history"][0]["amount"] = fare * len(reservation["passengers"]) + 50 * reservation["nonfree_baggages"]


def introduce(user):
    """How the user says who it is, what it is asked for when it does not, and the call by which the oracle finds out."""
    return f"My user id is {user['user_id']}.", "your user id", []
