# include: ../../episode.py


# include: ../../tau2.py


# include: ../world.py


# tools: find_user_id_by_email get_user_details get_order_details get_product_details exchange_delivered_order_items

HINT = "Compare every option, the price and the availability of all variants before you choose one."


def make_task(seed, knobs):
    """Exchanges for variants that the user describes: all options but one as before, or the cheapest available one of a kind."""
    rng = random.Random(seed)
    steps = int(knobs["steps"])
    db, user_id = draw_world(rng, 2, ["delivered"], int(knobs["records"]))
    user = db["users"][user_id]
    order = db["orders"][rng.choice(user["orders"])]
    method = rng.choice(list(user["payment_methods"].values()))
    looks = [act("get_user_details", user_id=user_id), act("get_order_details", order_id=order["order_id"])]
    actions, parts, old_ids, new_ids = [], [], [], []
    for item in rng.sample(order["items"], steps):
        variants = db["products"][item["product_id"]]["variants"]
        item["item_id"], item["options"] = next((key, dict(variants[key]["options"])) for key in variants)
        item["price"] = variants[item["item_id"]]["price"]
        others = [variant for variant in variants.values() if variant["item_id"] != item["item_id"]]
        wanted, *decoys = rng.sample(others, len(others))
        wanted["available"] = True
        key = rng.choice(list(item["options"]))
        if rng.random() < 0.5:
            value = rng.choice([value for value in GOODS[item["name"]][key] if value != item["options"][key]])
            wanted["options"] = {**item["options"], key: value}
            _set_decoys(rng, item, wanted, decoys, knobs["near"])
            parts.append(f"the {item['name']} for the one with {key} {value} and otherwise the same options")
        else:
            value = rng.choice(GOODS[item["name"]][key])
            wanted["options"] = {**wanted["options"], key: value}
            _set_decoys(rng, item, wanted, decoys, knobs["near"])
            rivals = [decoy for decoy in decoys if decoy["options"][key] == value and decoy["available"]]
            wanted["price"] = round(min([wanted["price"], *(rival["price"] - rng.randrange(20, 300) / 100 for rival in rivals)]), 2)
            if item["options"][key] == value:  # the one that the user has already is not meant
                wanted["price"] = round(min(wanted["price"], item["price"] - rng.randrange(20, 300) / 100), 2)
            parts.append(f"the {item['name']} for the cheapest available one with {key} {value}")
        actions.append(act("get_product_details", product_id=item["product_id"]))
        old_ids.append(item["item_id"])
        new_ids.append(wanted["item_id"])
    wish = f"In order {order['order_id']} I want to exchange {' and '.join(parts)}. The difference goes to {show_method(method)}."
    change = act(
        "exchange_delivered_order_items",
        order_id=order["order_id"],
        item_ids=old_ids,
        new_item_ids=new_ids,
        payment_method_id=method["id"],
    )
    return make(db, user_id, [wish], [*actions, change], looks)


def _set_decoys(rng, item, wanted, decoys, near):
    """Gives near decoys all options of `wanted` but one; no two variants have the same options."""
    taken = [item["options"], wanted["options"]]
    for decoy in decoys:
        free = [decoy["options"]]
        if rng.random() < near:
            ways = [(key, value) for key, values in GOODS[item["name"]].items() for value in values]
            free = [{**wanted["options"], key: value} for key, value in rng.sample(ways, len(ways))] + free
        ways = [{}]
        for key, values in GOODS[item["name"]].items():
            ways = [{**found, key: value} for found in ways for value in values]
        decoy["options"] = next(options for options in free + ways if options not in taken)
        taken.append(decoy["options"])
