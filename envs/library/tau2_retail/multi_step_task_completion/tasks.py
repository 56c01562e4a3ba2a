# include: ../../episode.py


# include: ../../tau2.py


# include: ../world.py


# tools: find_user_id_by_email get_order_details cancel_pending_order modify_pending_order_address return_delivered_order_items

HINT = "Keep a list of what was asked for, and look after each result what is still open before you answer."


def make_task(seed, knobs):
    """Several requests that say everything they need; what counts is that all are finished."""
    rng = random.Random(seed)
    db, user_id = draw_world(rng, int(knobs["records"]), ["pending", "delivered"])
    orders = db["users"][user_id]["orders"]
    wishes, actions = [], []
    *asked, other = rng.sample(orders, int(knobs["steps"]) + 1)
    for order_id in asked:
        order = db["orders"][order_id]
        if order["status"] == "delivered":
            item, method = rng.choice(order["items"]), order["payment_history"][0]["payment_method_id"]
            wishes.append(f"Please return item {item['item_id']} of order {order_id}, the money goes to {method}.")
            actions.append(act("return_delivered_order_items", order_id=order_id, item_ids=[item["item_id"]], payment_method_id=method))
        elif rng.random() < 0.5:
            reason = rng.choice(CANCEL_REASONS)
            wishes.append(f"Please cancel order {order_id}, it {'is' if 'needed' in reason else 'was'} {reason}.")
            actions.append(act("cancel_pending_order", order_id=order_id, reason=reason))
        else:
            address = draw_address(rng)
            wishes.append(f"Please send order {order_id} to {show_address(address)}.")
            actions.append(act("modify_pending_order_address", order_id=order_id, **address))
    wishes.insert(rng.randrange(len(wishes) + 1), f"My order {other} stays as it is.")
    return make(db, user_id, wishes, actions)
