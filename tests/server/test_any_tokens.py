"""Parsers take any token ids: no exception, the same answer however the ids are cut, and no control token is shown."""

from hypothesis import Phase, assume, given, settings
from hypothesis import strategies as st

from loaders.tokenizer import load_tokenizer
from server.parsers import choose_parser
from tests.server.conftest import ASSETS
from tests.server.scripted_model import deepseek_tokenizer
from tests.server.test_parser_properties import TOOLS, counted_answer_of
from tests.tables import rows

PROMPTS = {
    "harmony": ["<|start|>assistant", "<|start|>assistant<|channel|>final<|message|>", "Hi"],
    "deepseek": ["<｜Assistant｜></think>", "<｜Assistant｜><think>", "<｜tool▁output▁end｜>"],
}


def ids_of(tokenizer):
    """Lists of ids of which half are control tokens; the others may end inside a character."""
    control = sorted(tokenizer.special_tokens.values())
    return st.lists(st.one_of(st.sampled_from(control), st.integers(0, tokenizer.vocab_size - 1)), max_size=40)


@rows("dialect", *PROMPTS)
def test_any_token_ids_are_read(tmp_path, dialect):
    tokenizer = load_tokenizer(ASSETS) if dialect == "harmony" else deepseek_tokenizer(tmp_path / "model")
    make_parser, names = choose_parser(tokenizer), tokenizer.special_tokens

    @settings(max_examples=150, phases=[Phase.generate])
    @given(ids_of(tokenizer), st.sampled_from(PROMPTS[dialect]), st.lists(st.integers(0, 40), max_size=5))
    def run(ids, prompt, cuts):
        spelled = b"".join(tokenizer.token_bytes(each) for each in ids if each not in names.values())
        assume(not any(name.encode() in spelled for name in names))
        prompt_ids = tokenizer.encode(prompt)
        whole = counted_answer_of(make_parser(prompt_ids, TOOLS), ids, ())
        for others in (cuts, range(1, len(ids))):
            for of_texts in (None, tokenizer):
                assert counted_answer_of(make_parser(prompt_ids, TOOLS), ids, others, of_texts) == whole
        assert not [name for name in names if name in str(whole)]

    run()
