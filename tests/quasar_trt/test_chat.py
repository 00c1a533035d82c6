"""Conversations: history, commands, interruption, figures below the answer."""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import sys

import pytest
from rich.console import Console
from stubs import ByteTokenizer, StubDrafter, StubEngine, chain_logits
from tiny_tokenizer import CHAT_TEMPLATE

from quasar_trt.chat import Chat, converse
from quasar_trt.errors import QuasarError
from quasar_trt.runner import Runner
from quasar_trt.sampling_params import SamplingParams

PARAMS = SamplingParams(temperature=0, max_tokens=None)
ANSWER = "é one\ntwo"


class ChatTokenizer(ByteTokenizer):
    chat_template = CHAT_TEMPLATE

    def apply_chat_template(self, messages, tokenize, add_generation_prompt, continue_final_message):
        lines = [f"{message['role']}: {message['content']}\n" for message in messages]
        return "".join(lines) + ("assistant:" if add_generation_prompt else "")


def answering(text: str = ANSWER, max_seq_len: int = 256, drafted: bool = True) -> Runner:
    """A runner that answers every prompt with `text`; the prompt ends with the last "assistant:"."""
    chain = [*text.encode(), 256]

    def row(prefix):
        start = bytes(token for token in prefix if token < 256).rfind(b"assistant:") + len("assistant:")
        return chain_logits(chain, start, 257)(prefix)

    def rule(context, limit):
        start = bytes(token for token in context if token < 256).rfind(b"assistant:") + len("assistant:")
        return chain[len(context) - start :][:limit]

    engine = StubEngine(row, 257, max_seq_len=max_seq_len, max_rows=256)
    return Runner(engine, tokenizer=ChatTokenizer(), drafter=StubDrafter(rule, 3) if drafted else None)


def console(terminal: bool) -> Console:
    return Console(file=io.StringIO(), force_terminal=terminal, width=80, color_system=None, legacy_windows=False)


def test_answers_and_questions_are_remembered():
    runner = answering()
    chat = Chat(runner, PARAMS, "be short", console(False))
    chat.answer("hi")
    chat.answer("and?")
    roles = [message["role"] for message in chat.messages]
    assert roles == ["system", "user", "assistant", "user", "assistant"]
    assert [message["content"] for message in chat.messages[1:]] == ["hi", ANSWER, "and?", ANSWER]
    first = runner.engine.passes[0].tokens[0]
    assert bytes(first) == b"system: be short\nuser: hi\nassistant:"
    chat.reset()
    assert chat.messages == [{"role": "system", "content": "be short"}]
    assert Chat(runner, PARAMS, "", console(False)).messages == [{"role": "system", "content": ""}]
    assert Chat(runner, PARAMS, None, console(False)).messages == []


def test_text_alone_where_there_is_no_terminal():
    out = console(False)
    Chat(answering(), PARAMS, None, out).answer("hi")
    assert out.file.getvalue() == ANSWER + "\n"


def test_terminal_shows_the_text_and_live_figures():
    out = console(True)
    Chat(answering(), PARAMS, None, out).answer("hi")
    shown = out.file.getvalue()
    assert shown.count("draft acceptance = 1.000") > 1
    assert shown.index("é one") < shown.rindex("two") < shown.rindex("draft acceptance")


def test_interrupted_answer_stays_as_far_as_it_came(monkeypatch):
    runner = answering(drafted=False)
    chat = Chat(runner, PARAMS, None, console(False))
    steps = iter(range(100))
    step = runner._scheduler.step

    def interrupted():
        if next(steps) == 4:
            raise KeyboardInterrupt
        step()

    monkeypatch.setattr(runner._scheduler, "step", interrupted)
    chat.answer("hi")
    assert chat.messages[-1] == {"role": "assistant", "content": "é o"}
    assert not runner.engine.caches
    chat.answer("again")
    assert chat.messages[-1]["content"] == ANSWER


def test_question_that_cannot_be_answered_is_forgotten():
    chat = Chat(answering(max_seq_len=40), PARAMS, None, console(False))
    with pytest.raises(QuasarError, match="allowed: at most 39"):
        chat.answer("x" * 40)
    assert chat.messages == []


class Typed(io.StringIO):
    """Lines that someone types."""

    def isatty(self) -> bool:
        return True


def test_lines_and_commands(monkeypatch):
    out = console(False)
    chat = Chat(answering(), PARAMS, None, out)
    monkeypatch.setattr(sys, "stdin", Typed("hi\n\n/what\n/reset\nho\n" + "x" * 300 + "\n/exit\nnever\n"))
    converse(chat, out)
    assert [message["content"] for message in chat.messages] == ["ho", ANSWER]
    shown = out.file.getvalue()
    assert shown.count(ANSWER) == 2 and "unknown command '/what'; one of: /reset, /exit" in shown
    assert "error: the prompt has" in shown.replace("\n", " ")


def test_a_message_that_cannot_be_answered_ends_a_piped_conversation(monkeypatch):
    out = console(False)
    monkeypatch.setattr(sys, "stdin", io.StringIO("x" * 300 + "\nnever\n"))
    with pytest.raises(QuasarError, match="the prompt has"):
        converse(Chat(answering(), PARAMS, None, out), out)


@pytest.mark.parametrize("missing", ["tokenizer", "chat template"])
def test_an_engine_that_cannot_chat_is_refused_at_once(missing, engine_dirs, tmp_path):
    directory = shutil.copytree(engine_dirs["BF16"], tmp_path / "engine")
    for name in ("chat_template.jinja", *(["tokenizer.json"] if missing == "tokenizer" else [])):
        (directory / name).unlink()
    command = [sys.executable, "-m", "quasar_trt.cli", "chat", str(directory)]
    result = subprocess.run(command, input=b"", capture_output=True, check=False)
    assert (result.returncode, result.stdout) == (1, b"")
    assert result.stderr.decode().startswith(f"error: {directory} has no {missing}, which chat needs")


def test_conversation_of_the_command_line(engine_dirs):
    command = [
        sys.executable,
        "-m",
        "quasar_trt.cli",
        "chat",
        str(engine_dirs["BF16"]),
        "--seed",
        "5",
        "--max_tokens",
        "9",
    ]
    result = subprocess.run(command, input=b"hello\n", capture_output=True, env=os.environ, check=True)
    runner = Runner.from_dir(engine_dirs["BF16"])
    messages = [{"role": "user", "content": "hello"}]
    expected = runner.chat(messages, SamplingParams(seed=5, max_tokens=9))[0].outputs[0].text
    assert result.stdout.decode() == expected + "\n"


def test_runner_answers_one_conversation_or_several():
    runner = answering()
    one = [{"role": "user", "content": "hi"}]
    assert [output.outputs[0].text for output in runner.chat(one, PARAMS)] == [ANSWER]
    assert [output.outputs[0].text for output in runner.chat([one, one], PARAMS)] == [ANSWER] * 2
    with pytest.raises(QuasarError, match=r"messages is \[\]; allowed"):
        runner.chat([])
