"""The shop of tau2-bench in small: users, products and orders of its shapes, drawn from a seed, and nine of its tools."""

TOWNS = [("Boise", "ID", "83"), ("Fresno", "CA", "93"), ("Omaha", "NE", "68"), ("Tulsa", "OK", "74"), ("Tucson", "AZ", "85")]
GOODS = {  # options of a kind of product, with their values
    "Rain Jacket": {"color": ["green", "navy", "red", "yellow"], "size": ["S", "M", "L", "XL"], "lining": ["fleece", "mesh"]},
    "Desk Fan": {"color": ["black", "white", "grey"], "diameter": ["20 cm", "30 cm", "40 cm"], "power": ["mains", "USB"]},
    "Tent": {"capacity": ["1-person", "2-person", "4-person"], "color": ["olive", "orange", "blue"], "season": ["3-season", "4-season"]},
    "Notebook Set": {"size": ["A4", "A5", "A6"], "ruling": ["plain", "lined", "dotted"], "cover": ["cloth", "paper"]},
    "Coffee Grinder": {"burr": ["steel", "ceramic"], "capacity": ["100 g", "200 g", "300 g"], "color": ["black", "copper", "white"]},
    "Yoga Mat": {"thickness": ["4 mm", "6 mm", "8 mm"], "color": ["lilac", "teal", "grey"], "material": ["cork", "rubber"]},
}
CANCEL_REASONS = ["no longer needed", "ordered by mistake"]
OTHER_REASONS = ["found it cheaper elsewhere", "do not like the delivery date", "want to order it with a coupon instead"]
REASONS = ["another account", "wrong status", "reason not accepted"]
ADDRESS = ["address1", "address2", "city", "country", "state", "zip"]

SYSTEM = (
    INSTRUCTIONS
    + """<policy>
# Retail policy

- First find the user's id by the email address. Only orders that carry this user id may be read out or changed.
- Before a tool changes anything, tell the user what it will do and get a yes.
- An order may be cancelled if its status is pending, and the user gives as reason that it is no longer needed or was ordered by mistake.
- The address and the items of an order may be changed if its status is pending. Items can be changed once, so all in one call.
- Items may be returned or exchanged if the status of the order is delivered, once and all in one call.
  A new item is of the same product and available.
- A refund of a return goes to the payment method of the order or to a gift card.
- Deny what the policy forbids: name the order and one of these reasons in these words: another account, wrong status, reason not accepted.
</policy>"""
)


def find_user_id_by_email(db, email):
    for user_id, user in db["users"].items():
        if user["email"].lower() == email.lower():
            return user_id
    raise ToolError("Error: User not found")


def get_user_details(db, user_id):
    if user_id not in db["users"]:
        raise ToolError("Error: User not found")
    return db["users"][user_id]


def get_order_details(db, order_id):
    if order_id not in db["orders"]:
        raise ToolError("Error: Order not found")
    return db["orders"][order_id]


def get_product_details(db, product_id):
    if product_id not in db["products"]:
        raise ToolError("Error: Product not found")
    return db["products"][product_id]


def cancel_pending_order(db, order_id, reason):
    order = get_order_details(db, order_id)
    if order["status"] != "pending":
        raise ToolError("Error: Non-pending order cannot be cancelled")
    if reason not in CANCEL_REASONS:
        raise ToolError("Error: Invalid reason")
    refunds = [{**payment, "transaction_type": "refund"} for payment in order["payment_history"]]
    for refund in refunds:
        _refund(db, order, refund["payment_method_id"], refund["amount"])
    order["status"] = "cancelled"
    order["cancel_reason"] = reason
    order["payment_history"] += refunds
    return order


def modify_pending_order_address(db, order_id, **address):
    order = get_order_details(db, order_id)
    if "pending" not in order["status"]:
        raise ToolError("Error: Non-pending order cannot be modified")
    order["address"] = {key: address[key] for key in ADDRESS}
    return order


def modify_user_address(db, user_id, **address):
    user = get_user_details(db, user_id)
    user["address"] = {key: address[key] for key in ADDRESS}
    return user


def modify_pending_order_items(db, order_id, item_ids, new_item_ids, payment_method_id):
    order = get_order_details(db, order_id)
    if order["status"] != "pending":
        raise ToolError("Error: Non-pending order cannot be modified")
    _find_items(order, item_ids, "Error: {} not found")
    if len(item_ids) != len(new_item_ids):
        raise ToolError("Error: The number of items to be exchanged should match")
    if any(old == new for old, new in zip(item_ids, new_item_ids, strict=True)):
        raise ToolError("Error: The new item id should be different from the old item id")
    pairs = _pair(db, order, item_ids, new_item_ids)
    difference = sum(variant["price"] - item["price"] for item, variant in pairs)
    method = _payment_method(db, order, payment_method_id)
    if method["source"] == "gift_card" and method["balance"] < difference:
        raise ToolError("Error: Insufficient gift card balance to pay for the new item")
    kind = "payment" if difference > 0 else "refund"
    order["payment_history"].append({"transaction_type": kind, "amount": abs(difference), "payment_method_id": payment_method_id})
    _refund(db, order, payment_method_id, -difference)
    for item, variant in pairs:
        item.update(item_id=variant["item_id"], price=pairs[-1][1]["price"], options=pairs[-1][1]["options"])
    order["status"] = "pending (item modified)"
    return order


def exchange_delivered_order_items(db, order_id, item_ids, new_item_ids, payment_method_id):
    order = get_order_details(db, order_id)
    if order["status"] != "delivered":
        raise ToolError("Error: Non-delivered order cannot be exchanged")
    _find_items(order, item_ids, "Error: Number of {} not found.")
    if len(item_ids) != len(new_item_ids):
        raise ToolError("Error: The number of items to be exchanged should match.")
    pairs = _pair(db, order, item_ids, new_item_ids)
    difference = round(sum(variant["price"] - item["price"] for item, variant in pairs), 2)
    method = _payment_method(db, order, payment_method_id)
    if method["source"] == "gift_card" and method["balance"] < difference:
        raise ToolError("Error: Insufficient gift card balance to pay for the price difference")
    order["status"] = "exchange requested"
    order["exchange_items"] = sorted(item_ids)
    order["exchange_new_items"] = sorted(new_item_ids)
    order["exchange_payment_method_id"] = payment_method_id
    order["exchange_price_difference"] = difference
    return order


def return_delivered_order_items(db, order_id, item_ids, payment_method_id):
    order = get_order_details(db, order_id)
    if order["status"] != "delivered":
        raise ToolError("Error: Non-delivered order cannot be returned")
    method = _payment_method(db, order, payment_method_id)
    if method["source"] != "gift_card" and payment_method_id != order["payment_history"][0]["payment_method_id"]:
        raise ToolError("Error: Payment method should be the original payment method")
    _find_items(order, item_ids, "Error: Some item not found")
    order["status"] = "return requested"
    order["return_items"] = sorted(item_ids)
    order["return_payment_method_id"] = payment_method_id
    return order


def _payment_method(db, order, payment_method_id):
    methods = db["users"][order["user_id"]]["payment_methods"]
    if payment_method_id not in methods:
        raise ToolError("Error: Payment method not found")
    return methods[payment_method_id]


def _find_items(order, item_ids, complaint):
    held = [item["item_id"] for item in order["items"]]
    for item_id in item_ids:
        if item_ids.count(item_id) > held.count(item_id):
            raise ToolError(complaint.format(item_id))


def _pair(db, order, item_ids, new_item_ids):
    """The items of the order and the variants that they become."""
    pairs = []
    for old, new in zip(item_ids, new_item_ids, strict=True):
        item = next(item for item in order["items"] if item["item_id"] == old)
        variants = db["products"][item["product_id"]]["variants"]
        if new not in variants:
            raise ToolError("Error: Variant not found")
        if not variants[new]["available"]:
            raise ToolError(f"Error: New item {new} not found or available")
        pairs.append((item, variants[new]))
    return pairs


def _refund(db, order, payment_method_id, amount):
    method = _payment_method(db, order, payment_method_id)
    if method["source"] == "gift_card":
        method["balance"] = round(method["balance"] + amount, 2)


READS = [find_user_id_by_email, get_user_details, get_order_details, get_product_details]
CHANGES = [
    cancel_pending_order,
    modify_pending_order_address,
    modify_user_address,
    modify_pending_order_items,
    exchange_delivered_order_items,
    return_delivered_order_items,
]
FUNCTIONS = {function.__name__: function for function in READS + CHANGES}
WRITES = {function.__name__ for function in CHANGES}


def draw_world(rng, records, statuses, variants=6):
    """A database with a user who has `records` orders in turn of the given statuses, another who has two, and the first one's user id.

    Every product has `variants` variants, of which two in three are available; an order holds two different products.
    """
    db = {"users": {}, "products": {}, "orders": {}}
    for name in rng.sample(list(GOODS), 4):
        product = {"name": name, "product_id": draw_digits(rng, 10), "variants": {}}
        choices = {key: rng.sample(values, len(values)) for key, values in GOODS[name].items()}
        combinations = [{}]
        for key, values in choices.items():
            combinations = [{**found, key: value} for found in combinations for value in values]
        base = rng.randrange(30, 300)
        for number, options in enumerate(rng.sample(combinations, variants)):
            item_id = draw_digits(rng, 10)
            price = round(base + rng.randrange(-900, 900) / 100, 2)
            product["variants"][item_id] = {"item_id": item_id, "options": options, "available": number % 3 != 2, "price": price}
        db["products"][product["product_id"]] = product
    for number, (first, last) in enumerate(rng.sample([(first, last) for first in FIRST for last in LAST], 2)):
        user = _draw_user(rng, first, last)
        db["users"][user["user_id"]] = user
        for place in range(2 if number else records):
            _add_order(rng, db, user, statuses[place % len(statuses)])
    return db, next(iter(db["users"]))


def settle(db):
    """Makes what the orders say about their items and their one payment agree with the products."""
    for order in db["orders"].values():
        for item in order["items"]:
            item.update({key: db["products"][item["product_id"]]["variants"][item["item_id"]][key] for key in ("price", "options")})
        order["payment_history"][0]["amount"] = round(sum(item["price"] for item in order["items"]), 2)


def draw_address(rng):
    city, state, start = rng.choice(TOWNS)
    address = {"address1": f"{rng.randrange(10, 990)} {rng.choice(STREETS)}", "address2": f"Suite {rng.randrange(100, 999)}"}
    return {**address, "city": city, "country": "USA", "state": state, "zip": start + draw_digits(rng, 3)}


def _draw_user(rng, first, last):
    card, paypal, gift = (f"{kind}_{draw_digits(rng, 7)}" for kind in ("credit_card", "paypal", "gift_card"))
    methods = [
        {"source": "credit_card", "id": card, "brand": rng.choice(["visa", "mastercard"]), "last_four": draw_digits(rng, 4)},
        {"source": "paypal", "id": paypal},
        {"source": "gift_card", "id": gift, "balance": float(rng.randrange(700, 900))},
    ]
    rng.shuffle(methods)
    return {
        "user_id": f"{first}_{last}_{draw_digits(rng, 4)}".lower(),
        "name": {"first_name": first, "last_name": last},
        "address": draw_address(rng),
        "email": f"{first}.{last}{draw_digits(rng, 4)}@example.com".lower(),
        "payment_methods": {method["id"]: method for method in methods},
        "orders": [],
    }


def _add_order(rng, db, user, status):
    items = []
    for product_id in rng.sample(list(db["products"]), 2):
        product = db["products"][product_id]
        variant = rng.choice(list(product["variants"].values()))
        item = {"name": product["name"], "product_id": product_id, "item_id": variant["item_id"], "price": variant["price"]}
        items.append({**item, "options": variant["options"]})
    order_id = "#W" + draw_digits(rng, 7)
    shipped = [{"tracking_id": [draw_digits(rng, 12)], "item_ids": [item["item_id"] for item in items]}]
    payment_method_id = rng.choice(list(user["payment_methods"]))
    optional = ["cancel_reason", "exchange_items", "exchange_new_items", "exchange_payment_method_id", "exchange_price_difference"]
    optional += ["return_items", "return_payment_method_id"]
    db["orders"][order_id] = {
        "order_id": order_id,
        "user_id": user["user_id"],
        "address": dict(user["address"]),
        "items": items,
        "status": status,
        "fulfillments": shipped if status in ("processed", "delivered") else [],
        "payment_history": [{"transaction_type": "payment", "amount": 0.0, "payment_method_id": payment_method_id}],
        **dict.fromkeys(optional),
    }
    user["orders"].append(order_id)


def show_address(address):
    return "{address1}, {address2}, {city}, {state} {zip}, {country}".format(**address)


def show_method(method):
    """How a user speaks of a payment method."""
    if method["source"] == "credit_card":
        return f"my {method['brand']} card ending in {method['last_four']}"
    return "my PayPal account" if method["source"] == "paypal" else "my gift card"


def introduce(user):
    """How the user says who it is, what it is asked for when it does not, and the call by which the oracle finds out."""
    return f"My email is {user['email']}.", "your email", [act("find_user_id_by_email", email=user["email"])]
