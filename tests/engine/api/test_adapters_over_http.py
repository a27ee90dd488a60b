"""Adapters as models of the server: each answers under its own name, and a bad one is nobody else's trouble."""

import httpx
import pytest
import torch

from minillm.__main__ import run
from minillm.adapters import LoraConfig, attach
from minillm.adapters.attach import adapter_parameters
from minillm.adapters.peft_folder import TENSORS, save_peft
from minillm.adapters.store import fingerprint_of
from minillm.model import load_hf
from minillm.model.generate import folder_of
from minillm.serve import SamplingParams
from tests.engine.api.running import create_app, engine, running

NAMES = ("french", "latin", "late")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapters")
    for number, name in enumerate(NAMES):
        model, lora = load_hf(folder_of("draft"), dtype=torch.float32), LoraConfig(4 << number, ("q", "v", "down"))
        attach(model, lora, seed=number)
        draw = torch.Generator().manual_seed(number)
        for parameter in adapter_parameters(model).values():
            parameter.data = torch.randn(parameter.shape, generator=draw) * 0.1
        save_peft(model, lora, folder / name, base="draft", fingerprint=fingerprint_of(folder_of("draft")))
    return {name: folder / name for name in NAMES}


@pytest.fixture(scope="module")
def server(folders):
    with running(engine(adapters=folders)) as found:
        yield found
        found.idle()


def ask(server, model, **more):
    asked = {"model": model, "prompt": "def f(x):", "max_tokens": 12, "temperature": 0} | more
    return httpx.post(f"{server.url}/v1/completions", json=asked, timeout=60)


def test_adapters_are_listed_beside_their_base(server):
    found = {each["id"]: each for each in httpx.get(f"{server.url}/v1/models").json()["data"]}
    assert list(found) == ["draft", *NAMES]
    assert "parent" not in found["draft"] and {found[name]["parent"] for name in NAMES} == {"draft"}
    assert httpx.get(f"{server.url}/v1/models/latin").json() == found["latin"]


def test_each_answers_under_its_own_name(server):
    params = SamplingParams(max_tokens=12)
    said = {}
    for name in ("draft", "french", "latin"):
        [expected] = server.llm.generate(["def f(x):"], params, adapter=None if name == "draft" else name)
        answer = ask(server, name).json()
        said[name] = answer["choices"][0]["text"]
        assert answer["model"] == name and said[name] == expected.answers[0].text
    assert len(set(said.values())) == 3
    chat = {"model": "french", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 5, "temperature": 0}
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=chat, timeout=60)
    assert answer.status_code == 200 and answer.json()["model"] == "french"
    assert server.metric('minillm_requests_total{model="french"') == 2


def test_an_unknown_name_is_openais_404(server):
    answer = ask(server, "klingon")
    assert answer.status_code == 404 and answer.json()["error"]["code"] == "model_not_found"
    assert "ask for draft, french, latin, late" in answer.json()["error"]["message"]


def test_a_damaged_adapter_is_its_own_requests_trouble(server, folders):
    tensors = folders["late"] / TENSORS
    content = tensors.read_bytes()
    tensors.write_bytes(content[:-7])
    answer = ask(server, "late")
    assert answer.status_code == 400 and "is damaged" in answer.json()["error"]["message"]
    assert ask(server, "french").status_code == 200
    tensors.write_bytes(content)
    assert ask(server, "late").status_code == 200


def test_two_models_of_one_name_are_refused(folders):
    with pytest.raises(ValueError, match="two models are called 'draft'"):
        create_app({"draft": engine(adapters={"draft": folders["french"]})})


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--adapter", "french"], "--adapter french must be NAME=DIR"),
        (["--adapter", "a={french}", "--adapter", "a={latin}"], "--adapter a is given twice"),
        (["--adapter", "a=/nowhere"], "is not a folder of peft's adapters"),
        (["--adapter", "draft={french}"], "two models are called 'draft'"),
        (["--adapter", "a={french}", "--model", "target", "--speculate", "none"], "was trained on another base"),
    ],
)
def test_bad_options_are_one_sentence(arguments, said, folders, capsys):
    arguments = [each.format(**folders) for each in arguments]
    assert run(["serve", "--port", "0", "--model", "draft", *arguments]) == 2
    told = capsys.readouterr().err.splitlines()
    assert said in told[-1] and not any("Traceback" in line for line in told), told


def test_generate_with_an_adapter(folders, tmp_path, capsys):
    llm = engine(adapters=folders)
    command = ["generate", "--model", "draft", "--temperature", "0", "--max-new-tokens", "8"]
    expected = {}
    for name in (None, "french"):
        [output] = llm.generate(["def f(x):"], SamplingParams(max_tokens=8), adapter=name)
        expected[name] = output.answers[0].text
        chosen = [] if name is None else ["--adapter", str(folders[name])]
        assert run([*command, "def f(x):", *chosen]) == 0
        assert capsys.readouterr().out.strip() == f"def f(x):{expected[name]}".strip()
    (tmp_path / "prompts").write_text("def f(x):\n")
    assert run([*command, "--batch", str(tmp_path / "prompts"), "--adapter", str(folders["french"])]) == 0
    assert expected["french"].strip() in capsys.readouterr().out
    assert run([*command, "def f(x):", "--adapter", str(tmp_path)]) == 2
    assert "is not a folder of peft's adapters" in capsys.readouterr().err
