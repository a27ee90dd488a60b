"""Terms of tenants: how they are written, rates against their arithmetic, and what a tenant meets over HTTP."""

from functools import partial

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minillm.serve.engine import LLM
from minillm.serve.schedule.fair import FairScheduler
from tests.engine.api.running import engine, running

from minillm.api.limits import Keys, shares_of  # isort: skip
from minillm.api.tenants import Terms, TokenBucket

ADA, ALAN = ({"authorization": f"Bearer secret-of-{name}"} for name in ("ada", "alan"))
OPERATOR = {"authorization": "Bearer secret-of-operator"}
ASKED = {"model": "draft", "prompt": [5, 6, 7, 8], "max_tokens": 16, "temperature": 0, "ignore_eos": True}


def keys_of(tmp_path, *lines: str) -> Keys:
    file = tmp_path / "keys"
    file.write_text("\n".join(lines))
    return Keys.read(None, file)


def test_terms_stand_behind_the_key(tmp_path):
    keys = keys_of(tmp_path, "ada secret-of-ada weight=2 tokens-per-minute=600 burst=30 running=3 open=9",
                   "alan secret-of-alan")  # fmt: skip
    assert keys.terms == {"ada": Terms(2.0, 600.0, 30.0, 3, 9), "alan": Terms()}
    assert keys.tenant("Bearer secret-of-ada") == "ada" and "secret" not in repr(keys)
    shares = shares_of(keys)
    assert (shares["ada"].weight, shares["ada"].most_running, shares["alan"].weight) == (2.0, 3, 1.0)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("weight=0", "weight=0 must be above 0"),
        ("weight=inf", "weight=inf must be above 0"),
        ("weight=nan", "weight=nan must be above 0"),
        ("running=0", "running=0 must be at least 1"),
        ("running=1.5", "'running=1.5': give a whole number"),
        ("weight", "'weight': give a number"),
        ("tokens_per_minute=5", "'tokens_per_minute=5' is unknown: use weight=, tokens-per-minute="),
        ("tier=gold", "'tier=gold' is unknown"),
        ("weight=1 weight=2", "weight stands there twice"),
        ("burst=5", "burst says nothing without tokens-per-minute"),
    ],
)
def test_a_wrong_term_is_named_with_its_line(tmp_path, words, said):
    with pytest.raises(ValueError, match="line 2: ") as caught:
        keys_of(tmp_path, "# tenants", f"ada secret-of-ada {words}")
    assert said in str(caught.value)


@given(st.floats(0.1, 100), st.floats(1, 100), st.lists(st.tuples(st.floats(0, 5), st.integers(1, 300), st.booleans())))
def test_a_bucket_never_gives_more_than_its_rate(rate, burst, events):
    """After any time, tokens given <= burst + rate · time, plus what the last one owes beyond the burst."""
    now = 0.0
    bucket, given_out, largest = TokenBucket(rate, burst, lambda: now), 0.0, 0
    for passes, tokens, returns in events:
        now += passes
        wait_s = bucket.take(tokens)
        if wait_s == 0:
            unused = tokens // 2 if returns else 0
            bucket.put_back(unused)
            given_out, largest = given_out + tokens - unused, max(largest, tokens)
        else:
            before = now
            now += wait_s * (1 + 1e-9) + 1e-9
            assert bucket.take(tokens) == 0, "it said how long to wait"
            given_out, largest = given_out + tokens, max(largest, tokens)
            assert now > before
        assert given_out <= burst + rate * now + max(0, largest - burst) + 1e-6 * (1 + given_out)


def test_a_rate_is_refused_with_the_seconds_to_wait_and_unused_tokens_come_back(tmp_path):
    keys = keys_of(tmp_path, "ada secret-of-ada tokens-per-minute=60 burst=100", "alan secret-of-alan")
    with running(engine(), keys=keys) as found:

        def post(headers, **asked):
            return httpx.post(f"{found.url}/v1/completions", json=ASKED | asked, headers=headers, timeout=60)

        found.api.admission.buckets["ada"]._clock = lambda: 0.0  # no time passes
        found.api.admission.buckets["ada"]._filled = 0.0
        stopped = post(ADA, max_tokens=80, stop=["e", " ", "\n"])
        assert stopped.status_code == 200
        used = stopped.json()["usage"]["total_tokens"]
        assert used < 60 and found.api.admission.buckets["ada"].level == 100 - used
        refused = post(ADA, max_tokens=96)
        assert refused.status_code == 429 and refused.json()["error"]["code"] == "rate_limit_exceeded"
        assert refused.headers["retry-after"] == str(used), "a token a second"
        assert post(ALAN, max_tokens=96).status_code == 200
        assert post(ADA, max_tokens=5).status_code == 200
        found.idle()


def test_what_each_tenant_used_is_told_to_prometheus(tmp_path):
    lines = ("ada secret-of-ada weight=2", "alan secret-of-alan running=1", "operator secret-of-operator")
    keys = keys_of(tmp_path, *lines)
    made: list[LLM] = []
    steps = lambda: float(len(made[0].records)) if made else 0.0  # noqa: E731
    llm = engine(scheduler=partial(FairScheduler, shares=shares_of(keys), clock=steps))
    made.append(llm)
    with running(llm, keys=keys) as found:
        for headers, n in ((ADA, 1), (ALAN, 1), (ALAN, 2)):
            answer = httpx.post(f"{found.url}/v1/completions", json=ASKED | {"n": n}, headers=headers, timeout=60)
            assert answer.status_code == (400 if n == 2 else 200), "n 2 is more than its cap of 1"
        text = httpx.get(f"{found.url}/metrics", headers=OPERATOR).text
        own = httpx.get(f"{found.url}/metrics", headers=ADA).text
        assert 'tenant="ada"' in own and "alan" not in own and 'minillm_kv_blocks{model="draft"}' in own
        assert value(own, "minillm_tokens_total", "ada", 'kind="answer",') == 16
        for tenant in ("ada", "alan"):
            passes = 16 - 1  # after the first step it holds a block for its 4 tokens, and later one more
            held = value(text, "minillm_block_seconds_total", tenant)
            assert passes <= held <= 2 * passes
            assert value(text, "minillm_tenant_running_sequences", tenant) == 0
        ada = (1 + 2 * 2) + (4 + 2 * 16) / 2  # lifted to what the server's warm-up had; then its own, by its weight
        assert value(text, "minillm_fair_counter", "ada") == ada
        assert value(text, "minillm_fair_counter", "alan") == ada + 4 + 2 * 16
        assert value(text, "minillm_tokens_total", "alan", 'kind="answer",') == 16
        found.idle()


def value(text: str, name: str, tenant: str, more: str = 'model="draft",') -> float:
    (line,) = [line for line in text.splitlines() if line.startswith(f'{name}{{{more}tenant="{tenant}"}}')]
    return float(line.rsplit(" ", 1)[1])
