import json

from hypothesis import given
from hypothesis import strategies as st

from rl.chat import Chat
from trace_jax.quickstart.tokenizer import SPECIAL, TAGS, build_tokenizer, pieces, save_tokenizer
from trace_jax.quickstart.world import NOUNS, WORLD

TOKENIZER = build_tokenizer()


@given(st.text())
def test_every_text_comes_back(text):
    ids = TOKENIZER.encode(text, add_special_tokens=False).ids
    assert TOKENIZER.decode(ids, skip_special_tokens=False) == text


def test_every_piece_is_one_token():
    assert not [piece for piece in [*pieces(), *SPECIAL, *TAGS] if len(TOKENIZER.encode(piece, add_special_tokens=False).ids) != 1]


def test_an_order_id_is_the_same_token_wherever_it_stands():
    (token,) = TOKENIZER.encode("A7", add_special_tokens=False).ids
    for text in ('{"order_id": "A7"}', "cancel order A7 please.", "red cup A7\nblue mug B1", "cannot return A7 it is lost."):
        assert token in TOKENIZER.encode(text, add_special_tokens=False).ids


def test_a_zip_code_is_five_tokens():
    assert len(TOKENIZER.encode("90210", add_special_tokens=False).ids) == 5  # copied digit by digit, so that copying can fail


def test_the_folder_is_a_chat_with_short_prompts(tmp_path):
    save_tokenizer(tmp_path)
    chat = Chat(tmp_path)
    assert chat.decode([chat.end]) == "<|im_end|>"
    request = [{"role": "user", "content": f"cancel order {WORLD['ORDER_IDS'][0]} please."}]
    prompt = chat.start(WORLD["SYSTEM"], request, WORLD["TOOLS"])
    assert len(prompt) < 90
    assert chat.decode(prompt).count("(order_id)") == 3  # tools are listed by name and arguments alone
    # saved twice, byte for byte the same
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    save_tokenizer(tmp_path)
    assert before == {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    assert json.loads(before["tokenizer_config.json"])["eos_token"] == "<|im_end|>"


def test_the_nouns_of_target_and_library_are_words_of_the_vocabulary():
    assert {noun + " " for noun in NOUNS} <= set(pieces())
