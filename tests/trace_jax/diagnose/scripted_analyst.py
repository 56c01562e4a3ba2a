"""An LLM that diagnoses by rote: reads a prompt of step 1 as a model would, and answers it validly and always alike.

Its labels follow from what it reads: a conversation with a tool error lacks the first capability, every other label is a coin that depends
on the conversation, the capability and the run, so that runs differ.
"""

import hashlib
import json
import re


def answer(request):
    """The answer to a parsed chat-completions request."""
    prompt = "\n".join(message["content"] for message in request["messages"])
    if "===== proposals =====" in prompt:
        return json.dumps(merging(prompt))
    if "===== conversation =====" in prompt:
        return json.dumps(labelling(prompt, request))
    return json.dumps(discovery(prompt))


def discovery(prompt):
    ids = re.findall(r"^===== conversation (.+) =====$", prompt, re.MULTILINE)

    def proposal(name, what):
        description = f"{what}. LACKING: it is not done. PRESENT: it is done."
        return {"name": name, "description": description, "examples": [{"trajectory": ids[0], "note": "message 3: it is not done"}]}

    return {
        "capabilities": [
            proposal("error_recovery", "Goes on after an error"),
            proposal("recovering_from_errors" if len(ids) % 2 else "error_recovery_skill", "Goes on after errors"),
            proposal("request_tracking", "Keeps track of requests"),
        ]
    }


def merging(prompt):
    numbered = re.findall(r"^(\d+)\. `(\w+)`: (.+)$", prompt, re.MULTILINE)
    groups = {}
    for number, name, description in numbered:
        key = "error" if "error" in name else name
        groups.setdefault(key, {"name": name, "description": description, "proposals": []})["proposals"].append(int(number))
    return {"capabilities": list(groups.values()), "dropped": []}


def labelling(prompt, request):
    ours, _, rest = prompt.partition("===== conversation =====")
    conversation = rest.partition("===== end of conversation =====")[0]  # a repair follows it, and changes no label
    names = re.findall(r"^- `(\w+)`: ", ours[ours.index("# The capabilities") :], re.MULTILINE)
    said = re.findall(r"^\[(\d+)\] agent: (.+)$", conversation, re.MULTILINE) or re.findall(
        r"^\[(\d+)\] user: (.+)$", conversation, re.MULTILINE
    )
    index, text = max(said, key=lambda message: len(message[1]))
    quote = " ".join(text.split("...")[0].split()[:6]) or text
    entries = {}
    for place, name in enumerate(names):
        coin = hashlib.sha256(f"{name} {conversation} {request.get('seed')}".encode()).digest()[0]
        lacking = "tool result (error)" in conversation if place == 0 else coin < 90
        label = "NA" if coin > 230 else "LACKING" if lacking else "PRESENT"
        evidence = {"message_index": None, "quote": ""} if label == "NA" else {"message_index": int(index), "quote": quote}
        entries[name] = {**evidence, "reason": "This shows it.", "label": label}
    return entries
