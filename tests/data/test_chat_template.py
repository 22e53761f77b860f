"""Chat templates: what they render, and what they may not do."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from p2ptrain.base.errors import CorpusError
from p2ptrain.data.chat_template import CHATML_SOURCE, ChatTemplate, Dialogue, RenderedDialogue, TemplateFault

DIALOGUE = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Grüße? \U0001f642"},
    {"role": "assistant", "content": "Hallo."},
    {"role": "user", "content": "And <b>now</b>?"},
    {"role": "assistant", "content": "Bye."},
]
WITH_TAGS = (
    "{%- for m in messages %}[{{ m.role }}]{% if m.role == 'assistant' %}{% generation %}{{ m.content | trim }}</s>"
    "{% endgeneration %}{% else %}{{ m.content }}{% endif %}{%- endfor %}"
)
TEMPLATES = [
    CHATML_SOURCE,
    WITH_TAGS,
    "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}\n  {% if loop.index > 2 %}"
    "{% break %}{% endif %}{{ ns.n }}{{ m | tojson }}{{ eos_token }}{{ bos_token }}\n{% endfor %}",
]


@pytest.fixture
def chatml() -> ChatTemplate:
    return ChatTemplate.load("chatml")


@pytest.mark.parametrize("source", TEMPLATES)
def test_it_renders_what_transformers_renders(source: str):
    texts, _ = render_jinja_template([DIALOGUE], chat_template=source, add_generation_prompt=True, eos_token="</s>")
    template = ChatTemplate.checked(source, "a template", {"eos_token": "</s>"})
    assert template.render(DIALOGUE, add_generation_prompt=True) == texts[0]


def answers(found: RenderedDialogue | TemplateFault) -> list[str]:
    assert isinstance(found, RenderedDialogue)
    return [found.text[start:end] for start, end in found.answers]


def test_answers_are_what_follows_the_prompt(chatml: ChatTemplate):
    both = chatml.rendered([Dialogue("", DIALOGUE), Dialogue("", DIALOGUE[:3])])
    assert [answers(each) for each in both] == [["Hallo.<|im_end|>\n", "Bye.<|im_end|>\n"], ["Hallo.<|im_end|>\n"]]
    assert chatml.end_of_turn() == "<|im_end|>"


def test_answers_are_what_generation_tags_enclose_as_transformers_finds_them():
    texts, spans = render_jinja_template([DIALOGUE], chat_template=WITH_TAGS, return_assistant_tokens_mask=True)
    template = ChatTemplate.checked(WITH_TAGS, "a template")
    (found,) = template.rendered([Dialogue("", DIALOGUE)])
    assert found == RenderedDialogue(texts[0], spans[0])
    assert answers(found) == ["Hallo.</s>", "Bye.</s>"]


def test_answers_are_found_within_macros_where_transformers_misplaces_them():
    source = (
        "\n{% macro said(m) %}[{{ m.role }}]{% if m.role == 'assistant' %}{%- generation -%} {{ m.content }}</s>"
        "{% endgeneration %}\n{% else %}{{ m.content }}{% endif %}{% endmacro %}"
        "{% for m in messages %}{{ said(m) }}{% endfor %}"
    )
    texts, _ = render_jinja_template([DIALOGUE], chat_template=source, return_assistant_tokens_mask=True)
    found = ChatTemplate.checked(source, "a template").rendered([Dialogue("", DIALOGUE)])[0]
    assert isinstance(found, RenderedDialogue)
    assert found.text == texts[0]
    assert answers(found) == ["Hallo.</s>", "Bye.</s>"]


def test_an_answer_that_is_written_otherwise_later_is_not_counted():
    source = CHATML_SOURCE.replace("message['content']", "(message['content'] if loop.last else 'gone')")
    template = ChatTemplate.checked(source, "a template")
    # the last prompt is not a beginning, either
    assert answers(template.rendered([Dialogue("", DIALOGUE)])[0]) == []
    source = CHATML_SOURCE.replace(
        "+ (message['content'] or '') +", "+ ('<think>' if loop.last else '') + message['content'] +"
    )
    forgets = source.replace("{% for", "{% set last = messages[-1].role == 'assistant' %}{% for", 1).replace(
        "if loop.last", "if loop.last and last"
    )
    template = ChatTemplate.checked(forgets, "a template")
    assert answers(template.rendered([Dialogue("", DIALOGUE)])[0]) == ["<think>Bye.<|im_end|>\n"]


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("{% if %}", "Expected an expression"),
    ],
)
def test_a_template_that_cannot_be_used_is_a_sentence(source: str, problem: str):
    with pytest.raises(CorpusError, match=problem):
        ChatTemplate.checked(source, "bad.jinja")


def test_whose_fault_it_is_that_a_row_is_not_rendered():
    """Check that a template is blamed for what it does to any dialogue, and else the row, by its place."""
    for source, problem in (
        ("{{ nothing() }}", r"^The chat template t\.jinja cannot be used: 'nothing' is undefined\."),
        (
            "{% if messages | length > 3 %}{{ raise_exception('no') }}{% endif %}",
            r"^a\.jsonl, line 7: the chat .*: no\.",
        ),
    ):
        template = ChatTemplate.checked(source, "t.jinja")
        (fault,) = template.rendered([Dialogue("", DIALOGUE)])
        assert isinstance(fault, TemplateFault)
        assert re.search(problem, template.fault("a.jsonl, line 7", fault.why).problem)


@pytest.mark.parametrize(
    ("end", "inside", "expected"),
    [
        ("<|im_end|>\n", "", ["Hallo.<|im_end|>\n", "Bye.<|im_end|>\n"]),
        ("<|im_end|>\n", "<|im_end|>", ["Hallo.<|im_end|><|im_end|>\n", "Bye.<|im_end|><|im_end|>\n"]),
        ("", "</s>", ["Hallo.</s>", "Bye.</s>"]),
        ("<end>{{ '<eos>' if loop.last }}", "", ["Hallo.<end>", "Bye.<end><eos>"]),
        ("{{ '<eos>' if loop.last }}", "", ["Hallo.", "Bye.<eos>"]),
        ("\n\n", "", ["Hallo.\n\n", "Bye.\n\n"]),
    ],
)
def test_an_enclosed_answer_counts_to_the_end_of_its_turn(end: str, inside: str, expected: list[str]):
    source = (
        "{%- for m in messages %}<|{{ m.role }}|>\n{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
        f"{inside}{{% endgeneration %}}{{% else %}}{{{{ m.content }}}}{{% endif %}}{end}{{%- endfor %}}"
    ).replace("\n", "{{ '\\n' }}")
    template = ChatTemplate.checked(source, "a template")
    assert answers(template.rendered([Dialogue("", DIALOGUE)])[0]) == expected
    assert template.end_of_turn() == (inside + end).replace("{{ '<eos>' if loop.last }}", "<eos>").strip()


def test_an_end_of_turn_that_no_model_would_come_to_is_a_fault():
    """Check a template that encloses some answers alone: the text after them would never be learned."""
    source = (
        "{% for m in messages %}{% if loop.first %}{% generation %}{{ m.content }}{% endgeneration %}"
        "{% else %}{{ m.content }}<end>{% endif %}{% endfor %}"
    )
    template = ChatTemplate.checked(source, "a template")
    found = template.rendered([Dialogue("", DIALOGUE)])[0]
    assert isinstance(found, TemplateFault)
    assert found.why.startswith("it writes text after the last answer, outside of {% generation %}")


TWICE = WITH_TAGS.replace("</s>", "{% endgeneration %}{% generation %}</s>")


@pytest.mark.parametrize("source", [CHATML_SOURCE, WITH_TAGS, TWICE])
def test_an_answer_that_is_not_to_be_learned_does_not_count(source: str):
    template = ChatTemplate.checked(source, "a template")
    dialogues = [Dialogue("", DIALOGUE, None, places) for places in ((), (4,), (2,))]
    whole, first, second = (answers(each) for each in template.rendered(dialogues))
    assert (first, second) == (whole[: len(whole) // 2], whole[len(whole) // 2 :])
    assert "".join(first).startswith("Hallo.")


def test_tools_calls_and_reasoning_reach_the_template_as_in_transformers():
    source = (
        "{{ tools | tojson }}{% for m in messages %}[{{ m.role }}]{{ m.reasoning_content }}{{ m.content }}"
        "{% for call in m.tool_calls %}{{ call.function.name }}{{ call.function.arguments | tojson }}{% endfor %}"
        "{{ m.tool_call_id }}{{ m.name }}{% endfor %}"
    )
    call = {"id": "a1", "type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": [2.5, None, True]}}}
    dialogue = [
        {"role": "user", "content": "1 + 2?", "name": "Ada"},
        {"role": "assistant", "content": None, "reasoning_content": "Add.", "tool_calls": [call]},
        {"role": "tool", "content": "3", "tool_call_id": "a1"},
        {"role": "assistant", "content": "3."},
    ]
    tools = [{"type": "function", "function": {"name": "add", "description": "Sum </s>"}}]
    texts, _ = render_jinja_template([dialogue], chat_template=source, tools=tools)
    template = ChatTemplate.checked(source, "a template")
    (found,) = template.rendered([Dialogue("", dialogue, tools)])
    assert isinstance(found, RenderedDialogue)
    assert found.text == texts[0]


def dialogue_of(count: int) -> list[dict[str, str]]:
    return [{"role": ("user", "assistant")[place % 2], "content": "x"} for place in range(count)]


def test_all_answers_of_a_long_dialogue_are_found(chatml: ChatTemplate) -> None:
    assert len(answers(chatml.rendered([Dialogue("", dialogue_of(300))])[0])) == 150
    template = ChatTemplate.checked(WITH_TAGS, "a template")
    assert len(answers(template.rendered([Dialogue("", dialogue_of(1000))])[0])) == 500


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("{{ messages[9].x.y }}", "has no element 9"),
        ("{{ {}['x'].y }}", "has no attribute 'x'"),
        ("{{ raise_exception('Roles must alternate') }}", "Roles must alternate"),
        ("{{ 1 // 0 }}", "by zero"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "too deeply"),
        ("{{ messages[0].content.index('qq') }}", "substring not found"),
        ("{{ (messages | length * 10) ** 5000 }}", "digits"),
    ],
)
def test_reasons_are_words_of_the_templates_author(source: str, why: str) -> None:
    """Check that no name of a Python error and no advice on Python reaches a user."""
    template = ChatTemplate.checked(source, "a template")
    found = template.rendered([Dialogue("", DIALOGUE)])[0]
    assert isinstance(found, TemplateFault)
    assert why in found.why
    assert not re.search(r"[A-Z]\w+Error|sys\.|set_int", found.why)


@pytest.mark.parametrize(
    "source", ["{{ messages[9].x.y }}", "{{ ''.__class__.__mro__ }}", "{{ raise_exception('roles!') }}"]
)
def test_a_dialogue_that_does_not_render_costs_no_other(source: str):
    template = ChatTemplate.checked(f"{{% if messages | length > 3 %}}{source}{{% endif %}}x", "a template")
    first, second = template.rendered([Dialogue("", DIALOGUE), Dialogue("", DIALOGUE[:3])])
    assert isinstance(first, TemplateFault)
    assert isinstance(second, RenderedDialogue)
    with pytest.raises(CorpusError, match="does not render the dialogue"):
        template.render(DIALOGUE)


def test_every_peer_gets_the_same_text_whatever_the_day_and_chance():
    source = "{{ strftime_now('%d') }}{{ range(1000) | random }}"
    texts = set()
    for _ in range(2):
        template = ChatTemplate.checked(source, "a template")
        texts |= {template.render(DIALOGUE), template.render(DIALOGUE)}
    assert len(texts) == 1


def test_a_file_must_be_the_named_one_and_a_small_text(tmp_path: Path):
    path = tmp_path / "t.jinja"
    path.write_text(WITH_TAGS)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    template = ChatTemplate.load(digest, path)
    assert template.source == WITH_TAGS
    with pytest.raises(CorpusError, match="which is not here"):
        ChatTemplate.load(digest)
    with pytest.raises(CorpusError, match="is not this run's chat template"):
        ChatTemplate.load("0" * 64, path)
    for content, problem in ((b"\xff", "not UTF-8"), (b"x" * (1 + (256 << 10)), "larger than 256 KiB")):
        path.write_bytes(content)
        with pytest.raises(CorpusError, match=problem):
            ChatTemplate.load(hashlib.sha256(content).hexdigest(), path)
