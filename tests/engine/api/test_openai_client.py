"""OpenAI's own client against the running server: every answer is `LLM.generate`'s, token by token."""

import asyncio
import json
import subprocess
from itertools import product

import pytest

from minillm.serve.requests.params import SamplingParams
from tests.engine.api.running import engine

openai = pytest.importorskip("openai", reason="OpenAI's client is not installed: requirements.txt")
TALKS = (
    [{"role": "user", "content": "def add(a, b):"}],
    [
        {"role": "system", "content": "Write Python."},
        {"role": "user", "content": [{"type": "text", "text": "import "}, {"type": "text", "text": "os"}]},
        {"role": "assistant", "content": "import os"},
        {"role": "user", "content": "once more"},
    ],
)
CASES = [
    dict(max_tokens=12, temperature=0),
    dict(max_tokens=9, temperature=0.9, seed=5),
    dict(max_tokens=9, temperature=1.0, top_p=0.8, seed=6, n=3),
    dict(max_tokens=30, temperature=0, stop="\n"),
    dict(max_tokens=30, temperature=0.7, seed=2, stop=[" ", "self"], n=2),
]


@pytest.fixture(scope="module")
def alone():
    return engine()


@pytest.fixture(scope="module")
def client(served):
    return openai.OpenAI(base_url=f"{served.url}/v1", api_key="any", max_retries=0)


def expected(alone, prompt, asked):
    params = SamplingParams(**asked)
    ids = prompt if isinstance(prompt, list) else alone.tokenizer.encode(prompt)
    return alone.generate([ids], params)[0]


@pytest.mark.parametrize(("number", "prompt"), list(product(range(len(CASES)), ("def ", "class A:\n", [5, 6, 7]))))
def test_a_completion_is_the_engines_answer_whole_and_streamed(client, alone, number, prompt):
    asked = CASES[number]
    right = expected(alone, prompt, asked)
    whole = client.completions.create(model="draft", prompt=prompt, **asked)
    assert [choice.text for choice in whole.choices] == [answer.text for answer in right.answers]
    assert [choice.finish_reason for choice in whole.choices] == [answer.reason for answer in right.answers]
    answered = sum(len(answer.tokens) for answer in right.answers)
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (len(right.prompt), answered)
    texts, reasons, usage = {}, {}, None
    options = {"stream": True, "stream_options": {"include_usage": True}}
    for chunk in client.completions.create(model="draft", prompt=prompt, **asked, **options):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + choice.text
            reasons[choice.index] = choice.finish_reason or reasons.get(choice.index)
    assert [texts[index] for index in sorted(texts)] == [answer.text for answer in right.answers]
    assert [reasons[index] for index in sorted(reasons)] == [answer.reason for answer in right.answers]
    assert usage.completion_tokens == answered


@pytest.mark.parametrize(("number", "talk"), list(product(range(len(CASES)), range(len(TALKS)))))
def test_a_chat_is_the_engines_answer_to_the_templates_ids(client, alone, number, talk):
    asked, plain = CASES[number], []
    for message in TALKS[talk]:
        content = message["content"]
        text = content if isinstance(content, str) else "".join(part["text"] for part in content)
        plain.append({"role": message["role"], "content": text})
    right = expected(alone, alone.tokenizer.chat(plain), asked)
    whole = client.chat.completions.create(model="draft", messages=TALKS[talk], **asked)
    assert [choice.message.content for choice in whole.choices] == [answer.text for answer in right.answers]
    texts = {}
    for chunk in client.chat.completions.create(model="draft", messages=TALKS[talk], stream=True, **asked):
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + (choice.delta.content or "")
    assert [texts[index] for index in sorted(texts)] == [answer.text for answer in right.answers]


def test_logprobs_are_the_engines(client, alone):
    right = expected(alone, "def ", dict(max_tokens=6, logprobs=3)).answers[0]
    found = client.completions.create(model="draft", prompt="def ", max_tokens=6, temperature=0, logprobs=3).choices[0]
    assert found.logprobs.token_logprobs == pytest.approx([token.logprob for token in right.tokens], abs=1e-4)
    assert "".join(found.logprobs.tokens) == found.text
    assert [
        found.text[place:].startswith(token)
        for place, token in zip(found.logprobs.text_offset, found.logprobs.tokens, strict=True)
    ] == [True] * 6
    messages = TALKS[0]
    chat = client.chat.completions.create(
        model="draft", messages=messages, max_tokens=4, temperature=0, logprobs=True, top_logprobs=2
    ).choices[0]
    assert "".join(each.token for each in chat.logprobs.content) == chat.message.content
    assert all(len(each.top_logprobs) == 2 and each.top_logprobs[0].logprob >= each.top_logprobs[1].logprob
               for each in chat.logprobs.content)  # fmt: skip


def test_many_prompts_in_one_request_are_numbered_through(client, alone):
    prompts = ["def ", "class ", "import "]
    found = client.completions.create(model="draft", prompt=prompts, n=2, seed=3, temperature=1, max_tokens=5)
    right = [expected(alone, prompt, dict(max_tokens=5, temperature=1, seed=3, n=2)) for prompt in prompts]
    assert [each.text for each in found.choices] == [each.text for output in right for each in output.answers]
    assert [each.index for each in found.choices] == list(range(6))


def test_the_asynchronous_client_gets_the_same_from_sixteen_at_once(served, alone):
    async def ask():
        async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="any") as client:
            calls = [client.completions.create(model="draft", prompt=f"x{n} = ", max_tokens=8, temperature=0)
                     for n in range(16)]  # fmt: skip
            return [each.choices[0].text for each in await asyncio.gather(*calls)]

    right = [expected(alone, f"x{n} = ", dict(max_tokens=8)).answers[0].text for n in range(16)]
    assert asyncio.run(ask()) == right


@pytest.mark.parametrize(
    ("asked", "error", "said"),
    [
        (dict(model="other"), "NotFoundError", "no model 'other' here: ask for draft"),
        (dict(max_tokens=0), "BadRequestError", "max_tokens"),
        (dict(temperature=3), "BadRequestError", "temperature"),
        (dict(top_p=0), "BadRequestError", "top_p"),
        (dict(n=99), "BadRequestError", "99 answers are asked for: 16 are the limit"),
        (dict(stop=[""]), "BadRequestError", "stop contains the empty text"),
        (dict(echo=True), "BadRequestError", "echo is not served here"),
        (dict(logit_bias={"5": 10}), "BadRequestError", "logit_bias is not served here"),
        (dict(prompt="x " * 4000), "BadRequestError", "does not fit"),
        (dict(prompt=[]), "BadRequestError", "the prompt is empty"),
        (dict(prompt=[10**6]), "BadRequestError", "outside 0"),
        (dict(extra_body={"sed": 3}), "BadRequestError", "unknown field 'sed'"),
        (dict(extra_body={"response_format": {"type": "json_object"}}), "BadRequestError", "response_format is not"),
    ],
)
def test_a_bad_request_is_one_sentence_and_openais_error_class(client, served, asked, error, said):
    given = {"model": "draft", "prompt": "def ", "max_tokens": 2} | asked
    with pytest.raises(getattr(openai, error)) as caught:
        client.completions.create(**given)
    assert said in caught.value.message and caught.value.body["request_id"].startswith("req-")


def test_curl_gets_a_body_and_a_stream(served, alone):
    def curl(**asked):
        body = json.dumps({"model": "draft", "prompt": "def ", "max_tokens": 6, "temperature": 0} | asked)
        command = ["curl", "-sN", f"{served.url}/v1/completions", "-H", "content-type: application/json", "-d", body]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout

    right = expected(alone, "def ", dict(max_tokens=6)).answers[0].text
    assert json.loads(curl())["choices"][0]["text"] == right
    lines = [line.removeprefix("data: ") for line in curl(stream=True).split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    assert "".join(choice["text"] for line in lines[:-1] for choice in json.loads(line)["choices"]) == right
