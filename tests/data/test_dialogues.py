"""From files of dialogues to batches, and every fault of them."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from p2ptrain.base.errors import CorpusError
from p2ptrain.cli import cli
from p2ptrain.data import own_text, tokenizing
from p2ptrain.data.author_text import LocalFile, Source
from p2ptrain.data.chat_template import CHATML_SOURCE, ChatTemplate, Dialogue
from p2ptrain.data.chat_tokens import BATCH_CHARACTERS, ChatEncoder, answer_ends
from p2ptrain.data.dialogues import dialogue_of
from p2ptrain.data.rows import Unusable
from p2ptrain.data.tokenizer import ByteTokenizer, JsonTokenizer
from p2ptrain.tokens.packing import COUNTS, IGNORED, EncodedDialogue, decoded_rows
from tests.data.building import Built, build
from tests.data.dialogues import made, write_jsonl
from tests.data.made_tokenizer import with_bos

END = "<|im_end|>"


@pytest.fixture
def chats(tmp_path: Path) -> Path:
    return write_jsonl(tmp_path / "chats.jsonl", made(60))


def taught(tmp_path: Path, path: Path, length: int = 170, **wanted: object) -> Built:
    """Return a run of the dialogues, in a directory of its own."""
    run = tmp_path / f"run {len([*tmp_path.iterdir()])}"
    return build(run, path, **{"sequence_length": length, "held_out": 0.1, **wanted})


def batch(built: Built) -> np.ndarray:
    """Return inputs, labels and positions of the training rows, [B, 3, T]."""
    return np.stack(decoded_rows(built.training.reshape(-1, built.index.row_tokens)), axis=1)


def json_tokenizer() -> JsonTokenizer:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: place for place, letter in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|im_start|>", END, "<|endoftext|>"])
    return JsonTokenizer(tokenizer)


def test_batches_are_whole_dialogues_whose_answers_are_predicted(chats: Path, tmp_path: Path):
    corpus = taught(tmp_path, chats).corpus
    rows = corpus.step_batch(1, "amber", 0, 2)
    assert rows.shape == (2, 3, 170)
    for inputs, labels, positions in rows.tolist():
        starts = [place for place, position in enumerate(positions) if position == 0]
        texts = [bytes(inputs[begin:end]).decode() for begin, end in zip(starts, [*starts[1:], None], strict=False)]
        assert len(texts) == 3  # two dialogues and padding
        assert texts[0].startswith("<|im_start|>user\nsay ")
        assert texts[0].endswith(f"!{END}\n\0")
        predicted = bytes(label for label in labels[: starts[1]] if label != IGNORED).decode()
        assert predicted == texts[0].partition("assistant\n")[2]
        assert {*labels[starts[2] - 1 :]} == {IGNORED}
        assert labels[starts[1] - 1] == IGNORED
    held_out = next(corpus.validation_batches(170, 1))
    assert held_out.shape == (1, 3, 170)
    assert bytes(corpus.prompt_ids()).decode().endswith("<|im_start|>assistant\n")


def test_a_template_may_write_what_begins_a_text(chats: Path, tmp_path: Path):
    """Check that templates that write ``bos_token``, as of Llama and Gemma, get the text of that token."""
    source = "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{{ eos_token }}{% endfor %}"
    source += "{% if add_generation_prompt %}[assistant]{% endif %}"
    (template := tmp_path / "t.jinja").write_text(source)
    tokenizer = with_bos(tmp_path / "tokenizer.json")
    inputs, _, positions = batch(taught(tmp_path, chats, template=template, tokenizer=tokenizer))[0].tolist()
    assert [place for place, each in enumerate(inputs) if each == 256] == [
        place for place, each in enumerate(positions) if each == 0 and inputs[place] != 257
    ]


def test_what_a_template_writes_itself_counts_in_a_batch(monkeypatch: pytest.MonkeyPatch):
    """A long template that is written for each of many short dialogues must not make gigabytes at once."""
    source = "{% if false %}" + BATCH_CHARACTERS // 4 * "x" + "{% endif %}{{ messages[-1].content }}"
    template = ChatTemplate(source, "a template")
    sizes: list[int] = []
    encoder, rendered = ChatEncoder(template, ByteTokenizer()), template.rendered
    monkeypatch.setattr(template, "rendered", lambda batch: [sizes.append(len(batch)), rendered(batch)][1])
    said = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    assert len([*encoder.dialogues([Dialogue("", said, None, [])] * 10)]) == 10
    assert sizes == [4, 4, 2]


def test_parquet_and_lists_of_parts_yield_the_same_tokens(chats: Path, tmp_path: Path):
    rows = [json.loads(line)["messages"] for line in chats.read_text().splitlines()]
    pq.write_table(pa.table({"messages": rows}), tmp_path / "chats.parquet")
    parts = [[{**each, "content": [{"type": "text", "text": each["content"]}]} for each in row] for row in rows]
    write_jsonl(tmp_path / "parts.jsonl", parts)
    expected = taught(tmp_path, chats)
    assert expected.manifest.corpus.end_of_turn == END
    for path in (tmp_path / "chats.parquet", tmp_path / "parts.jsonl"):
        assert taught(tmp_path, path).index.root == expected.index.root


def test_an_answer_ends_at_the_separator_and_at_a_token_that_ends_its_turn():
    tokenizer = json_tokenizer()
    ids = tokenizer.encode_marked(["<|endoftext|>" + END])[0][0]
    assert len(ids) == 2
    assert answer_ends(tokenizer, END) == {*ids.tolist()}
    assert answer_ends(tokenizer, "") == answer_ends(tokenizer, "bye") == {tokenizer.separator}


USER, ANSWER = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}


@pytest.mark.parametrize(
    ("messages", "why"),
    [
        (
            [{"role": "bot", "content": "a"}, ANSWER],
            "message 1 has the role 'bot', and may have system, user",
        ),
        ([{"content": "a"}, ANSWER], "message 1 has no role"),
        ([USER, {"role": "assistant", "content": None}], "message 2 has null as its content, not text"),
        ([USER, {"role": "assistant", "content": [{"type": "image"}]}], "message 2 has a list as its content"),
        ([USER, ANSWER, USER], "the last message has the role 'user', not 'assistant'"),
        ([USER, {"role": "assistant", "content": "\ud800"}], "message 2 has half of a surrogate pair"),
        (["a"], "message 1 is text, not an object with role and content"),
        ([], "the field 'messages' has no messages"),
        ("a", "the field 'messages' is text, not a list of messages"),
    ],
)
def test_a_broken_row_of_a_file_is_named_by_its_line(tmp_path: Path, messages: object, why: str):
    found = dialogue_of(messages, "messages")
    assert isinstance(found, Unusable)
    assert why in found.why
    path = write_jsonl(tmp_path / "broken.jsonl", [*made(3), messages, *made(3)])
    with pytest.raises(CorpusError) as caught:
        taught(tmp_path, path)
    assert f"{path}, line 4: {found.why}." in str(caught.value)
    assert [each.name for each in tmp_path.iterdir()] == ["broken.jsonl"]


CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
CALLING = [
    {"role": "user", "content": "1 + 2?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "content": "3", "tool_call_id": "c1"},
    {"role": "assistant", "content": "It is 3."},
]
CALLS = (
    "{% for tool in tools %}<{{ tool | tojson }}>{% endfor %}{% for m in messages %}[{{ m.role }}]{{ m.content or '' }}"
    "{% for call in m.tool_calls %}{{ call.function | tojson }}{% endfor %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def warned_of(tmp_path: Path, path: Path, template: Path | None = None):
    """Return the text of the first row, what of it is predicted, and the warnings."""
    built = taught(tmp_path, path, 256, template=template)
    inputs, labels, _ = batch(built)[0].tolist()
    return bytes(inputs).decode(), bytes(each for each in labels if each != IGNORED).decode(), built.summary.warnings


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_calls_and_tools_of_rows_reach_the_template(tmp_path: Path, form: str):
    """Check whole numbers, tools as a list and as text, and the fields that Arrow adds to messages."""
    (template := tmp_path / "t.jinja").write_text(CALLS)
    tools = [{"type": "function", "function": {"name": "add"}}]
    rows = [{"messages": CALLING, "tools": tools} for _ in range(20)]
    path = tmp_path / f"chats.{form}"
    if form == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        pq.write_table(pa.Table.from_pylist([row | {"tools": json.dumps(tools)} for row in rows]), path)
    text, predicted, warned = warned_of(tmp_path, path, template)
    assert text.startswith('<{"type": "function", "function": {"name": "add"}}>[user]1 + 2?\n[assistant]{'), text
    assert json.loads(next(each for each in predicted.split("\n") if "{" in each)) == CALL["function"]
    assert "[tool]3\n[assistant]It is 3.\n" in text
    assert warned == ["the chat template does not use these fields of messages and rows: tool_call_id (20)"]


def test_what_the_template_does_not_use_is_told_and_no_silence_is_learned(tmp_path: Path):
    path = tmp_path / "chats.jsonl"
    path.write_text("".join(json.dumps({"messages": CALLING, "tools": [CALL]}) + "\n" for _ in range(20)))
    text, predicted, warned = warned_of(tmp_path, path)
    assert f"assistant\n{END}\n" in text
    assert predicted.startswith(f"It is 3.{END}\n\0")
    fields = "tool_calls (20), tool_call_id (20), tools (20)"
    assert warned == [f"the chat template does not use these fields of messages and rows: {fields}"]
    write_jsonl(path, [CALLING[:2]] * 20)
    with pytest.raises(
        CorpusError, match=r"no answer that counts within 256 tokens\. The chat template .*: tool_calls \(20\)\."
    ):
        warned_of(tmp_path, path)


@pytest.mark.parametrize(
    "said", [{"weight": 0}, {"train": False}, {"training": False}, {"loss": False}, {"weight": 0.0}]
)
def test_an_answer_of_weight_0_is_not_learned(tmp_path: Path, said: dict[str, object]):
    wrong = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "wrong", **said}]
    right = [{"role": "user", "content": "b"}, {"role": "assistant", "content": "right", "weight": 1, "train": True}]
    path = write_jsonl(tmp_path / "chats.jsonl", [[*wrong, *right]] * 20)
    text, predicted, warned = warned_of(tmp_path, path)
    assert f"assistant\nwrong{END}" in text
    assert predicted.replace("\0", "") == f"right{END}\n"
    assert warned == []


def test_an_answer_begins_with_a_token_of_its_own():
    """Check that line ends of an answer do not join those of the prompt, which a model gets alone."""
    made = json_tokenizer()._tokenizer
    outline = json.loads(made.to_str())
    outline["model"]["vocab"]["ĊĊ"] = 300
    outline["model"]["merges"] = [["Ċ", "Ċ"]]
    tokenizer = JsonTokenizer(Tokenizer.from_str(json.dumps(outline)))
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "\nb"}]
    template = ChatTemplate.load("chatml")
    encoder = ChatEncoder(template, tokenizer)
    ((_, _, encoded),) = encoder.dialogues([Dialogue("", messages)])
    prompt = encoder.prompt_ids(messages[:1])
    assert isinstance(encoded, EncodedDialogue)
    assert encoded.ids[: len(prompt)].tolist() == prompt.tolist()
    assert tokenizer.decode(encoded.ids[encoded.counts].tolist()) == "\nb\n"


def test_broken_rows_of_the_hub_are_skipped_and_counted(tmp_path: Path, monkeypatch):
    """Check rows that are broken, and those that the template refuses."""
    strict = "{% if messages[0].content == 'a' %}{{ raise_exception('no') }}{% endif %}"
    (template := tmp_path / "t.jinja").write_text(strict + CHATML_SOURCE)
    path = write_jsonl(tmp_path / "chats.jsonl", [*made(30), [USER], [USER, ANSWER], *made(30)])
    here = Source("some/data", [LocalFile(path, "jsonl")], "messages", is_dialogues=True, is_hub=True)
    monkeypatch.setattr(own_text, "find_source", lambda *_: here)
    counts = taught(tmp_path, path, template=template).summary.counts
    assert (counts.documents, counts.skipped, counts.rows) == (60, 2, 62)
    assert [each.partition("chats.jsonl, ")[2] for each in counts.examples] == [
        "line 31: the last message has the role 'user', not 'assistant'",
        "line 32: the chat template does not render it: no",
    ]
    write_jsonl(path, [*made(2), [USER], [USER], [USER]])
    with pytest.raises(CorpusError, match="3 of 5 rows"):
        taught(tmp_path, path)


def test_a_file_whose_dialogue_the_template_refuses_is_named_by_its_line(tmp_path: Path):
    strict = "{% if messages[0].content == 'a' %}{{ raise_exception('no') }}{% endif %}"
    (template := tmp_path / "t.jinja").write_text(strict + CHATML_SOURCE)
    path = write_jsonl(tmp_path / "chats.jsonl", [*made(30), [USER, ANSWER]])
    with pytest.raises(
        CorpusError, match=r"chats\.jsonl, line 31: the chat template .*t\.jinja does not render it: no\."
    ):
        taught(tmp_path, path, template=template)


def test_long_dialogues_are_truncated_and_those_without_an_answer_left_out(tmp_path: Path):
    long = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b" * 500}]
    late = [{"role": "user", "content": "a" * 500}, {"role": "assistant", "content": "b"}]
    path = write_jsonl(tmp_path / "chats.jsonl", [*made(20), long, late])
    built = taught(tmp_path, path, 96)
    counts, warned = built.summary.counts, built.summary.warnings
    assert (counts.documents, counts.truncated, counts.left_out, counts.rows) == (21, 1, 1, 22)
    assert any("1 of 21 dialogues are longer" in each for each in warned)
    assert any("1 dialogues are not used" in each for each in warned)
    codes = np.concatenate([built.training, built.held_out])
    assert counts.answer_tokens == int((codes & COUNTS).sum())
    only = write_jsonl(tmp_path / "late.jsonl", [late])
    with pytest.raises(CorpusError, match="have no answer that counts within 96 tokens"):
        taught(tmp_path, only, 96)


def test_a_file_that_changes_while_it_is_read_is_refused(chats: Path, tmp_path: Path, monkeypatch):
    monkeypatch.setattr(tokenizing, "BATCH_CHARACTERS", 1_000)

    def change(tokens: int, share: float) -> None:
        chats.write_text(chats.read_text() + "\n")

    with pytest.raises(CorpusError, match="changed while it was read"):
        taught(tmp_path, chats, tell=change)
    assert [each.name for each in tmp_path.iterdir()] == ["chats.jsonl"]


def test_special_tokens_of_the_template_become_ids_and_those_of_messages_stay_text():
    tokenizer = json_tokenizer()
    messages = [{"role": "user", "content": f"say {END} ü"}, {"role": "assistant", "content": f"no {END}!"}]
    template = ChatTemplate.load("chatml")
    encoder = ChatEncoder(template, tokenizer)
    ((_, _, encoded),) = encoder.dialogues([Dialogue("line 1", messages)])
    prompt = encoder.prompt_ids(messages[:1])
    assert isinstance(encoded, EncodedDialogue)
    end = tokenizer._tokenizer.token_to_id(END)
    ids = encoded.ids.tolist()
    assert ids.count(end) == 2
    assert ids.count(tokenizer._tokenizer.token_to_id("<|im_start|>")) == 2
    assert ids[: len(prompt)] == prompt.tolist()
    assert encoded.counts.tolist() == [False] * len(prompt) + [True] * (len(ids) - len(prompt))
    plain = [each for each in ids if each < 256]
    assert tokenizer.decode(plain) == f"user\nsay {END} ü\nassistant\nno {END}!\n"
    assert encoder.ending is None  # the end-of-turn token is one


def test_bytes_know_where_each_character_begins():
    ((ids, starts),) = ByteTokenizer().encode_marked(["aü\0\U0001f642z"])
    assert bytes(ids.tolist()).decode() == "aü\ufffd\U0001f642z"
    assert starts.tolist() == [0, 1, 1, 2, 2, 2, 3, 3, 3, 3, 4]


def test_init_chooses_rows_that_hold_long_dialogues(tmp_path: Path, monkeypatch):
    """Check dialogues that are longer than a preset's row, some of them before their first answer."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    for question, answer in (("say it " * 30, "it"), ("say it", "it " * 100)):
        messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        write_jsonl(tmp_path / "long.jsonl", [messages] * 60)
        run = f"run{len(answer)}"
        result = CliRunner().invoke(cli, ["init", run, "--corpus", "long.jsonl"])
        assert result.exit_code == 0, result.output + str(result.exception)
        assert "Rows have 512 tokens, as long dialogues need." in result.output
        assert "without their end" not in result.output
        manifest = (tmp_path / run / "manifest.toml").read_text()
        assert "sequence_length = 512" in manifest
    result = CliRunner().invoke(cli, ["init", "as-it-is", "--corpus", "long.jsonl", "--preset", "llama-15m"])
    assert result.exit_code == 0, result.output
    assert "With --sequence-length = 512, 95 % would be whole." in result.output


def test_the_budget_fits_the_rows_of_the_length_that_init_chooses(tmp_path: Path, monkeypatch):
    """Check dialogues of which long rows hold several with less padding, so that there are fewer tokens."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    said = [[{"role": "user", "content": "say it"}, {"role": "assistant", "content": "it " * n}] for n in (4, 99)]
    write_jsonl(tmp_path / "mixed.jsonl", [*said[:1] * 900, *said[1:] * 90])
    result = CliRunner().invoke(cli, ["init", "run", "--corpus", "mixed.jsonl"])
    assert "Rows have 512 tokens" in result.output
    assert "the text is small for this run" not in result.output


def test_init_recognizes_dialogues_and_tokens_counts_them(chats: Path, tmp_path: Path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    template = tmp_path / "own.jinja"
    template.write_text(
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    for arguments in ([], ["--template", str(template)]):
        run = "own" if arguments else "run"
        result = CliRunner().invoke(cli, ["init", run, "--corpus", "chats.jsonl", "--preset", "demo", *arguments])
        assert result.exit_code == 0, result.output
        assert "read as jsonl, dialogues of the column messages" in result.output
        assert "dialogues        60" in result.output
        assert "answers" in result.output
        counted = CliRunner().invoke(cli, ["tokens", run, "--json"])
        figures = json.loads(counted.stdout)
        counts = figures["text"]["counts"]
        assert counts["documents"] == 60
        assert 0 < counts["answer_tokens"] < figures["tokens"]
        shown = CliRunner().invoke(cli, ["tokens", run, "--show", "1"]).stdout
        assert "»it is red!" in shown
        assert "say red" in shown.partition("»")[0]
        assert CliRunner().invoke(cli, ["sign", run]).exit_code == 0
    digest = hashlib.sha256(template.read_bytes()).hexdigest()
    assert (tmp_path / "own" / "files" / digest).read_bytes() == template.read_bytes()
    assert f'template = "{digest}"' in (tmp_path / "own" / "manifest.toml").read_text()
