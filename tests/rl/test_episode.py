import dataclasses

import numpy as np
import pytest

from envs import Check, EnvironmentFault, Reply, Score, Start, parse_package
from rl.engines.protocol import Completion, Request
from rl.episode import Act, Sampling, Task, play
from rl.packing import without_hint
from rl.trajectory import StopReason, Trajectory
from tests.rl.chats import chat, drive

SOURCE = "TOOLS = []\nclass Environment: ...\ndef oracle(): ...\ndef hint(): ..."
META = {"name": "toy", "capability": "", "target": "toy", "version": "1", "knobs": {}, "max_turns": 4, "rationale": ""}
TASK = Task(package=parse_package(META, SOURCE), seed=3, rollout=1, group="3", task_id="toy:3", split="train", trial=1)
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {}}}}}]
SAMPLING = Sampling(temperature=1.0, run_seed=11, max_tokens=50)
START = Start("Be brief.", [{"role": "user", "content": "hello"}])


def call(name="add", **arguments) -> str:
    return chat().decode(chat().encode_reply({"content": "", "tool_calls": [{"name": name, "arguments": arguments}]})[:-1])


def perform(turns, answers, task=TASK, sampling=SAMPLING, score=None, template="quickstart", tools=TOOLS) -> tuple[Trajectory, list]:
    """Plays a task against scripted turns and answers; returns what was asked as well."""
    answers, fixed = list(answers), {"reset": START, "score": score or Score(1.0, {})}
    game = play(task, chat(template), tools, "base", "s", sampling)
    return drive(game, chat(template), turns, lambda act: fixed[act.op] if act.op in fixed else answers.pop(0))


def test_an_episode_becomes_one_aligned_trajectory():
    turns = [call(a="x") + "\n" + call("sub", a="y"), "<think>hm</think>Done?", "bye"]
    answers = [Reply("1", False), Reply("Error: no", False), Reply("ok", False), Reply(None, True)]
    checks = {
        "action:0": Check(True, {"name": "sub"}, None, call=1),
        "communicate:0": Check(False, "x", None, call=2),
        "db": Check(True, {}, {}),
    }
    t, asked = perform(turns, answers, score=Score(1.0, checks))
    assert [(a.op, a.arguments) for a in asked if isinstance(a, Act)] == [
        ("reset", ()),
        ("call", ("add", {"a": "x"})),
        ("call", ("sub", {"a": "y"})),
        ("respond", ("Done?",)),
        ("respond", ("bye",)),
        ("score", ()),
    ]
    assert [m["role"] for m in t.messages] == ["system", "user", "assistant", "tool", "tool", "assistant", "user", "assistant"]
    assert [m["content"] for m in t.messages[2:]] == ["", "1", "Error: no", "<think>hm</think>Done?", "ok", "bye"]
    ids = [c["id"] for c in t.messages[2]["tool_calls"]]
    assert [m["tool_call_id"] for m in t.messages[3:5]] == ids and len(set(ids)) == 2 and all(i.startswith("call_") for i in ids)
    assert t.checks["action:0"]["message_index"] == 2 and t.checks["communicate:0"]["message_index"] == 5
    assert t.checks["db"]["message_index"] is None
    assert (t.reward, t.success, t.stop_reason, t.error) == (1.0, True, StopReason.DONE, None)
    assert (t.id, t.environment, t.group, t.policy) == ("toy:3#1", "toy", "3", {"name": "base", "version": 5})
    assert t.metrics == {"turns": 3, "tool_calls": 2, "tool_errors": 1, "sampled_tokens": t.loss_mask.sum()}

    # The tokens: what the template renders, the mask on what was sampled alone, ends of turns included.
    whole = chat().tokenizer.apply_chat_template(t.messages, tools=TOOLS, tokenize=False)
    assert chat().decode(t.tokens) + "\n" == whole
    sampled = [chat().decode(t.tokens[(t.loss_mask == 1) & (t.turns == i)]) for i in range(3)]
    assert sampled == [text + "<|im_end|>" for text in turns]
    assert t.tokens[np.flatnonzero(t.loss_mask)[-1]] == chat().end
    assert np.all((t.logprobs < 0) == (t.loss_mask == 1))
    assert np.all(np.diff(t.turns) >= 0) and set(t.turns) == {0, 1, 2}
    requests = [a for a in asked if isinstance(a, Request)]
    assert all(r.key == (11, 3, 1) and r.stop == (chat().end,) for r in requests)
    for earlier, later in zip(requests, requests[1:], strict=False):
        assert later.tokens[: len(earlier.tokens)].tolist() == earlier.tokens.tolist()


def test_calls_in_tags_are_typed_by_the_schemas_and_thoughts_begin_where_the_prompt_began_them():
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}}]
    turns = [
        "Hm.\n</think>\n\n<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>",
        "Ah.\n</think>\n\nbye",
    ]
    t, asked = perform(turns, [Reply("1", False), Reply(None, True)], template="qwen3_6", tools=tools)
    assert [(a.op, a.arguments) for a in asked if isinstance(a, Act)][1:3] == [("call", ("add", {"a": 1})), ("respond", ("bye",))]
    assert t.messages[2]["content"] == "<think>\nHm.\n</think>" and t.messages[4]["content"] == "<think>\nAh.\n</think>\n\nbye"
    c = chat("qwen3_6")
    whole = c.tokenizer.apply_chat_template(t.messages, tools=tools, tokenize=False, preserve_thinking=True)
    assert c.decode(t.tokens) + "\n" == whole
    lost, _ = perform(["Hm. <tool_call>\n<function=add>\n</function>\n</tool_call>"], [Reply(None, True)], template="qwen3_6", tools=tools)
    assert "tool_calls" not in lost.messages[2] and lost.stop_reason is StopReason.DONE
    bad, _ = perform(["</think><tool_call>\n<function=add>\n</tool_call>"], [], template="qwen3_6", tools=tools)
    assert bad.stop_reason is StopReason.INVALID_ACTION and bad.reward == 0.0


@pytest.mark.parametrize(
    "turns, reason",
    [
        ([("so then", "length")], StopReason.MAX_TOKENS),
        ([("so then", "context")], StopReason.CONTEXT),
        (["<tool_call>\n{}\n</tool_call>"], StopReason.INVALID_ACTION),
        (["<tool_call>\n"], StopReason.INVALID_ACTION),
        ([call(a="x")] * 4, StopReason.MAX_TURNS),
    ],
)
def test_what_the_model_did_wrong_earns_nothing_and_keeps_its_evidence(turns, reason):
    check = {"db": Check(True, 1, 1)}
    t, asked = perform(turns, [Reply("1", False)] * 4, score=Score(1.0, check))
    assert (t.stop_reason, t.reward, t.success, t.error) == (reason, 0.0, False, None)
    assert list(t.checks) == ["db"] and t.loss_mask.sum() > 0
    assert [m["content"] for m in t.messages if m["role"] == "assistant"][-1] == (
        ""
        if reason == StopReason.MAX_TURNS
        else chat().decode(chat().tokenizer(turns[0] if isinstance(turns[0], str) else turns[0][0], add_special_tokens=False).input_ids)
    )


def test_the_smaller_limit_of_turns_holds():
    limited = dataclasses.replace(SAMPLING, max_turns=2)
    t, _ = perform([call(a="x")] * 2, [Reply("1", False)] * 2, sampling=limited)
    assert t.stop_reason == StopReason.MAX_TURNS and t.metrics["turns"] == 2


def test_calls_behind_the_end_of_the_episode_are_not_made():
    t, asked = perform([call(a="x") + call(a="y")], [Reply("over", True)])
    assert t.stop_reason == StopReason.DONE and sum(isinstance(a, Act) and a.op == "call" for a in asked) == 1


@pytest.mark.parametrize("at", ["reset", "call", "respond", "score"])
def test_what_the_environment_did_wrong_is_an_error_without_a_reward(at):
    game = play(TASK, chat(), TOOLS, "base", "s", SAMPLING)
    texts = iter([call(a="x"), "bye"])
    need = next(game)
    with pytest.raises(StopIteration) as ended:
        while True:
            if isinstance(need, Request):
                tokens = chat().tokenizer(next(texts), add_special_tokens=False).input_ids + [chat().end]
                need = game.send(Completion("s", np.array(tokens), np.full(len(tokens), -1.0), "stop", 1))
            elif need.op == at:
                need = game.throw(EnvironmentFault("crash", "the worker ended"))
            else:
                need = game.send({"reset": START, "call": Reply("1", False), "respond": Reply(None, True)}[need.op])
    t = ended.value.value
    assert (t.reward, t.success, t.stop_reason) == (None, False, StopReason.ENVIRONMENT_ERROR)
    assert t.error == {"kind": "crash", "message": "the worker ended"}
    assert len(t.tokens) == len(t.logprobs) == len(t.versions)


def test_instructions_stand_behind_the_system_prompt_and_are_part_of_it():
    told, asked = perform(["bye"], [Reply(None, True)], task=dataclasses.replace(TASK, instructions="Count twice."))
    assert told.messages[0] == {"role": "system", "content": "Be brief.\n\nCount twice."} and told.hint is None
    assert asked[1].tokens.tolist() == chat().start("Be brief.\n\nCount twice.", START.messages, TOOLS).tolist()


def test_a_hint_is_seen_while_sampling_and_cut_out_for_training():
    hinted, asked = perform(["bye"], [Reply(None, True)], task=dataclasses.replace(TASK, hint="Count twice."))
    plain, _ = perform(["bye"], [Reply(None, True)])
    prompt = chat().decode(next(a for a in asked if isinstance(a, Request)).tokens)
    assert "<expert_guidance>\nCount twice.\n</expert_guidance>" in prompt
    assert hinted.hint["text"] == "Count twice." and plain.hint is None
    assert "Count twice." not in str(hinted.messages)
    assert without_hint(hinted)["tokens"].tolist() == plain.tokens.tolist()
    assert without_hint(hinted)["loss_mask"].tolist() == plain.loss_mask.tolist()


def test_a_full_context_before_the_first_token_ends_the_episode():
    t, _ = perform([("", "context")], [])
    assert t.stop_reason == StopReason.CONTEXT and t.loss_mask.sum() == 0
    assert Trajectory.from_json(t.to_json()).id == t.id
