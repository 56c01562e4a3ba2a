from envs import Reply, Score, Start
from rl.replay import steps
from tests.rl import test_episode
from tests.rl.test_episode import call, perform


def test_what_the_environment_saw_is_read_from_the_messages(monkeypatch):
    """Also where the episode begins with a conversation, in which somebody else was the assistant."""
    before = {"role": "assistant", "content": "", "tool_calls": [{"name": "add", "arguments": {}}]}
    begin = [{"role": "user", "content": "add"}, before, {"role": "tool", "content": "0"}, {"role": "assistant", "content": "It is 0."}]
    for messages in (test_episode.START.messages, [*begin, {"role": "user", "content": "again"}]):
        monkeypatch.setattr(test_episode, "START", Start("Be brief.", messages))
        answers = [Reply("1", False), Reply("Thanks.", False), Reply(None, True)]
        t, asked = perform([call(a="x"), "<think>hm</think>It is 1.", "bye"], answers, score=Score(1.0, {}))
        found = steps(t)
        assert [step.act for step in found] == asked[2:-1:2] and [step.text for step in found] == ["1", "Thanks.", None]
        assert [step.done for step in found] == [False, False, True]
        assert [t.messages[step.message_index]["content"] for step in found] == ["1", "Thanks.", "bye"]
