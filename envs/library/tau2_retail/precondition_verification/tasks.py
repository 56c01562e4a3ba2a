# include: ../../episode.py


# include: ../../tau2.py


# include: ../world.py


# tools: find_user_id_by_email get_order_details cancel_pending_order modify_pending_order_address

HINT = "Read the order before you change it, and hold it against each condition of the policy, whose it is first."


def make_task(seed, knobs):
    """Changes of orders that the user names; the policy allows them or not by whose order it is, its status, and the user's reason."""
    rng = random.Random(seed)
    steps = int(knobs["steps"])
    db, user_id = draw_world(rng, int(knobs["records"]), ["pending"])
    user, other = db["users"].values()
    *mine, untouched = rng.sample(user["orders"], steps + 1)
    foreign = rng.sample(other["orders"], 2)
    asked, wishes, actions, told, said = [], [f"My order {untouched} stays as it is."], [], [], []
    for place in range(steps):
        obstacle = None if rng.random() < knobs["allowed"] else rng.choice(["another account", *REASONS])
        if obstacle == "another account" and not foreign:
            obstacle = "wrong status"
        order = db["orders"][foreign.pop() if obstacle == "another account" else mine[place]]
        order_id = order["order_id"]
        if obstacle == "wrong status":
            order["status"] = rng.choice(["processed", "delivered", "cancelled"])
        actions.append(act("get_order_details", order_id=order_id))
        if obstacle == "reason not accepted" or rng.random() < 0.5:
            reason = rng.choice(OTHER_REASONS if obstacle == "reason not accepted" else CANCEL_REASONS)
            words = {"no longer needed": "it is no longer needed", "ordered by mistake": "it was ordered by mistake"}.get(
                reason, f"I {reason}"
            )
            wishes.append(f"I want to cancel order {order_id} because {words}.")
            write = act("cancel_pending_order", order_id=order_id, reason=reason)
        else:
            address = draw_address(rng)
            wishes.append(f"Order {order_id} has to go to {show_address(address)}.")
            write = act("modify_pending_order_address", order_id=order_id, **address)
        asked.append(write)
        if obstacle is None:
            actions.append(write)
        else:
            told.append({"all": [order_id, obstacle], "any": [], "none": [word for word in REASONS if word != obstacle]})
            said.append(f"I cannot change {order_id}: {obstacle}.")
    return make(db, user_id, wishes, actions, told=told, said=said, reason="I have told you my reason.", asked=asked)
