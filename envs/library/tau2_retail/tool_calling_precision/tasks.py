# include: ../../episode.py


# include: ../../tau2.py


# include: ../world.py


# tools: find_user_id_by_email get_order_details modify_pending_order_address modify_pending_order_items modify_user_address

HINT = "Copy every value as the user wrote it, in the order and under the name that the tool's schema gives, and leave none out."


def make_task(seed, knobs):
    """Changes whose arguments the user dictates: addresses in seven parts, lists of item ids that belong together, a payment method."""
    rng = random.Random(seed)
    db, user_id = draw_world(rng, int(knobs["records"]), ["pending"])
    user = db["users"][user_id]
    wishes, actions = [], []
    for order_id in rng.sample(user["orders"], int(knobs["steps"])):
        order = db["orders"][order_id]
        kind = rng.choice(["address", "items", "user"] if "user" not in {kind for kind, _ in actions} else ["address", "items"])
        address = draw_address(rng)
        if rng.random() < knobs["near"]:  # hardly another than before
            address = {**order["address"], "zip": order["address"]["zip"][:2] + draw_digits(rng, 3), "address2": address["address2"]}
        if kind == "address":
            wishes.append(f"Please send order {order_id} to {show_address(address)}.")
            actions.append((kind, act("modify_pending_order_address", order_id=order_id, **address)))
        elif kind == "user":
            wishes.append(f"My user id is {user_id}, and my own address is now {show_address(address)}.")
            actions.append((kind, act("modify_user_address", user_id=user_id, **address)))
        else:
            pairs = []
            for item in order["items"]:
                variants = db["products"][item["product_id"]]["variants"].values()
                new = rng.choice([variant for variant in variants if variant["item_id"] != item["item_id"]])
                new["available"] = True
                pairs.append((item["item_id"], new["item_id"]))
            method = rng.choice([key for key, found in user["payment_methods"].items() if found["source"] != "gift_card"])
            listed = " and ".join(f"item {old} to {new}" for old, new in pairs)
            wishes.append(f"In order {order_id} please change {listed}, with {method} for the difference.")
            old_ids, new_ids = map(list, zip(*pairs, strict=True))
            change = act(
                "modify_pending_order_items",
                order_id=order_id,
                item_ids=old_ids,
                new_item_ids=new_ids,
                payment_method_id=method,
            )
            actions.append((kind, change))
    return make(db, user_id, wishes, [action for _, action in actions])
