"""What the customer-service targets of tau2-bench share: the agent's instructions, the form of results, how a task is put together.

Between `episode.py` and the `world.py` of a target, which defines `settle(db)` and `introduce(user)`.
"""

INSTRUCTIONS = """<instructions>
You are a customer service agent who helps the user as the <policy> below allows.
In each turn either write to the user or make one tool call, never both.
Tool calls are valid JSON.
</instructions>
"""
GREETING = [{"role": "assistant", "content": "Hi! How can I help you today?"}]
MISFIT = "Error: "
STREETS = ["Birch Lane", "Harbour Road", "Mill Street", "Orchard Way", "Station Road", "Willow Court"]


def render(result):
    return result if isinstance(result, str) else json.dumps(result)


def make(db, user_id, wishes, actions, looks=(), told=(), said=(), asked=(), reason="It is no longer needed."):
    """The task of some wishes.

    Args:
      actions: what is graded; `looks` are reads of the oracle that nobody grades, `said` is what it tells at the end.
      asked: the changes that the user wants, allowed or not.
      reason: the user's answer when asked for it.
    """
    settle(db)
    who, question, identify = introduce(db["users"][user_id])
    writes = [action for action in actions if action["name"] in WRITES]
    reads = [action for action in actions if action["name"] not in WRITES]
    ask = [{"text": "I will make these changes: " + ", ".join(a["name"].replace("_", " ") for a in writes) + ". Shall I go ahead?"}]
    return {
        "db": db,
        "request": " ".join(["Hi!", who, *wishes]),
        "facts": [[[question], who], [ASKS_FIRST, YES], [["reason", "why"], reason], [ASKS_LAST, YES]],
        "actions": actions,
        "asked": list(asked),
        "told": list(told),
        "script": [*identify, *looks, *reads, *(ask if writes else []), *writes, {"text": " ".join(said) or "All of it is done."}],
    }
