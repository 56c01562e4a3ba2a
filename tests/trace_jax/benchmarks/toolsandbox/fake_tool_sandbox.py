"""A stand-in for ToolSandbox where it is not installed: the interfaces that the driver uses, over lists instead of databases.

One scenario, `lamp`: the agent is to call `set_lamp(on=True)` and to say "The lamp is on". `install` makes it importable.
"""

import copy
import json
import sys
import types


class Context:
    def __init__(self):
        self.tool_allow_list, self.tool_augmentation_list = ["set_lamp", "end_conversation"], []
        self.rows = [
            row("SYSTEM", "AGENT", "Be brief."),
            row("SYSTEM", "USER", "You are a user. Example:", ["USER"]),
            row("USER", "AGENT", "Hello", ["USER"]),
            row("SYSTEM", "USER", "You want light."),
            row("USER", "AGENT", "Light, please"),
        ]
        self.lamp, self.active = False, [True]

    @property
    def max_sandbox_message_index(self):
        return len(self.rows) - 1

    def get_database(self, namespace):
        return {"conversation_active": self.active}


def row(sender, recipient, content, visible_to=None, **more):
    return {"sender": sender, "recipient": recipient, "content": content, "visible_to": visible_to or [sender, recipient], **more}


class State:
    context = None


def openai_messages(rows):
    out = []
    for r in rows:
        if r["sender"] == "AGENT" and r["recipient"] == "ENVIRONMENT":
            call = {"id": r["id"], "type": "function", "function": {"name": r["name"], "arguments": r["arguments"]}}
            if "tool_calls" not in out[-1]:
                out.append({"role": "assistant", "content": "", "tool_calls": []})
            out[-1]["tool_calls"].append(call)
        elif r["sender"] == "ENVIRONMENT":
            out.append({"role": "tool", "content": r["content"], "tool_call_id": r["id"], "name": r["name"]})
        else:
            role = {"SYSTEM": "system", "USER": "user", "AGENT": "assistant"}[r["sender"]]
            out.append({"role": role, "content": r["content"]})
    return out


class Role:
    def get_messages(self):
        return [types.SimpleNamespace(**r) for r in State.context.rows]

    def schemas(self, *names):
        return [{"type": "function", "function": {"name": name, "description": "", "parameters": {}}} for name in names]


class Agent(Role):
    def respond(self, ending_index=None):
        seen = [r for r in State.context.rows if "AGENT" in r["visible_to"]]
        message = self.model_inference(openai_messages=openai_messages(seen), openai_tools=self.schemas("set_lamp")).choices[0].message
        if message.tool_calls is None:
            State.context.rows.append(row("AGENT", "USER", message.content))
        for call in message.tool_calls or []:
            if call.function.name != "set_lamp":
                raise KeyError(f"{call.function.name} is not a known allowed tool")
            arguments = call.function.arguments
            State.context.rows.append(row("AGENT", "ENVIRONMENT", "", id=call.id, name=call.function.name, arguments=arguments))


class User(Role):
    def respond(self, ending_index=None):
        flipped = []
        for r in State.context.rows:
            if "USER" in r["visible_to"] and "ENVIRONMENT" not in (r["sender"], r["recipient"]):
                role = {"SYSTEM": "system", "USER": "assistant", "AGENT": "user"}[r["sender"]]
                flipped.append({"role": role, "content": r["content"]})
        message = self.model_inference(openai_messages=flipped, openai_tools=self.schemas("end_conversation")).choices[0].message
        if message.tool_calls is None:
            State.context.rows.append(row("USER", "AGENT", message.content))
            return
        (call,) = message.tool_calls
        if call.function.name != "end_conversation":
            raise KeyError(call.function.name)
        State.context.rows.append(row("USER", "ENVIRONMENT", "", id=call.id, name=call.function.name, arguments=call.function.arguments))


class ExecutionEnvironment(Role):
    def respond(self, ending_index=None):
        last = State.context.rows[-1]
        if last["sender"] == "USER" and json.loads(last["arguments"]):
            State.context.rows.append(row("ENVIRONMENT", "USER", "TypeError: unexpected argument", id=last["id"], name=last["name"]))
        elif last["sender"] == "USER":
            State.context.active[-1] = False
        else:
            State.context.lamp = json.loads(last["arguments"])["on"]
            State.context.rows.append(row("ENVIRONMENT", "AGENT", "None", id=last["id"], name=last["name"]))


class EvaluationResult:
    def __init__(self, milestone_mapping, milestone_similarity=0, minefield_similarity=0, turn_count=0):
        self.milestone_mapping, self.minefield_mapping = milestone_mapping, {}
        self.milestone_similarity, self.minefield_similarity, self.turn_count = milestone_similarity, minefield_similarity, turn_count
        self.similarity = int(minefield_similarity == 0) * milestone_similarity


class Evaluation:
    milestone_matcher = types.SimpleNamespace(milestones=["lamp", "words"])
    minefield_matcher = types.SimpleNamespace(milestones=[])

    def evaluate(self, execution_context, max_turn_count):
        rows = execution_context.rows
        told = [i for i, r in enumerate(rows) if r["sender"] == "AGENT" and r["content"] == "The lamp is on"]
        scores = {0: (len(rows) - 1, float(execution_context.lamp)), 1: (told[-1] if told else 0, float(bool(told)))}
        mean = sum(score for _, score in scores.values()) / 2
        return EvaluationResult(scores, mean, turn_count=len(rows))


class Scenario:
    max_messages, categories, evaluation = 8, ["SINGLE_TOOL_CALL"], Evaluation()

    def __init__(self):
        self.starting_context = Context()

    def play(self, roles, scenario_name):
        State.context = copy.deepcopy(self.starting_context)
        start = len(State.context.rows)
        while State.context.active[-1] and len(State.context.rows) < start + self.max_messages:
            roles[State.context.rows[-1]["recipient"]].respond()
        return State.context


def conversation(execution_context, evaluation_result, milestones, minefields):
    shown = [(i, r) for i, r in enumerate(execution_context.rows) if "AGENT" in r["visible_to"]]
    messages = openai_messages([r for _, r in shown])
    target = [
        {"database_namespace": "SETTING", "target_dataframe": [{"wifi": True}]},
        {"database_namespace": "SANDBOX", "target_dataframe": [{"content": "The lamp is on"}]},
    ]
    more = {"snapshot_constraint": "snapshot_similarity", "column_similarity_measure": {}}
    matches = [
        {"milestone_index": i, "milestone": {"snapshot_constraints": [{**target[i], **more}]}, "milestone_similarity": score}
        for i, (_, score) in evaluation_result.milestone_mapping.items()
    ]
    messages[-1][f"{messages[-1]['role']}_details"] = {"milestone_matches": matches, "database_update": {"SETTING": [{"wifi": True}]}}
    return messages


def install(monkeypatch, folder):
    """Makes `tool_sandbox` and `openai` importable as this; `folder` takes the metadata and a source file."""
    (folder / "tool_sandbox-0.0.0.dist-info").mkdir()
    (folder / "tool_sandbox-0.0.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: tool_sandbox\nVersion: 0.0.0\n")
    (folder / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(str(folder))
    kinds = {"USER": "USER", "AGENT": "AGENT", "EXECUTION_ENVIRONMENT": "ENVIRONMENT"}
    modules = {
        "tool_sandbox": {"__file__": str(folder / "__init__.py")},
        "tool_sandbox.common.evaluation": {"EvaluationResult": EvaluationResult},
        "tool_sandbox.common.execution_context": {
            "DatabaseNamespace": types.SimpleNamespace(SANDBOX="SANDBOX"),
            "RoleType": types.SimpleNamespace(**kinds),
            "get_current_context": lambda: State.context,
            "set_current_context": lambda context: setattr(State, "context", context),
        },
        "tool_sandbox.common.message_conversion": {"serialize_to_conversation": conversation},
        "tool_sandbox.common.tool_discovery": {"ToolBackend": types.SimpleNamespace(DEFAULT="DEFAULT")},
        "tool_sandbox.roles.execution_environment": {"ExecutionEnvironment": ExecutionEnvironment},
        "tool_sandbox.roles.openai_api_agent": {"OpenAIAPIAgent": Agent},
        "tool_sandbox.roles.openai_api_user": {"OpenAIAPIUser": User},
        "tool_sandbox.scenarios": {"named_scenarios": lambda preferred_tool_backend: {"lamp": Scenario()}},
        "tool_sandbox.common": {},
        "tool_sandbox.roles": {},
        "openai": {"OpenAI": lambda **_: types.SimpleNamespace(chat=FailingEndpoint())},
    }
    for name, members in modules.items():
        module = types.ModuleType(name)
        module.__dict__.update(members)
        monkeypatch.setitem(sys.modules, name, module)


class FailingEndpoint:
    """An endpoint that answers with HTTP 503."""

    def __init__(self):
        self.completions = self

    def create(self, **_):
        error = RuntimeError("key sk-1234567890 is over its quota")
        error.status_code = 503
        raise error
